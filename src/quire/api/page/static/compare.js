// The versions of an answer side by side: of several models, or of one.

import { h } from "./dom.js";
import { Markdown } from "./markdown.js";
import { figures, whose } from "./message.js";

export function compare(versions) {
  const columns = versions.map((message, at) => {
    const text = h("div", { class: "text", dir: "auto" });
    new Markdown(text).show(message.content || message.error || "");
    const name = `${whose(message)}, version ${at + 1}`;
    return h("section", { class: "column", tabindex: "0", "aria-label": name }, h("h3", {}, name), text, h("p", { class: "hint" }, figures(message)));
  });
  const dialog = h("dialog", { class: "wide", "aria-label": "Versions side by side", onclose: () => dialog.remove() },
    h("div", { class: "columns" }, columns),
    h("form", { method: "dialog" }, h("div", { class: "row end" }, h("button", { class: "main" }, "Close"))));
  document.body.append(dialog);
  dialog.showModal();
}
