// The last two minutes of one figure.

import { h, svg } from "./dom.js";
import { count } from "./figures.js";

const [WIDTH, HEIGHT] = [119, 40];

export class Chart {
  constructor(label) {
    this.label = label;
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line", "vector-effect": "non-scaling-stroke" });
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, this.area, this.line);
    this.top = h("span", { class: "chart-top" });
    this.now = h("span", { class: "chart-now" });
    this.node = h("div", { class: "chart" }, this.now, h("div", { class: "plot" }, this.top, this.picture), h("div", { class: "axis", "aria-hidden": "true" }, h("span", {}, "2 min ago"), h("span", {}, "now")));
  }

  /** @param {number[]} values one a second, the last one now */
  show(values) {
    const most = nice(Math.max(1, ...values));
    const x = (index) => (WIDTH * index) / (values.length - 1);
    const points = values.map((each, index) => `${x(index)},${(HEIGHT - 1 - ((HEIGHT - 3) * each) / most).toFixed(2)}`);
    this.line.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M${x(0)},${HEIGHT}L${points.join("L")}L${WIDTH},${HEIGHT}Z`);
    this.top.textContent = count(most);
    this.now.textContent = count(values.at(-1));
    this.picture.setAttribute("aria-label", `${this.label}: ${values.at(-1)} now, ${Math.max(...values)} at most in the last two minutes`);
  }
}

/** The next of 1, 2, 5, 10, 20, ... */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= value);
}
