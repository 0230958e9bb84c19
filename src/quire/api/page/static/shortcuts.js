// Keys that work wherever one is, and the sheet that lists them.

import { h } from "./dom.js";

const KEYS = [
  ["Ctrl+K", "Search conversations"],
  ["Ctrl+Shift+O", "New conversation"],
  ["Enter, Ctrl+Enter", "Send"],
  ["Shift+Enter", "Begin a line"],
  ["/", "Prompts that you keep, where nothing is written"],
  ["Arrow up", "Edit the last message, where nothing is written"],
  ["Esc", "Stop the answer; leave an edit"],
  ["Ctrl+/", "This sheet"],
];

/** Listen for the keys; `acts` are `search` and `begin`. */
export function listen(acts) {
  const on = { k: acts.search, "/": sheet };
  addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.altKey) return;
    const act = event.shiftKey ? event.key.toLowerCase() === "o" && acts.begin : on[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act();
  });
}

/** Show the keys. */
export function sheet() {
  const rows = KEYS.map(([keys, what]) => h("tr", {}, h("th", { scope: "row" }, h("kbd", {}, keys)), h("td", {}, what)));
  const dialog = h("dialog", { class: "small", "aria-label": "Keyboard shortcuts", onclose: () => dialog.remove() },
    h("h2", {}, "Keyboard shortcuts"), h("table", {}, h("tbody", {}, rows)),
    h("form", { method: "dialog" }, h("div", { class: "row end" }, h("button", { class: "main" }, "Close"))));
  document.body.append(dialog);
  dialog.showModal();
}
