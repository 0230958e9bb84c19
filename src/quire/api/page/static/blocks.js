// KV blocks as squares, by group and format: held by streams, kept for reuse, gone. They move as blocks do.

import { h } from "./dom.js";
import { bytes, count } from "./figures.js";

const [CELL, GAP, MOST_ROWS] = [9, 3, 10];
const SLOW = 0.18; // of the way to its colour that a square goes a frame

export class Blocks {
  constructor() {
    this.bar = h("div", { class: "budget", role: "img" });
    this.words = h("p", { class: "hint" });
    this.pools = h("div");
    this.groups = new Map(); // by model; "" where there is one alone
    this.pictures = new Map();
    this.empty = h("p", { class: "hint" });
    this.node = h("div", {}, this.bar, this.words, this.pools, this.empty);
    new ResizeObserver(() => this.pictures.forEach((picture) => picture.move())).observe(this.pools);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.pictures.forEach((picture) => picture.move()));
  }

  /** @param {?string[]} loaded names of the models that are loaded; null for a key that is not told */
  show(pools, sizes, budget, loaded) {
    let [live, kept] = [0, 0];
    for (const [name, picture] of this.pictures) {
      if (pools.has(name)) continue;
      picture.node.remove();
      this.pictures.delete(name);
    }
    for (const [owner, group] of this.groups) {
      if (group.querySelector("figure")) continue;
      group.remove();
      this.groups.delete(owner);
    }
    this.showEmpty([...pools.keys()], loaded);
    for (const [name, states] of pools) {
      live += states.live ?? 0;
      kept += states.kept ?? 0;
      if (!this.pictures.has(name)) {
        this.pictures.set(name, new Picture(name));
        this.group(ownerOf(name)).append(this.pictures.get(name).node);
      }
      this.pictures.get(name).show(states.live ?? 0, states.kept ?? 0, sizes.get(name) ?? 1);
    }
    const parts = [["live", live], ["kept", kept]].map(([kind, value]) => {
      const part = h("span", { class: kind });
      part.style.minWidth = value ? "2px" : "0";
      part.style.width = `${(100 * value) / Math.max(1, budget)}%`;
      return part;
    });
    this.bar.replaceChildren(...parts);
    const nothing = loaded ? "No model is loaded." : "The key that was given sees no blocks.";
    const words = budget ? `${bytes(live)} held by streams, ${bytes(kept)} kept for reuse, of ${bytes(budget)}.` : nothing;
    this.bar.setAttribute("aria-label", words);
    if (!budget) this.words.replaceChildren(nothing);
    else this.words.replaceChildren(h("span", { class: "key live" }), `${bytes(live)} held by streams `, h("span", { class: "key kept" }), `${bytes(kept)} kept for reuse `, h("span", { class: "key" }), `of ${bytes(budget)}`);
  }

  /** Where a model's pictures stand. */
  group(owner) {
    if (!this.groups.has(owner)) {
      this.groups.set(owner, h("div", { class: "pools" }, owner && h("h3", {}, owner), h("div", { class: "pictures" })));
      this.pools.append(this.groups.get(owner));
    }
    return this.groups.get(owner).lastChild;
  }

  /** Loaded models that have no blocks yet. */
  showEmpty(pools, loaded) {
    const owned = (name) => pools.some((pool) => ownerOf(pool) === name || ownerOf(pool) === "");
    const without = (loaded ?? []).filter((name) => !owned(name));
    this.empty.textContent = without.length ? `No blocks yet: ${without.join(", ")}.` : "";
    this.empty.hidden = !without.length;
  }
}

const POOL = /^(?:(.*): )?([^/]+)\/(.+?)(\/open)?$/; // the model where there are several, layers, format
const FORMATS = { plain: "not compressed" };
const ownerOf = (pool) => POOL.exec(pool)[1] ?? "";

class Picture {
  constructor(name) {
    const [, model, group, format, filling] = POOL.exec(name);
    this.model = model ? `${model}, ` : "";
    const words = [`Layer group ${group}`, FORMATS[format] ?? format, filling && "blocks being filled"];
    this.title = words.filter(Boolean).join(", ");
    this.canvas = h("canvas", { role: "img" });
    this.words = h("figcaption");
    this.node = h("figure", {}, this.words, this.canvas);
    this.levels = [];
    this.wanted = [];
  }

  show(live, kept, size) {
    const [held, spare] = [Math.round(live / size), Math.round(kept / size)];
    this.held = held;
    this.spare = spare;
    const words = `${this.model}${this.title}: ${count(held)} blocks held, ${count(spare)} kept, ${bytes(size)} each`;
    this.words.replaceChildren(h("strong", {}, this.title), ` ${count(held)} held, ${count(spare)} kept, ${bytes(size)} each`);
    this.canvas.setAttribute("aria-label", words);
    this.move();
  }

  move() {
    const wide = this.node.clientWidth;
    if (!wide || this.held === undefined) return;
    this.columns = Math.max(4, Math.floor((wide + GAP) / (CELL + GAP)));
    const each = Math.max(1, Math.ceil((this.held + this.spare) / (this.columns * MOST_ROWS)));
    const cells = Math.ceil(this.held / each) + Math.ceil(this.spare / each);
    const rows = Math.min(MOST_ROWS, Math.max(2, Math.ceil(cells / this.columns)));
    const live = Math.ceil(this.held / each);
    this.wanted = Array.from({ length: this.columns * rows }, (_, index) => (index < live ? [1, 0] : index < cells ? [0, 1] : [0, 0]));
    this.levels = this.wanted.map((_, index) => this.levels[index] ?? [0, 0]);
    const dots = devicePixelRatio || 1;
    const [width, height] = [this.columns * (CELL + GAP) - GAP, rows * (CELL + GAP) - GAP];
    Object.assign(this.canvas, { width: width * dots, height: height * dots });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    this.dots = dots;
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) this.levels = this.wanted.map((each) => [...each]);
    this.draw();
  }

  draw() {
    cancelAnimationFrame(this.frame);
    const style = getComputedStyle(this.canvas);
    const [empty, live, kept] = ["--cell", "--live", "--kept"].map((name) => style.getPropertyValue(name));
    const pen = this.canvas.getContext("2d");
    pen.setTransform(this.dots, 0, 0, this.dots, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    let moving = false;
    this.levels.forEach((level, index) => {
      const at = [(index % this.columns) * (CELL + GAP), Math.floor(index / this.columns) * (CELL + GAP)];
      for (const [colour, alpha] of [[empty, 1], [kept, level[1]], [live, level[0]]]) {
        pen.globalAlpha = alpha;
        pen.fillStyle = colour;
        pen.beginPath();
        pen.roundRect(...at, CELL, CELL, 2);
        pen.fill();
      }
      for (const side of [0, 1]) {
        const rest = this.wanted[index][side] - level[side];
        moving ||= Math.abs(rest) > 0.02;
        level[side] += rest * SLOW;
      }
    });
    if (moving) this.frame = requestAnimationFrame(() => this.draw());
  }
}
