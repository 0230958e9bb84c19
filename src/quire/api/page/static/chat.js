// The chat: the open conversation's messages, where one writes, and the answers that run.

import { chooseModels, compare } from "./compare.js";
import { Composer } from "./composer.js";
import { $, announce, h, iconButton } from "./dom.js";
import { exported } from "./export.js";
import { titled } from "./files.js";
import { failed, MessageView } from "./message.js";
import { Parameters } from "./parameters.js";
import { requestOf } from "./request.js";
import { isEmpty, isUnfinished, prepare, Run } from "./run.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";
import * as tree from "./tree.js";

const LONGEST_TITLE = 60; // characters
const EXAMPLES = ["What is 27 plus 45?", "Count from 1 to 20.", "What is the capital of France?"];

/** A conversation's title: the beginning of its first message, cut between words. */
function titleOf({ content, files }) {
  const text = (content || titled(files)).replace(/\s+/g, " ").trim();
  return text.length <= LONGEST_TITLE ? text : `${text.slice(0, LONGEST_TITLE).replace(/\s\S*$/, "")}…`;
}

export class Chat {
  constructor(root, side, leaveDrawer, turn) {
    this.turn = turn;
    this.runs = new Map(); // by the ids of the messages that are written
    this.asked = new Set(); // ids of the answers that this tab asked for, and no other tab
    this.parameters = new Parameters(() => this.conversations.includes(this.current) && this.keep(this.current));
    this.composer = new Composer((text, files) => this.send(text, files), () => this.stop(), () => this.editLast(), (submit) => this.askSeveral(submit));
    this.sidebar = new Sidebar(side, {
      open: (conversation) => { this.open(conversation); leaveDrawer(); },
      remove: (conversation) => this.remove(conversation),
      rename: (conversation, title) => this.rename(conversation, title),
      take: (conversations) => this.take(conversations),
      runs: (conversation) => this.runsOf(conversation).length > 0,
    });
    this.log = h("div", { class: "messages", role: "log", "aria-label": "Messages", "aria-live": "off" });
    this.scroller = h("div", { class: "scroller", tabindex: "-1", onscroll: () => this.scrolled() }, this.log);
    for (const late of ["load", "loadedmetadata"]) this.log.addEventListener(late, () => this.follow(), true); // pictures and films grow
    this.title = h("h1", { class: "title", dir: "auto" });
    const bar = h("div", { class: "chat-bar" }, this.title,
      iconButton("tune", "Parameters", () => this.parameters.show()),
      iconButton("save", "Export conversation", () => exported(this.current)));
    root.append(bar, this.scroller, this.composer.node);
    $(".skip").addEventListener("click", (event) => {
      event.preventDefault();
      this.composer.field.focus();
    });
    this.views = [];
    this.redraw = () => {}; // of answers that stand side by side
  }

  models(list) {
    this.parameters.models(list);
    this.composer.use(this.parameters.model);
    this.composer.several.hidden = list.length < 2;
    this.showModels();
  }

  /** Tells the answers that wait of their models, which are loaded first where they are not. */
  showModels() {
    for (const view of this.views) {
      const model = this.runs.has(view.message.id) && this.parameters.list.find(({ id }) => id === view.message.model);
      if (!model) continue;
      view.message.trained = model.trained_length;
      view.load(model.state === "loaded" ? undefined : model);
    }
  }

  choose(model) {
    this.parameters.choose(model);
    this.models(this.parameters.list);
  }

  async begin() {
    this.conversations = await store.all();
    store.onChange((id, theirs, whole) => this.changedElsewhere(id, theirs, whole));
    addEventListener("hashchange", () => this.composer.catchFocus());
    addEventListener("pagehide", () => store.leave([...this.runs.values()].map((run) => run.leave())));
    addEventListener("pageshow", ({ persisted }) => persisted && this.pickUp());
    this.composer.kept(this.conversations.flatMap(({ messages }) => messages));
    const last = store.opened.read() ?? this.conversations[0]?.id;
    this.open(this.conversations.find(({ id }) => id === last) ?? null);
    this.pickUp();
  }

  /** Take up the answers that were left behind, where the server still has them. */
  pickUp() {
    for (const conversation of this.conversations ?? []) {
      for (const message of conversation.messages) {
        if (isUnfinished(message) && message.stream && !this.runs.has(message.id)) this.run(conversation, message, (run) => run.resume(() => requestOf(conversation, message)));
      }
    }
  }

  /** Another tab of this browser wrote to a conversation. */
  async changedElsewhere(id, theirs, whole) {
    let mine = this.conversations.find((each) => each.id === id);
    if (!theirs) {
      if (mine) this.forget(mine);
      return;
    }
    if (!mine) {
      const made = await whole();
      mine = this.conversations.find((each) => each.id === id); // heard of twice while it was read
      if (!mine && made) this.conversations.push(made);
    }
    if (mine) tree.merge(mine, theirs, ({ id: each }) => this.runs.has(each));
    this.order();
    if (mine === this.current) {
      this.show();
      for (const view of this.views) if (theirs.messages.some((each) => each.id === view.message.id)) view.draw();
      this.follow();
      this.pickUp();
    }
  }

  open(conversation) {
    this.current = conversation ?? tree.created();
    this.parameters.open(this.current);
    this.views = [];
    this.log.replaceChildren();
    this.show();
    this.list();
    this.toEnd();
    this.composer.open(conversation?.id);
    store.opened.write(this.current.id);
    this.composer.focus();
  }

  /** Show the messages of the chosen branches; those that are shown keep their nodes. */
  show() {
    const messages = tree.path(this.current);
    let same = 0;
    while (same < messages.length && this.views[same]?.message === messages[same]) same += 1;
    for (const old of this.views.splice(same)) old.node.remove();
    for (const message of messages.slice(same)) this.view(message);
    const left = failed(messages.filter(({ id }) => !this.runs.has(id)));
    for (const view of this.views) {
      const versions = tree.versions(this.current, view.message);
      view.place(versions.indexOf(view.message), versions.length);
      view.leaveOut(left.has(view.message));
      view.settle(messages[messages.indexOf(view.message) + 1]?.role === "tool");
    }
    if (this.views.length) $(".welcome", this.log)?.remove();
    else if (!$(".welcome", this.log)) this.log.append(this.welcome());
    this.composer.busy = this.runsOf(this.current).length > 0;
    this.showModels();
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
    this.sidebar.show(this.conversations, this.current);
  }

  /** The conversation that last changed stands first. */
  order() {
    this.conversations.sort((a, b) => b.updated - a.updated);
    this.list();
  }

  async remove(conversation) {
    if (!confirm(`Delete "${conversation.title}"?`)) return;
    this.forget(conversation);
    await store.remove(conversation.id);
    this.composer.catchFocus();
  }

  rename(conversation, { title, tags }) {
    Object.assign(conversation, { title, tags });
    this.keep(conversation);
    this.list();
  }

  /** Take in conversations of a file, and open the first. */
  take(conversations) {
    for (const each of conversations) {
      this.conversations.push(each);
      this.keep(each, each.messages, { fresh: true });
    }
    this.order();
    this.open(conversations[0]);
    announce(conversations.length === 1 ? "1 conversation imported." : `${conversations.length} conversations imported.`);
  }

  /** Edit the message of the user's that was sent last. */
  editLast() {
    if (!this.busy) this.views.findLast(({ message }) => message.role === "user")?.edit();
  }

  forget(conversation) {
    for (const run of this.runsOf(conversation)) run.stop();
    this.conversations = this.conversations.filter((each) => each !== conversation);
    if (conversation === this.current) this.open(this.conversations[0] ?? null);
    else this.list();
  }

  view(message) {
    const view = new MessageView(message, {
      edit: (text, files) => this.rewrite(message, text, files),
      again: () => this.again(message),
      more: () => this.answer(message),
      calls: () => this.callsOf(this.current, message),
      turn: (step) => this.turnTo(message, step),
      compare: () => this.compare(tree.versions(this.current, message)),
    });
    if (this.runs.has(message.id)) view.begin();
    this.views.push(view);
    this.log.append(view.node);
  }

  get busy() {
    return this.runsOf(this.current).length > 0;
  }

  send(text, files) {
    return this.ask(tree.path(this.current).at(-1), [this.written(text, files)]);
  }

  /** What was written, as a message that is about to be kept. */
  written(text, files) {
    const message = { id: tree.newId(), role: "user", content: text, files };
    this.composer.sending(message);
    return message;
  }

  /** Have several models answer what is written, and show their answers side by side. */
  askSeveral(submit) {
    chooseModels(this.parameters.list, this.parameters.model.id, (models) => submit((text, files) => {
      const { current } = this;
      const question = tree.add(current, tree.path(current).at(-1), this.written(text, files));
      const answers = models.map(() => tree.add(current, question, { role: "assistant" }));
      answers.forEach((answer, at) => prepare(answer, models[at])); // each is shown with the first
      answers.forEach((answer, at) => this.answer(answer, { added: [question], model: models[at] }));
      this.compare(answers);
    }));
  }

  compare(answers) {
    this.redraw = compare(answers);
  }

  /** How the calls of an answer are made, and where their results go. Only the tab that asked makes calls unasked. */
  callsOf(conversation, { id }) {
    const messages = tree.path(conversation);
    const asked = messages.findLastIndex(({ role }) => role === "user");
    return {
      allowed: (name) => this.asked.has(id) && conversation.allowed?.includes(name),
      allow: (name) => { conversation.allowed = [...(conversation.allowed ?? []), name]; },
      keep: (message) => this.keep(conversation, [message]),
      rounds: messages.slice(asked).filter(({ role }) => role === "assistant").length,
      send: (results) => this.results(conversation, results),
    };
  }

  results(conversation, results) {
    return this.ask(tree.path(conversation).at(-1), results.map((result) => ({ role: "tool", ...result })), conversation);
  }

  /** A message in other words: a new version of it, with what follows from there. */
  rewrite(message, text, files) {
    if (this.busy) return;
    const written = { id: tree.newId(), role: "user", content: text, files };
    this.composer.sending(written, message.id);
    this.ask(tree.before(this.current, message), [written]);
  }

  /** Add messages behind another one, and ask for an answer. */
  async ask(after, messages, conversation = this.current) {
    if (this.runsOf(conversation).length) return;
    for (const message of messages) after = tree.add(conversation, after, message);
    await this.answer(tree.add(conversation, after, { role: "assistant" }), { added: messages, conversation });
  }

  keep(conversation, messages = [], more = {}) {
    return store.keep(conversation, messages, more).catch(() => announce("The conversation could not be kept."));
  }

  /** Another answer: a new version; where there was none, in its place. */
  async again(message) {
    if (this.busy) return;
    if (isEmpty(message)) message.reasoning = "";
    else message = tree.add(this.current, tree.before(this.current, message), { role: "assistant" });
    await this.answer(message);
  }

  /** Show the version of a message that came before or after. */
  turnTo(message, step) {
    const versions = tree.versions(this.current, message);
    const shown = versions[versions.indexOf(message) + step];
    if (!shown) return;
    tree.choose(this.current, shown);
    this.keep(this.current);
    this.show();
    this.views.find((view) => view.message === shown)?.focusTurn(step);
  }

  runsOf(conversation) {
    return [...this.runs.values()].filter((run) => run.conversation === conversation);
  }

  stop() {
    for (const run of this.runsOf(this.current)) run.stop();
  }

  /**
   * Ask for an answer, or for the rest of one that was cut off. It is kept with its stream's id, and
   * with the messages that were added for it, before the server hears of it: a reload loses neither.
   */
  async answer(message, { added = [], conversation = this.current, model = this.parameters.model?.id } = {}) {
    prepare(message, model);
    const fresh = !this.conversations.includes(conversation);
    if (fresh) {
      this.conversations.push(conversation);
      conversation.title = titleOf(conversation.messages[0]);
      this.composer.conversation = conversation.id;
      store.opened.write(conversation.id);
    }
    this.asked.add(message.id);
    conversation.updated = Date.now();
    const kept = this.keep(conversation, [...added, message], { fresh });
    this.order();
    await this.run(conversation, message, async (run) => {
      await kept;
      this.composer.kept(added);
      return run.ask(() => requestOf(conversation, message));
    });
  }

  async run(conversation, message, act) {
    const run = new Run(conversation, message, () => this.grown(run));
    this.runs.set(message.id, run);
    this.viewOf(message)?.begin();
    this.refresh(conversation);
    if (conversation === this.current) {
      this.toEnd();
      this.composer.catchFocus();
    }
    this.turn(true);
    const there = await act(run);
    this.runs.delete(message.id);
    this.redraw(message);
    this.viewOf(message)?.end();
    this.turn(this.runs.size > 0);
    this.refresh(conversation);
    if (conversation !== this.current || there === false) return;
    this.follow();
    announce(message.error ? `Error: ${message.error}` : message.stopped ? "Stopped." : `Answer: ${message.content.slice(0, 400)}`);
    this.composer.catchFocus();
  }

  /** An answer of a conversation began or ended. */
  refresh(conversation) {
    this.list();
    if (conversation === this.current) this.show();
  }

  viewOf(message) {
    return this.views.find((view) => view.message === message);
  }

  grown(run) {
    this.redraw(run.message);
    const view = this.viewOf(run.message);
    if (!view) return;
    if (run.progress) view.read(run.progress);
    view.soon(() => this.follow());
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
