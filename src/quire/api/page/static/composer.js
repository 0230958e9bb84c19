// Where one writes: text that grows, pictures by drop, paste or choice, send and stop.

import { h, iconButton } from "./dom.js";

const LARGEST = 20 << 20;
const KINDS = /^image\/(png|jpeg|webp|gif|bmp|x-ms-bmp)$/; // that the server reads

export class Composer {
  constructor(send, stop) {
    this.images = [];
    this.pictures = false;
    this.submit = () => {
      const text = this.field.value.trim();
      if (this.isBusy || (!text && !this.images.length)) return;
      const images = this.images.splice(0);
      this.field.value = "";
      this.complain("");
      this.refresh();
      send(text, images);
    };
    this.field = h("textarea", { rows: 1, placeholder: "Write a message", "aria-label": "Message", enterkeyhint: "send", oninput: () => this.refresh() });
    this.thumbs = h("div", { class: "thumbs" });
    this.problem = h("p", { class: "error", role: "alert", hidden: true });
    this.file = h("input", { type: "file", accept: "image/png,image/jpeg,image/webp,image/gif,image/bmp", multiple: true, hidden: true, onchange: () => { this.take(this.file.files); this.file.value = ""; } });
    this.attach = iconButton("image", "Add pictures", () => this.file.click());
    this.sendButton = iconButton("send", "Send", this.submit, { class: "icon-button round" });
    this.stopButton = iconButton("stop", "Stop", stop, { class: "icon-button round", hidden: true });
    const row = h("div", { class: "write" }, this.attach, this.field, this.sendButton, this.stopButton);
    this.node = h("div", { class: "composer" }, this.problem, h("div", { class: "box" }, this.thumbs, row), this.file,
      h("p", { class: "hint" }, "Enter sends, Shift+Enter begins a line."));
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.submit(); }
      if (event.key === "Escape") stop();
    });
    this.field.addEventListener("paste", (event) => event.clipboardData.files.length && (event.preventDefault(), this.take(event.clipboardData.files)));
    for (const kind of ["dragover", "dragleave", "drop"]) addEventListener(kind, (event) => this.drag(event));
    this.refresh();
  }

  drag(event) {
    if (![...(event.dataTransfer?.types ?? [])].includes("Files")) return;
    event.preventDefault();
    document.body.classList.toggle("dropping", event.type === "dragover" && this.pictures);
    if (event.type === "drop") this.take(event.dataTransfer.files);
  }

  async take(files) {
    const problems = [];
    for (const file of files) {
      const problem = this.refusal(file);
      if (problem) problems.push(problem);
      else this.images.push(await dataUrl(file));
    }
    this.refresh();
    this.complain(problems.join(" "));
    this.focus();
  }

  /** Why a file is not taken; "" for a picture that is. */
  refusal({ name, size, type }) {
    if (!KINDS.test(type)) return `${name} is not a picture of a kind that the page sends: PNG, JPEG, WebP, GIF or BMP.`;
    if (!this.pictures) return `${name} is not sent: no model here takes pictures.`;
    return size > LARGEST ? `${name} is larger than 20 MB, the most that the page sends.` : "";
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
    this.thumbs.replaceChildren(...this.images.map((url, index) => h("span", { class: "thumb" },
      h("img", { src: url, alt: `picture ${index + 1}, not sent yet` }),
      iconButton("close", `Take picture ${index + 1} away`, () => { this.images.splice(index, 1); this.refresh(); this.focus(); }))));
    this.attach.hidden = !this.pictures;
    this.sendButton.disabled = !this.field.value.trim() && !this.images.length;
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight, 220)}px`;
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

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
