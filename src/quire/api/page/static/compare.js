// Answers side by side: the versions of one, or those of several models to one question while they grow.

import { h } from "./dom.js";
import { Markdown } from "./markdown.js";
import { figures, whose } from "./message.js";
import { isEmpty, isUnfinished } from "./run.js";

/** Shows answers in columns. Returns a function that draws a column anew, given its message; others are passed over. */
export function compare(answers) {
  const columns = new Map(answers.map((message, at) => [message, new Column(message, `${whose(message)}, version ${at + 1}`)]));
  const dialog = h("dialog", { class: "wide", "aria-label": "Versions side by side", onclose: () => { dialog.remove(); columns.clear(); } },
    h("div", { class: "columns" }, Array.from(columns.values(), ({ node }) => node)),
    h("form", { method: "dialog" }, h("div", { class: "row end" }, h("button", { class: "main" }, "Close"))));
  document.body.append(dialog);
  dialog.showModal();
  return (message) => columns.get(message)?.soon();
}

class Column {
  constructor(message, name) {
    this.message = message;
    const text = h("div", { class: "text", dir: "auto" });
    this.markdown = new Markdown(text);
    this.figures = h("p", { class: "hint" });
    this.node = h("section", { class: "column", tabindex: "0", "aria-label": name }, h("h3", {}, name), text, this.figures);
    this.draw();
  }

  /** Draws with the next frame, however many pieces come until then. */
  soon() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    this.markdown.show(this.message.content || this.message.error || "");
    const waits = isUnfinished(this.message) && isEmpty(this.message);
    this.figures.textContent = figures(this.message) || (waits ? "Waiting for the answer…" : "");
  }
}

/** Has models chosen to which one question goes; `ask` gets their names. */
export function chooseModels(models, chosen, ask) {
  const boxes = models.map(({ id }, at) => h("input", { type: "checkbox", value: id, checked: id === chosen || (at < 2 && models.length === 2) }));
  const wrong = h("p", { class: "error", role: "alert", hidden: true }, "Choose two models at least.");
  const form = h("form", { method: "dialog" },
    h("h2", {}, "Ask several models"),
    h("p", {}, "Their answers stand side by side, and stay as versions of one answer."),
    boxes.map((box) => h("label", { class: "check" }, box, box.value)), wrong,
    h("div", { class: "row end" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), h("button", { class: "main" }, "Ask")));
  const dialog = h("dialog", { class: "small", "aria-label": "Ask several models", onclose: () => dialog.remove() }, form);
  form.addEventListener("submit", (event) => {
    const names = boxes.filter(({ checked }) => checked).map(({ value }) => value);
    wrong.hidden = names.length > 1;
    if (names.length < 2) event.preventDefault();
    else ask(names);
  });
  document.body.append(dialog);
  dialog.showModal();
}
