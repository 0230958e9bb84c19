// The conversations at the side: found by their words and tags, grouped by date, renamed, imported.

import { $, h, icon, iconButton } from "./dom.js";
import { read } from "./import.js";

const DAY_MS = 86_400_000;

export class Sidebar {
  /** `actions.runs` tells whether a conversation is being answered. */
  constructor(root, actions) {
    this.actions = actions;
    this.conversations = [];
    this.search = h("input", { type: "search", class: "search", placeholder: "Search (Ctrl+K)", "aria-label": "Search conversations", dir: "auto", oninput: () => this.draw() });
    this.tags = h("div", { class: "tags", role: "group", "aria-label": "Tags" });
    this.entries = h("div", { class: "entries" });
    this.hint = h("p", { class: "hint" });
    this.problem = h("p", { class: "error", role: "alert", hidden: true });
    this.file = h("input", { type: "file", accept: ".json,application/json", hidden: true, "aria-label": "File of conversations", onchange: () => this.take() });
    root.append(
      h("button", { type: "button", class: "new", onclick: () => actions.open(null) }, icon("plus"), "New conversation"),
      this.search, this.tags, this.entries, this.hint, this.problem, this.file,
      h("button", { type: "button", class: "quiet", onclick: () => this.file.click() }, "Import conversations"));
  }

  show(conversations, current) {
    Object.assign(this, { conversations, current });
    if (!$("input", this.entries)) this.draw(); // else a title is being written
  }

  draw() {
    const words = this.search.value.trim().toLowerCase();
    const found = this.conversations.filter((each) => !words || matches(each, words));
    const groups = Map.groupBy(found, ({ updated }) => dateGroup(updated));
    this.entries.replaceChildren(...Array.from(groups, ([name, all]) => h("section", { "aria-label": name },
      h("h2", { class: "group" }, name), h("ul", {}, all.map((each) => this.entry(each, each === this.current))))));
    this.showTags(words);
    this.search.hidden = !this.conversations.length;
    this.hint.textContent = !this.conversations.length ? "No conversations yet. They are kept in this browser only."
      : found.length ? "Kept in this browser only." : "No conversation has these words.";
  }

  /** The tags of all conversations; one that is pressed is searched for. */
  showTags(words) {
    const all = [...new Set(this.conversations.flatMap(tagsOf))].sort();
    this.tags.replaceChildren(...all.map((tag) => h("button", { type: "button", class: "tag", "aria-pressed": String(words === tag.toLowerCase()), onclick: () => {
      this.search.value = words === tag.toLowerCase() ? "" : tag;
      this.draw();
    } }, tag)));
  }

  entry(conversation, isCurrent) {
    const { actions } = this;
    const runs = actions.runs(conversation);
    return h("li", { class: [isCurrent && "current", runs && "running"].filter(Boolean).join(" ") || null },
      h("button", { type: "button", class: "entry", dir: "auto", "aria-current": isCurrent ? "true" : null, onclick: () => actions.open(conversation) },
        runs && h("span", { class: "dot reading", role: "img", "aria-label": "Being answered" }), conversation.title,
        tagsOf(conversation).map((tag) => h("small", { class: "hint" }, ` ${tag}`))),
      h("span", { class: "entry-actions" },
        iconButton("edit", `Rename ${conversation.title}`, ({ currentTarget }) => this.rename(conversation, currentTarget.closest("li"))),
        iconButton("trash", `Delete ${conversation.title}`, () => actions.remove(conversation))));
  }

  /** Has the title written in its place, with tags as words behind #; Escape leaves it as it was. */
  rename(conversation, item) {
    const before = [conversation.title, ...tagsOf(conversation)].join(" ");
    const field = h("input", { class: "rename", value: before, "aria-label": "Title and #tags", title: "Words that begin with # are tags", dir: "auto" });
    let ended = false;
    const end = (written) => {
      if (ended) return; // taking the field away takes its focus
      ended = true;
      field.remove();
      if (written && written !== before) this.actions.rename(conversation, { title: written.replace(TAG, "").trim() || conversation.title, tags: [...new Set(written.match(TAG) ?? [])].map((tag) => tag.trim()) });
      this.draw();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) end(field.value.trim());
      if (event.key === "Escape") end("");
    });
    field.addEventListener("blur", () => end(field.value.trim()));
    item.replaceChildren(field);
    field.select();
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
