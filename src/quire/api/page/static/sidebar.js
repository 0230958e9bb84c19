// The conversations at the side.

import { h, icon, iconButton } from "./dom.js";

export class Sidebar {
  /** `actions.runs` tells whether a conversation is being answered. */
  constructor(root, actions) {
    this.actions = actions;
    this.entries = h("ul", { class: "entries" });
    this.hint = h("p", { class: "hint" });
    root.append(h("button", { type: "button", class: "new", onclick: () => actions.open(null) }, icon("plus"), "New conversation"), this.entries, this.hint);
  }

  show(conversations, current) {
    this.entries.replaceChildren(...conversations.map((each) => this.entry(each, each === current)));
    this.hint.textContent = conversations.length ? "Kept in this browser only." : "No conversations yet. They are kept in this browser only.";
  }

  entry(conversation, isCurrent) {
    const { actions } = this;
    const runs = actions.runs(conversation);
    return h("li", { class: [isCurrent && "current", runs && "running"].filter(Boolean).join(" ") || null },
      h("button", { type: "button", class: "entry", dir: "auto", "aria-current": isCurrent ? "true" : null, onclick: () => actions.open(conversation) },
        runs && h("span", { class: "dot reading", role: "img", "aria-label": "Being answered" }), conversation.title),
      iconButton("trash", `Delete ${conversation.title}`, () => actions.remove(conversation)));
  }
}
