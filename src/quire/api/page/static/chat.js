// The chat: conversations at the side, messages, and where one writes.

import { chunks } from "./api.js";
import { Composer } from "./composer.js";
import { $, announce, h, icon, iconButton } from "./dom.js";
import { exported } from "./export.js";
import { titled, withNames } from "./files.js";
import { failed, MessageView } from "./message.js";
import { Parameters } from "./parameters.js";
import * as store from "./store.js";

const EXAMPLES = ["What is 27 plus 45?", "Count from 1 to 20.", "What is the capital of France?"];

export class Chat {
  constructor(root, side, leaveDrawer, turn) {
    this.side = side;
    this.leaveDrawer = leaveDrawer;
    this.turn = turn;
    this.parameters = new Parameters();
    this.composer = new Composer((text, files) => this.send(text, files), () => this.stop());
    this.log = h("div", { class: "messages", role: "log", "aria-label": "Messages", "aria-live": "off" });
    this.scroller = h("div", { class: "scroller", tabindex: "-1", onscroll: () => this.scrolled() }, this.log);
    for (const late of ["load", "loadedmetadata"]) this.log.addEventListener(late, () => this.follow(), true); // pictures and films grow
    this.title = h("h1", { class: "title" });
    const bar = h("div", { class: "chat-bar" }, this.title,
      iconButton("tune", "Parameters", () => this.parameters.show()),
      iconButton("save", "Export conversation", () => exported(this.current)));
    root.append(bar, this.scroller, this.composer.node);
    $(".skip").addEventListener("click", (event) => {
      event.preventDefault();
      this.composer.field.focus();
    });
    this.views = [];
    this.running = this.answering = null;
  }

  models(list) {
    this.parameters.models(list);
    this.composer.use(this.parameters.model);
    this.showModel();
  }

  /** Tells the answer that waits of its model, which is loaded first where it is not. */
  showModel() {
    const { answering, parameters } = this;
    const model = parameters.list.find(({ id }) => id === answering?.message.model);
    if (!model) return;
    answering.message.trained = model.trained_length;
    answering.load(model.state === "loaded" ? undefined : model);
  }

  choose(model) {
    this.parameters.choose(model);
    this.models(this.parameters.list);
  }

  async begin() {
    this.conversations = await store.all();
    addEventListener("hashchange", () => this.composer.catchFocus());
    this.open(this.conversations[0] ?? null);
  }

  open(conversation) {
    this.stop();
    this.current = conversation ?? { id: crypto.randomUUID?.() ?? String(Math.random()), title: "New conversation", updated: Date.now(), messages: [] };
    this.views = [];
    this.log.replaceChildren();
    for (const message of this.current.messages) this.view(message);
    if (!this.views.length) this.log.append(this.welcome());
    this.markFailed();
    this.list();
    this.toEnd();
    this.composer.focus();
  }

  welcome() {
    const tries = EXAMPLES.map((text) => h("button", { type: "button", class: "try", onclick: () => this.send(text, []) }, text));
    return h("div", { class: "welcome" },
      h("img", { src: "/page/mark.svg", alt: "", width: 56, height: 56 }),
      h("h2", {}, "What shall we talk about?"),
      h("p", {}, "Everything stays between this browser and this server."),
      h("div", { class: "tries" }, tries));
  }

  list() {
    this.title.textContent = this.current.title;
    document.title = `${this.current.title} · Quire`;
    const entries = this.conversations.map((each) => h("li", { class: each.id === this.current.id ? "current" : null },
      h("button", { type: "button", class: "entry", "aria-current": each.id === this.current.id ? "true" : null, onclick: () => { this.open(each); this.leaveDrawer(); } }, each.title),
      iconButton("trash", `Delete ${each.title}`, () => this.remove(each))));
    this.side.replaceChildren(
      h("button", { type: "button", class: "new", onclick: () => { this.open(null); this.leaveDrawer(); } }, icon("plus"), "New conversation"),
      h("ul", { class: "entries" }, entries),
      h("p", { class: "hint" }, this.conversations.length ? "Kept in this browser only." : "Your conversations will stand here. They are kept in this browser only."));
  }

  async remove(conversation) {
    if (!confirm(`Delete "${conversation.title}"?`)) return;
    await store.remove(conversation.id);
    this.conversations = this.conversations.filter((each) => each !== conversation);
    if (conversation === this.current) this.open(this.conversations[0] ?? null);
    else {
      this.list();
      this.composer.catchFocus();
    }
  }

  view(message) {
    $(".welcome", this.log)?.remove();
    const view = new MessageView(message, {
      edit: (text, files) => this.rewrite(view, text, files),
      again: () => this.again(view),
      results: (results) => this.results(results),
    });
    this.views.push(view);
    this.log.append(view.node);
    return view;
  }

  async send(text, files) {
    if (this.running) return;
    this.add({ role: "user", content: text, files });
    await this.answer();
  }

  async results(results) {
    if (this.running) return;
    for (const result of results) this.add({ role: "tool", ...result });
    await this.answer();
  }

  add(message) {
    const { current } = this;
    current.messages.push(message);
    if (current.messages.length === 1) current.title = (message.content || titled(message.files)).replace(/\s+/g, " ").slice(0, 60);
    this.conversations = [current, ...this.conversations.filter((each) => each !== current)];
    this.keep();
    this.list();
    const view = this.view(message);
    this.toEnd();
    return view;
  }

  keep() {
    this.current.updated = Date.now();
    store.put(this.current).catch(() => announce("The conversation could not be kept."));
  }

  /** Drops a message and all that follow. */
  cut(view) {
    const index = this.views.indexOf(view);
    for (const old of this.views.splice(index)) old.node.remove();
    this.current.messages.splice(index);
    this.markFailed();
  }

  markFailed() {
    const left = failed(this.current.messages);
    for (const view of this.views) view.leaveOut(left.has(view.message));
  }

  async rewrite(view, text, files) {
    if (this.running) return;
    this.cut(view);
    this.add({ role: "user", content: text, files });
    await this.answer();
  }

  async again(view) {
    if (this.running) return;
    this.cut(view);
    await this.answer();
  }

  stop() {
    this.running?.abort();
  }

  async answer() {
    const conversation = this.current;
    const message = { role: "assistant", content: "", reasoning: "", calls: [], stats: null, model: this.parameters.model?.id };
    const body = this.parameters.body(conversation.messages);
    const view = this.add(message);
    const running = (this.running = new AbortController());
    this.composer.busy = true;
    this.composer.catchFocus();
    view.begin();
    this.answering = view;
    this.showModel();
    this.turn(true);
    const speed = new Speed();
    try {
      for await (const chunk of chunks(body, running.signal)) {
        if (chunk.prompt_progress) view.read(chunk.prompt_progress);
        take(message, chunk);
        message.stats = speed.stats(chunk, message.stats);
        view.soon(() => this.follow());
      }
    } catch (error) {
      if (error.name === "AbortError") message.stopped = true;
      else message.error = withNames(error.message, body.messages);
    }
    view.end();
    this.running = this.answering = null;
    this.composer.busy = false;
    this.turn(false);
    if (this.conversations.includes(conversation)) store.put(conversation).catch(() => {}); // else it was deleted meanwhile
    if (conversation === this.current) {
      this.markFailed();
      this.follow();
    }
    announce(message.error ? `Error: ${message.error}` : message.stopped ? "Stopped." : `Answer: ${message.content.slice(0, 400)}`);
    this.composer.catchFocus();
  }

  follow() {
    if (this.atEnd) this.toEnd();
  }

  /** An answer that grows is followed, however much a frame adds, until the user scrolls up. */
  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    if (scrollHeight - scrollTop - clientHeight < 120) this.atEnd = true;
    else if (scrollTop < this.top) this.atEnd = false;
    this.top = scrollTop;
  }

  toEnd() {
    this.atEnd = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}

/** An answer's figures, from when it is asked for. */
class Speed {
  constructor() {
    this.started = performance.now();
  }

  /** Those after a chunk, which tells of all tokens so far. */
  stats({ choices, usage }, before) {
    const now = performance.now();
    const { content, reasoning_content: thought, tool_calls: calls } = choices[0]?.delta ?? {};
    const tokens = usage?.completion_tokens ?? before?.tokens;
    if (content || thought || calls) this.first ??= { at: now, tokens };
    const counts = { tokens, prompt: usage?.prompt_tokens ?? before?.prompt, cached: usage?.prompt_tokens_details?.cached_tokens ?? before?.cached };
    if (!this.first) return counts;
    return {
      ...counts,
      first_s: (this.first.at - this.started) / 1000,
      write_s: (now - this.first.at) / 1000,
      first_tokens: this.first.tokens,
    };
  }
}

/** Adds what a chunk says to a message. */
function take(message, chunk) {
  const delta = chunk.choices[0]?.delta ?? {};
  message.reasoning += delta.reasoning_content ?? "";
  message.content += delta.content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  message.model = chunk.model ?? message.model;
  message.finish = chunk.choices[0]?.finish_reason ?? message.finish;
}
