// Where one writes: text that grows, files by drop, paste or choice, send and stop.

import { h, iconButton } from "./dom.js";
import { named, read, refusal, removable, taken } from "./files.js";
import { Recorder } from "./recorder.js";
import { prompts } from "./prompts.js";
import { drafts, settings } from "./store.js";

const NEW = "new"; // whose draft belongs to no conversation yet


export class Composer {
  /** `last` edits the message that was sent last; `several` asks many models, with what sends to them. */
  constructor(send, stop, last, several) {
    this.files = [];
    this.model = undefined; // not known yet
    this.submit = (event, to = send) => {
      const text = this.field.value.trim();
      if (this.isBusy || (!text && !this.files.length) || this.objections()) return;
      const files = this.files.splice(0);
      this.field.value = "";
      this.complain("");
      this.refresh();
      to(text, files);
    };
    this.field = h("textarea", { rows: 1, dir: "auto", placeholder: "Write a message", "aria-label": "Message", enterkeyhint: "send", oninput: () => { this.refresh(); this.draft(); } });
    this.thumbs = h("div", { class: "thumbs" });
    this.problem = h("p", { class: "error", role: "alert", hidden: true });
    this.file = h("input", { type: "file", multiple: true, hidden: true, onchange: () => { this.take([...this.file.files]); this.file.value = ""; } });
    this.attach = iconButton("attach", "", () => this.file.click());
    this.recorder = new Recorder((file) => this.take([file]), (problem) => this.complain(problem));
    this.sendButton = iconButton("send", "Send", this.submit, { class: "icon-button round" });
    this.stopButton = iconButton("stop", "Stop", stop, { class: "icon-button round", hidden: true });
    this.several = iconButton("columns", "Ask several models", () => several((to) => this.submit(null, to)), { hidden: true });
    const library = iconButton("book", "Prompts (/)", () => this.prompts());
    const row = h("div", { class: "write" }, this.attach, library, this.several, this.recorder.node, this.field, this.sendButton, this.stopButton);
    this.node = h("div", { class: "composer" }, this.problem, h("div", { class: "box" }, this.thumbs, row), this.file,
      h("p", { class: "hint" }, "Enter sends, Shift+Enter begins a line."));
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.submit(); }
      if (event.key === "Escape") stop();
      if (event.key === "/" && !this.field.value) { event.preventDefault(); this.prompts(); }
      if (event.key === "ArrowUp" && !this.field.value) { event.preventDefault(); last(); }
    });
    this.field.addEventListener("paste", (event) => event.clipboardData.files.length && (event.preventDefault(), this.take([...event.clipboardData.files])));
    for (const kind of ["dragover", "dragleave", "drop"]) addEventListener(kind, (event) => this.drag(event));
    this.refresh();
  }

  /** Goes over to a conversation, or to a new one, where what was not sent yet stands again. */
  open(id = NEW) {
    this.conversation = id;
    this.files = [];
    this.field.value = drafts.read(id) ?? "";
    this.refresh();
  }

  /** Opens the kept prompts; the chosen one is written behind what stands there. */
  prompts() {
    prompts(this.field.value, (text) => {
      this.field.value += text;
      this.refresh();
      this.draft();
      this.field.focus();
    });
  }

  /** Keeps what is written and not sent. */
  draft() {
    drafts.write(this.conversation, this.field.value);
  }

  /** What was written, here or in place of another message, goes away as a message, and is a draft until that is kept. */
  sending(message, draft = this.conversation) {
    settings.write("sending", { ...settings.read("sending", {}), [message.id]: { draft, text: drafts.read(draft) } });
  }

  /** Messages are kept: one that was being sent is no draft any more; what was written since is. */
  kept(messages) {
    const sending = settings.read("sending", {});
    const sent = messages.filter(({ id }) => sending[id]);
    for (const { id } of sent) {
      const { draft, text } = sending[id];
      if (drafts.read(draft) === text) drafts.write(draft, "");
      delete sending[id];
    }
    if (sent.length) settings.write("sending", sending);
  }

  drag(event) {
    if (![...(event.dataTransfer?.types ?? [])].includes("Files")) return;
    event.preventDefault();
    document.body.classList.toggle("dropping", event.type === "dragover");
    if (event.type === "drop") this.take([...event.dataTransfer.files]);
  }

  async take(files) {
    const problems = [];
    for (const file of files) {
      await read(file, this.model).then((each) => this.files.push(each), (error) => problems.push(error.message));
    }
    this.refresh();
    this.complain(problems.join(" "));
    this.focus();
  }

  /** Says which of the files the model does not take, which may be another one than before. */
  objections() {
    const problem = this.files.map((file) => refusal(file, this.model)).join(" ").trim();
    if (problem || this.objected) this.complain(problem);
    this.objected = problem;
    return problem;
  }

  /** The model that is asked next. */
  use(model) {
    this.model = model;
    this.objections();
    this.refresh();
  }

  complain(text) {
    this.problem.textContent = text;
    this.problem.hidden = !text;
  }

  set busy(value) {
    this.isBusy = value;
    this.sendButton.hidden = value;
    this.stopButton.hidden = !value;
    this.refresh();
  }

  refresh() {
    this.thumbs.replaceChildren(...removable(this.files, (file) => this.drop(file)));
    const kinds = taken(this.model);
    this.recorder.node.hidden = !this.model?.modalities?.includes("audio") || !Recorder.offered;
    this.attach.title = this.attach.ariaLabel = `Add ${named(kinds)}`;
    this.several.disabled = this.isBusy || !this.field.value.trim();
    this.sendButton.disabled = !this.field.value.trim() && !this.files.length;
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight, 220)}px`;
  }

  drop(file) {
    this.files.splice(this.files.indexOf(file), 1);
    this.objections();
    this.refresh();
    this.focus();
  }

  /** Where one goes on; not on a touch screen, whose keyboard would come up. */
  focus() {
    if (!matchMedia("(pointer: coarse)").matches) this.field.focus({ preventScroll: true });
  }

  /** Takes the focus where the control that had it is gone. */
  catchFocus() {
    const at = document.activeElement;
    if (!at || at === document.body || !at.getClientRects().length) this.focus();
  }
}
