// The one question for an API key.

import { h } from "./dom.js";

/** What the user gives; null for nothing. */
export function keyDialog(refused) {
  return new Promise((resolve) => {
    const field = h("input", { type: "password", name: "key", autocomplete: "off", required: true, "aria-label": "API key" });
    const form = h("form", { method: "dialog" },
      h("h2", {}, "API key"),
      h("p", {}, refused ? "The server does not know this key." : "This server asks for a key. It stays in this browser."),
      field,
      h("div", { class: "row end" },
        h("button", { type: "button", onclick: () => dialog.close("") }, "Not now"),
        h("button", { class: "main", value: "ok" }, "Use key")));
    const dialog = h("dialog", { class: "small", "aria-label": "API key" }, form);
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "ok" ? field.value.trim() : null);
    });
    document.body.append(dialog);
    dialog.showModal();
    field.focus();
  });
}
