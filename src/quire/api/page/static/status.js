// The header's account of the server: the chosen model and its state, whether it answers, the API key.

import { enterKey, forgetKey, hasKey, models, onContact, onModels } from "./api.js";
import { h } from "./dom.js";

const [OFTEN_MS, SELDOM_MS] = [500, 5000];
const TROUBLE = { gone: "not reachable", key: "needs an API key" };

export class Status {
  /** `listed` gets the models, whenever what the server says of them has changed. */
  constructor(root, chat, listed) {
    this.root = root;
    this.chat = chat;
    this.parameters = chat.parameters;
    this.listed = listed;
    this.contact = "ok";
    this.running = false;
    this.name = h("span", { class: "model-name" });
    this.choice = h("select", { class: "model-name", "aria-label": "Model", hidden: true, onchange: () => this.choose(this.choice.value) });
    this.words = h("span", { class: "words", role: "status" });
    this.key = h("button", { type: "button", hidden: true, onclick: () => this.changeKey() });
    this.dot = h("span", { class: "dot", "aria-hidden": "true", hidden: true });
    root.append(this.dot, this.name, this.choice, this.words, this.key);
    onContact((contact) => this.heard(contact));
    onModels((list) => this.show(list));
    document.addEventListener("visibilitychange", () => this.poll());
  }

  /** An answer begins or ends: its model may be loaded for it. */
  turn(running) {
    this.running = running;
    this.poll();
  }

  /** Asks for the models, now and from time to time; without a key, no more until one is given. */
  async poll() {
    clearTimeout(this.timer);
    if (document.visibilityState !== "visible") return;
    try {
      await models();
    } catch { /* the header says it already */ }
    clearTimeout(this.timer);
    const unsettled = this.running || this.contact === "gone" || this.parameters.list.some(({ state }) => ["loading", "unloading"].includes(state));
    if (this.contact !== "key") this.timer = setTimeout(() => this.poll(), unsettled ? OFTEN_MS : SELDOM_MS);
  }

  show(list) {
    const said = JSON.stringify(list.map(({ id, state, progress, problem, modalities, sampling_defaults, kv_formats }) => [id, state, progress, problem, modalities, sampling_defaults, kv_formats]));
    if (said === this.said) return;
    this.said = said;
    this.listed(list);
    const names = list.map(({ id }) => id);
    if (names.join() !== Array.from(this.choice.options, ({ value }) => value).join()) this.choice.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    this.draw();
  }

  choose(name) {
    this.chat.choose(name);
    this.draw();
  }

  heard(contact) {
    if (contact === this.contact) return;
    const back = contact === "ok" && this.contact === "key";
    this.contact = contact;
    this.draw();
    if (back) this.poll();
    if (contact === "ok") this.chat.pickUp();
  }

  draw() {
    const { model, list } = this.parameters;
    const trouble = TROUBLE[this.contact];
    this.root.dataset.state = trouble ? this.contact : model?.state ?? "";
    this.dot.hidden = !trouble && !model;
    this.name.textContent = model?.id ?? (trouble ? "Server" : "");
    this.name.hidden = list.length > 1;
    this.choice.hidden = list.length < 2;
    this.choice.value = model?.id ?? "";
    const words = trouble ?? model?.state ?? "";
    this.words.title = model?.problem ?? "";
    if (this.words.textContent !== words) this.words.textContent = words;
    this.key.textContent = this.contact === "key" ? "Enter key" : "Forget key";
    this.key.hidden = this.contact !== "key" && !hasKey();
    this.key.className = this.contact === "key" ? "main" : "quiet";
  }

  async changeKey() {
    if (this.contact !== "key") {
      forgetKey();
      location.reload();
    } else if (await enterKey()) await this.poll();
  }
}
