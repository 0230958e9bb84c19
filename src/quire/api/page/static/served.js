// The models that are offered: what each is and holds, when it goes, and buttons to load and unload it.

import { ask, models } from "./api.js";
import { h } from "./dom.js";
import { bytes, count, loaded as howFar, seconds } from "./figures.js";

const BUTTONS = { loaded: "Unload", unloading: "Unload", loading: "Stop loading" };

export class Served {
  constructor() {
    this.cards = new Map();
    this.node = h("div", { class: "models" });
  }

  /** @param {boolean} shared whether the key is one of several, which cannot unload what others use */
  async refresh(shared) {
    this.shared = shared;
    this.show(await models());
  }

  show(list) {
    for (const model of list) {
      if (!this.cards.has(model.id)) {
        this.cards.set(model.id, new Card(model.id, () => this.refresh(this.shared)));
        this.node.append(this.cards.get(model.id).node);
      }
      this.cards.get(model.id).show(model, this.shared);
    }
  }

  /** Counts down until models go. */
  tick() {
    for (const card of this.cards.values()) card.tick();
  }
}

/** One model's. Its nodes stay, so that its button keeps the focus. */
class Card {
  constructor(name, changed) {
    this.name = name;
    this.changed = changed;
    this.failure = ""; // of the button's last use; said until it is used again, or the model is loaded
    this.badge = h("span");
    this.facts = h("dl", { class: "facts" });
    this.goes = h("dd");
    this.problem = h("p", { class: "error", role: "alert", hidden: true });
    this.button = h("button", { type: "button", onclick: () => this.change() });
    this.hint = h("p", { class: "hint" }, "Others use this server too: this key can load a model, not unload it.");
    this.node = h("div", { class: "model" },
      h("div", { class: "model-head" }, h("strong", {}, name), this.badge, h("span", { class: "space" }), this.button),
      this.facts, this.problem, this.hint);
  }

  show(model, shared) {
    const { state } = model;
    const loaded = state === "loaded";
    this.state = state;
    this.badge.className = `badge ${state}`;
    this.badge.textContent = state;
    this.goesAt = loaded && model.expires_s !== null ? performance.now() / 1000 + model.expires_s : null;
    this.goes.textContent = model.pinned ? "never by itself (pinned)" : model.requests ? "not while it is used" : "not by itself";
    this.facts.replaceChildren(...[
      ...(model.progress ? [fact("so far", howFar(model.progress))] : []),
      ...(model.model_type ? [fact("family", model.model_type), fact("context", context(model)),
        fact("computes in", model.dtype), fact("takes", model.modalities.join(", "))] : []),
      ...(loaded ? [fact("weights", bytes(model.weight_bytes)), fact("KV cache", `${bytes(model.kv_bytes)} at most`),
        fact("requests", count(model.requests)), [h("dt", {}, "unloads"), this.goes]] : []),
    ].flat());
    if (loaded) this.failure = "";
    this.say(model.problem || this.failure);
    this.button.textContent = BUTTONS[state] ?? "Load";
    this.button.setAttribute("aria-label", `${this.button.textContent} ${this.name}`);
    this.busy = state === "unloading";
    this.button.hidden = state in BUTTONS && shared;
    this.hint.hidden = !this.button.hidden;
    this.tick();
  }

  tick() {
    if (this.goesAt !== null) this.goes.textContent = `in ${seconds(Math.max(0, this.goesAt - performance.now() / 1000))}, unless it is asked`;
  }

  say(problem) {
    this.problem.hidden = !problem;
    this.problem.textContent = problem ?? "";
  }

  /** Not `disabled`, which would lose the keyboard's place. */
  set busy(busy) {
    this.button.setAttribute("aria-disabled", String(busy));
  }

  async change() {
    if (this.button.getAttribute("aria-disabled") === "true") return;
    const path = this.state in BUTTONS ? "/models/unload" : "/models/load";
    this.busy = true;
    this.failure = "";
    await ask(path, { body: { model: this.name } }).catch((error) => {
      this.failure = error.message;
      this.say(this.failure);
    });
    await this.changed().catch(() => {}); // the poll says why the server does not answer
  }
}

/** How many tokens it takes, and how many of them it knows from its training where these are fewer. */
const context = ({ context_length: most, trained_length: trained }) => `${count(most)} tokens${trained < most ? `, trained on ${count(trained)}` : ""}`;

const fact = (name, value) => [h("dt", {}, name), h("dd", {}, value)];
