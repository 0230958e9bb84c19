// One message: thoughts folded, calls shown, and what one can do with it.

import { copyButton, h, icon, iconButton } from "./dom.js";
import { player, removable } from "./files.js";
import { count, loaded, rate, seconds, share } from "./figures.js";
import { codeBlock, Markdown } from "./markdown.js";
import { callForm } from "./mcp.js";
import { isEmpty, isUnfinished } from "./run.js";
import { drafts } from "./store.js";

const LONG = { characters: 2500, lines: 40 }; // of a message that is folded

/** Whose words a message has; an answer is headed by its model's name. */
export const whose = ({ role, model }) => ({ user: "You", assistant: model ?? "Model", tool: "Tool result" })[role];

export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.text = h("div", { class: "text", dir: "auto" });
    this.markdown = message.role === "assistant" ? new Markdown(this.text) : null;
    this.above = h("div");
    this.below = h("div");
    this.stats = h("span", { class: "stats" });
    this.turns = h("span", { class: "turns", hidden: true },
      this.older = iconButton("older", "Older version", () => actions.turn(-1)),
      this.turnText = h("span", { class: "turn" }),
      this.newer = iconButton("newer", "Newer version", () => actions.turn(1)),
      message.role === "assistant" && iconButton("columns", "Compare versions", actions.compare));
    this.foot = h("footer", { class: "foot" }, this.feet());
    this.who = h("div", { class: "who" });
    this.node = h("article", { class: `message ${message.role}` }, this.who, this.above, this.text, this.below, this.foot);
    this.continueButton = h("button", { type: "button", class: "continue", onclick: actions.more }, "Continue");
    this.waiting = false;
    this.answered = false;
    this.end();
  }

  begin() {
    this.streaming = true;
    this.node.setAttribute("aria-busy", "true");
    this.draw();
  }

  /** Shows how far the model is that is loaded only now; undefined for one that is not. */
  load(model) {
    if (!model && !this.loading) return;
    if (model) this.message.waited = true;
    this.loading = model && (this.loading ?? new Waiting(`Loading ${model.id}`));
    if (model?.progress) this.loading.show(model.progress, loaded(model.progress));
    this.draw();
  }

  /** Shows how much of the prompt is read. */
  read({ processed, total, cache, left_ms: left }) {
    this.promptTokens = total;
    this.reading ??= new Waiting("Reading the prompt");
    const known = cache ? `, ${count(cache)} from the cache` : "";
    this.reading.show({ stage: "prompt", done: processed, total }, `${count(processed)} of ${count(total)} tokens (${share(processed, total)}${known})`, left === null ? null : left / 1000);
    this.draw();
  }

  /** Draws with the next frame, however many pieces come until then. */
  soon(then) {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
      then();
    });
  }

  end() {
    this.streaming = false;
    this.reading = this.loading = undefined;
    this.node.removeAttribute("aria-busy");
    this.draw();
  }

  /** Says whether the calls of the message have their results. */
  settle(answered) {
    if (this.answered === answered) return;
    this.answered = answered;
    this.draw();
  }

  /** Says whether the message goes along with later requests. */
  leaveOut(left) {
    if (this.message.role !== "user") return;
    this.below.replaceChildren(...(left ? [h("p", { class: "note" }, "Not answered, so it is not sent along with later messages.")] : []));
  }

  /** Shows which version of its place the message is, where there are several. */
  place(at, count) {
    this.turns.hidden = count < 2;
    this.turnText.textContent = `${at + 1}/${count}`;
    this.turnText.setAttribute("aria-label", `Version ${at + 1} of ${count}`);
    this.older.disabled = at === 0;
    this.newer.disabled = at === count - 1;
  }

  /** Gives the focus to the button by which one came to this version. */
  focusTurn(step) {
    const [used, other] = step < 0 ? [this.older, this.newer] : [this.newer, this.older];
    (used.disabled ? other : used).focus();
  }

  draw() {
    const { message } = this;
    this.who.textContent = whose(message);
    this.node.setAttribute("aria-label", whose(message));
    if (message.role === "user") {
      this.above.replaceChildren(...(message.files ?? []).map(player));
    } else if (message.role === "assistant") this.thoughts();
    if (this.markdown) this.markdown.show(message.content);
    else this.text.textContent = message.content;
    this.text.hidden = !message.content;
    this.fold();
    this.pending = Boolean(this.streaming && !message.content && !message.reasoning && !message.calls.length);
    this.node.classList.toggle("pending", this.pending);
    this.figures();
    if (message.role === "assistant") this.after();
  }

  /** A long message of the user's, or of a tool, shows its beginning, until one asks for the rest. */
  fold() {
    const { role, content } = this.message;
    if (role === "assistant" || (content.length < LONG.characters && content.split("\n").length < LONG.lines)) return;
    this.text.classList.add("folded");
    const unfold = h("button", { type: "button", class: "quiet", "aria-expanded": "false", onclick: () => {
      const folded = this.text.classList.toggle("folded");
      unfold.textContent = folded ? "Show all" : "Show less";
      unfold.setAttribute("aria-expanded", String(!folded));
    } }, "Show all");
    this.unfold?.remove();
    this.text.after(this.unfold = unfold);
  }

  /** Four times a second at most while they change: digits that flicker cannot be read. */
  figures() {
    const now = performance.now();
    if (this.streaming && now - this.figuredAt < 250) return;
    this.figuredAt = now;
    this.stats.textContent = figures(this.message);
  }

  thoughts() {
    const { message } = this;
    if (!message.reasoning) return;
    if (!this.thought) {
      this.thoughtText = h("div", { class: "text", dir: "auto" });
      this.thoughtMarkdown = new Markdown(this.thoughtText);
      this.thoughtTitle = h("summary");
      this.thought = h("details", { class: "thought" }, this.thoughtTitle, this.thoughtText);
      this.above.append(this.thought);
    }
    const over = !this.streaming || message.content || message.calls.length;
    this.thoughtTitle.textContent = over ? "Thought about it" : "Thinking…";
    this.thoughtMarkdown.show(message.reasoning);
  }

  after() {
    const { message } = this;
    const nodes = message.calls.map((call) => callNode(call));
    if (message.calls.length && message.finish && !this.streaming && !this.answered) nodes.push(this.answers ??= callForm(message, this.actions.calls()));
    const waiting = this.loading ?? this.reading;
    if (this.pending && waiting) nodes.push(waiting.node);
    const tokens = message.stats?.prompt ?? this.promptTokens;
    if (tokens > message.trained) nodes.push(h("p", { class: "note" }, `This prompt has ${count(tokens)} tokens; the model was trained on ${count(message.trained)}.`));
    if (message.error) nodes.push(h("p", { class: "error", role: "alert" }, message.error));
    if (message.stopped) nodes.push(h("p", { class: "note" }, "Stopped."));
    if (!this.streaming && isUnfinished(message)) nodes.push(h("p", { class: "note" }, isEmpty(message) ? "Not answered: the page was left or reloaded before." : "Cut off: the page was left or reloaded before the end."));
    if (!this.streaming && message.finish === "length") nodes.push(h("p", { class: "note" }, "Ended at the limit of tokens."));
    if (!this.streaming && canGoOn(message)) nodes.push(this.continueButton);
    this.below.replaceChildren(...nodes);
  }

  feet() {
    const { message, actions } = this;
    const copy = copyButton("Copy text", () => message.content);
    if (message.role === "user") return [this.turns, copy, iconButton("edit", "Edit and send again", () => this.edit())];
    if (message.role === "tool") return [];
    return [copy, iconButton("again", "Answer again", actions.again), this.turns, this.stats];
  }

  edit() {
    const files = [...(this.message.files ?? [])];
    const { id, content } = this.message;
    const field = h("textarea", { rows: 3, dir: "auto", "aria-label": "Edit message", value: drafts.read(id) ?? content, oninput: () => drafts.write(id, field.value) });
    const thumbs = h("div", { class: "thumbs" });
    const drop = (file) => {
      files.splice(files.indexOf(file), 1);
      showFiles();
      field.focus();
    };
    const showFiles = () => thumbs.replaceChildren(...removable(files, drop));
    const done = () => {
      drafts.write(id, "");
      form.replaceWith(this.text);
      this.above.hidden = this.foot.hidden = false;
      this.foot.lastChild.focus(); // the button that began it
    };
    const send = () => (field.value.trim() || files.length) && this.actions.edit(field.value.trim(), files);
    showFiles();
    const form = h("div", { class: "editing" }, thumbs, field, h("div", { class: "row end" },
      h("button", { type: "button", onclick: done }, "Cancel"),
      h("button", { type: "button", class: "main", onclick: send }, "Send again")));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") done();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    });
    this.text.replaceWith(form);
    this.above.hidden = this.foot.hidden = true;
    field.focus();
  }
}

/** Whether there is a rest to ask for: the text ends where the answer did not. */
const canGoOn = ({ role, content, calls, finish, error, stopped }) => role === "assistant" && content && !calls.length && (error || stopped || !finish || finish === "length");

/** The messages of turns without an answer. They are shown and not sent along: what the server refused once it would refuse again. */
export function failed(messages) {
  const found = new Set();
  for (const [at, message] of messages.entries()) {
    if (!(message.error || isUnfinished(message)) || !isEmpty(message)) continue;
    let first = at;
    while (first > 0 && messages[first].role !== "user") first -= 1;
    for (const each of messages.slice(first, at + 1)) found.add(each);
  }
  return found;
}

/** How far that has come for which an answer waits. */
class Waiting {
  constructor(what) {
    this.words = h("span", { class: "loading-words" });
    this.bar = h("progress", { hidden: true, max: 1, "aria-label": what });
    this.node = h("div", { class: "note loading" }, h("span", { role: "status" }, `${what}…`), this.words, this.bar);
  }

  /** Of what takes as long for each part, `left` (seconds; null is unknown) follows from what came. */
  show({ stage, done, total }, words, left = this.rest(stage, done, total)) {
    this.bar.hidden = false;
    this.words.textContent = left === null ? words : `${words}, ${seconds(Math.ceil(left))} left`;
    this.bar.value = total ? done / total : 0;
  }

  rest(stage, done, total) {
    const now = performance.now() / 1000;
    if (this.since?.stage !== stage) this.since = { stage, done, at: now };
    const [gone, came] = [now - this.since.at, done - this.since.done];
    return came > 0 && gone > 1 ? (gone * (total - done)) / came : null;
  }
}

function callNode(call) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch { /* not whole yet */ }
  return h("div", { class: "call" }, h("div", { class: "call-name" }, icon("tool"), call.name), codeBlock(shown, "json"));
}

/** Tokens after the first that a speed is told of: fewer may come in one piece. */
const FEWEST = 10;

/** What an answer took, in words. */
export function figures({ stats, waited }) {
  if (!stats) return "";
  const loading = waited ? ", loading the model included" : "";
  if (!stats.tokens) return stats.first_s === undefined ? "" : `first token after ${seconds(stats.first_s)}${loading} · written for ${seconds(stats.write_s)}`;
  const parts = [`${count(stats.tokens)} tokens`];
  const later = stats.tokens - (stats.first_tokens ?? 1);
  if (stats.write_s > 0 && later >= FEWEST) parts.push(`${rate(later / stats.write_s)} tokens/s`);
  if (stats.first_s !== undefined) parts.push(`first after ${seconds(stats.first_s)}${loading}`);
  parts.splice(0, parts.length, ...parts.map((each) => each.replaceAll(" ", "\u00a0")));
  parts.push(`${count(stats.cached)} of ${count(stats.prompt)} prompt tokens from the cache`);
  return parts.join("\u00a0· "); // a line never begins with a dot
}
