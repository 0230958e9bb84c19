// The conversations at the side: found by their words and tags, grouped by date, renamed, imported.

import { $, h, icon, iconButton, place } from "./dom.js";
import { exportAll } from "./export.js";
import { read } from "./import.js";

const DAY_MS = 86_400_000;

export class Sidebar {
  /** `actions.runs` tells whether a conversation is being answered. */
  constructor(root, actions) {
    this.actions = actions;
    this.conversations = [];
    this.rows = new Map(); // by the ids of conversations
    this.groups = new Map(); // by their names
    this.search = h("input", { type: "search", class: "search", placeholder: "Search (Ctrl+K)", "aria-label": "Search conversations", dir: "auto", oninput: () => this.draw() });
    this.tags = h("div", { class: "tags", role: "group", "aria-label": "Tags" });
    this.entries = h("div", { class: "entries" });
    this.hint = h("p", { class: "hint" });
    this.problem = h("p", { class: "error", role: "alert", hidden: true });
    this.file = h("input", { type: "file", accept: ".json,application/json", hidden: true, "aria-label": "File of conversations", onchange: () => this.take() });
    this.exports = h("button", { type: "button", class: "quiet", onclick: () => exportAll(this.conversations) }, "Export all");
    root.append(
      h("button", { type: "button", class: "new", onclick: () => actions.open(null) }, icon("plus"), "New conversation"),
      this.search, this.tags, this.entries, this.hint, this.problem, this.file,
      h("button", { type: "button", class: "quiet", onclick: () => this.file.click() }, "Import conversations"), this.exports);
  }

  show(conversations, current) {
    Object.assign(this, { conversations, current });
    this.draw();
  }

  /** Bring the list up to date. Rows keep their nodes: an answer that streams draws often, also while one clicks. */
  draw() {
    const words = this.search.value.trim().toLowerCase();
    const found = this.conversations.filter((each) => !words || matches(each, words));
    const groups = Map.groupBy(found, ({ updated }) => dateGroup(updated));
    place(this.entries, Array.from(groups.keys(), (name) => this.group(name)));
    for (const [name, all] of groups) place($("ul", this.group(name)), all.map((each) => this.row(each)));
    for (const id of this.rows.keys()) if (!this.conversations.some((each) => each.id === id)) this.rows.delete(id);
    this.showTags(words);
    this.search.hidden = this.exports.hidden = !this.conversations.length;
    this.hint.textContent = !this.conversations.length ? "No conversations yet. They are kept in this browser only."
      : found.length ? "Kept in this browser only." : "No conversation has these words.";
  }

  group(name) {
    if (!this.groups.has(name)) this.groups.set(name, h("section", { "aria-label": name }, h("h2", { class: "group" }, name), h("ul")));
    return this.groups.get(name);
  }

  /** The tags of all conversations; one that is pressed is searched for. */
  showTags(words) {
    const known = new Map(Array.from(this.tags.children, (node) => [node.textContent, node]));
    const all = [...new Set(this.conversations.flatMap(tagsOf))].sort();
    place(this.tags, all.map((tag) => known.get(tag) ?? h("button", { type: "button", class: "tag", onclick: ({ currentTarget }) => {
      this.search.value = currentTarget.getAttribute("aria-pressed") === "true" ? "" : tag;
      this.draw();
    } }, tag)));
    for (const node of this.tags.children) node.setAttribute("aria-pressed", String(words === node.textContent.toLowerCase()));
  }

  /** The row of a conversation, as the conversation is now. */
  row(conversation) {
    if (this.rows.get(conversation.id)?.conversation !== conversation) this.rows.set(conversation.id, new Row(conversation, this));
    const row = this.rows.get(conversation.id);
    row.show(conversation === this.current, this.actions.runs(conversation));
    return row.node;
  }

  async take() {
    const [file] = this.file.files;
    this.file.value = "";
    try {
      this.actions.take(read(JSON.parse(await file.text())));
      this.problem.hidden = true;
    } catch (error) {
      this.problem.hidden = false;
      this.problem.textContent = error instanceof SyntaxError ? `${file.name} is no JSON.` : `${file.name}: ${error.message}`;
    }
  }
}

/** A conversation in the list: a button that opens it, and others that rename and delete it. */
class Row {
  constructor(conversation, { actions }) {
    this.conversation = conversation;
    this.actions = actions;
    this.dot = h("span", { class: "dot reading", role: "img", "aria-label": "Being answered" });
    this.title = h("span");
    this.tags = h("span");
    this.open = h("button", { type: "button", class: "entry", dir: "auto", onclick: () => actions.open(conversation) }, this.dot, this.title, this.tags);
    this.renames = iconButton("edit", "", () => this.rename());
    this.removes = iconButton("trash", "", () => actions.remove(conversation));
    this.buttons = h("span", { class: "entry-actions" }, this.renames, this.removes);
    this.node = h("li", {}, this.open, this.buttons);
  }

  show(isCurrent, runs) {
    const { title } = this.conversation;
    const tags = tagsOf(this.conversation);
    this.node.className = [isCurrent && "current", runs && "running"].filter(Boolean).join(" ");
    this.open.ariaCurrent = isCurrent ? "true" : null;
    this.dot.hidden = !runs;
    if (this.title.textContent !== title) this.title.textContent = title;
    if (this.tags.textContent !== tags.map((tag) => ` ${tag}`).join("")) this.tags.replaceChildren(...tags.map((tag) => h("small", { class: "hint" }, ` ${tag}`)));
    for (const [button, does] of [[this.renames, "Rename"], [this.removes, "Delete"]]) {
      button.title = `${does} ${title}`;
      button.setAttribute("aria-label", button.title);
    }
  }

  /** Has the title written in its place, with tags as words behind #; Escape leaves it as it was. */
  rename() {
    const { conversation } = this;
    const before = [conversation.title, ...tagsOf(conversation)].join(" ");
    const field = h("input", { class: "rename", value: before, "aria-label": "Title and #tags", title: "Words that begin with # are tags", dir: "auto" });
    let ended = false;
    const end = (written) => {
      if (ended) return; // taking the field away takes its focus
      ended = true;
      this.node.replaceChildren(this.open, this.buttons);
      if (written && written !== before) this.actions.rename(conversation, { title: written.replace(TAG, "").trim() || conversation.title, tags: [...new Set(written.match(TAG) ?? [])].map((tag) => tag.trim()) });
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) end(field.value.trim());
      if (event.key === "Escape") end("");
    });
    field.addEventListener("blur", () => end(field.value.trim()));
    this.node.replaceChildren(field);
    field.select();
  }
}

const TAG = /(?<!\S)#[\p{L}\p{N}_-]+/gu;
const tagsOf = ({ tags }) => tags ?? [];

const matches = ({ title, tags, messages }, words) => tags?.some((tag) => tag.toLowerCase() === words) || title.toLowerCase().includes(words) || messages.some(({ content }) => content?.toLowerCase().includes(words));

/** The name of the time in which a conversation was last used. */
function dateGroup(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY_MS) return "Yesterday";
  if (time >= today - 7 * DAY_MS) return "Last 7 days";
  if (time >= today - 30 * DAY_MS) return "Last 30 days";
  return new Date(time).toLocaleDateString("en", { month: "long", year: "numeric" });
}
