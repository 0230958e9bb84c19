// Prompts that the user keeps in this browser, to be used again.

import { h } from "./dom.js";
import { settings } from "./store.js";

/** Shows the kept prompts; `use` gets the text of the chosen one, `written` is what could be kept now. */
export function prompts(written, use) {
  const list = h("div", { class: "prompts" });
  const name = h("input", { placeholder: "Name", "aria-label": "Name of the prompt", required: true, dir: "auto" });
  const draw = () => {
    const kept = settings.read("prompts", {});
    list.replaceChildren(...Object.entries(kept).map(([title, text]) => h("div", { class: "row" },
      h("button", { type: "button", class: "prompt", dir: "auto", onclick: () => { dialog.close(); use(text); } }, h("strong", {}, title), h("span", { class: "hint" }, text.slice(0, 200))),
      h("button", { type: "button", "aria-label": `Delete ${title}`, onclick: () => change(({ [title]: gone, ...rest }) => rest) }, "Delete"))));
    if (!list.childElementCount) list.append(h("p", { class: "hint" }, "No prompts yet. Write one into the message box, and keep it here."));
  };
  const change = (to) => {
    settings.write("prompts", to(settings.read("prompts", {})));
    draw();
  };
  const keep = h("form", { class: "row", hidden: !written.trim() }, name, h("button", {}, "Keep what is written"));
  keep.addEventListener("submit", (event) => {
    event.preventDefault();
    change((kept) => ({ ...kept, [name.value.trim()]: written }));
    keep.hidden = true;
  });
  const dialog = h("dialog", { class: "small", "aria-label": "Prompts", onclose: () => dialog.remove() },
    h("h2", {}, "Prompts"), list, keep,
    h("form", { method: "dialog" }, h("div", { class: "row end" }, h("button", { class: "main" }, "Close"))));
  draw();
  document.body.append(dialog);
  dialog.showModal();
}
