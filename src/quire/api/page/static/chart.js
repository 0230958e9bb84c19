// The last two minutes of one figure.

import { h, svg } from "./dom.js";

const SAMPLES = 120;
const [WIDTH, HEIGHT] = [SAMPLES - 1, 40];

export class Chart {
  constructor(label) {
    this.label = label;
    this.values = [];
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line", "vector-effect": "non-scaling-stroke" });
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, this.area, this.line);
    this.top = h("span", { class: "chart-top" });
    this.now = h("span", { class: "chart-now" });
    this.node = h("div", { class: "chart" }, this.now, h("div", { class: "plot" }, this.top, this.picture), h("div", { class: "axis", "aria-hidden": "true" }, h("span", {}, "2 min ago"), h("span", {}, "now")));
  }

  add(value) {
    this.values = [...this.values, value].slice(-SAMPLES);
    const most = nice(Math.max(1, ...this.values));
    const x = (index) => WIDTH - (this.values.length - 1 - index);
    const points = this.values.map((each, index) => `${x(index)},${(HEIGHT - 1 - ((HEIGHT - 3) * each) / most).toFixed(2)}`);
    this.line.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M${x(0)},${HEIGHT}L${points.join("L")}L${WIDTH},${HEIGHT}Z`);
    this.top.textContent = most;
    this.now.textContent = Math.round(value);
    this.picture.setAttribute("aria-label", `${this.label}: ${Math.round(value)} now, ${Math.round(Math.max(...this.values))} at most in the last two minutes`);
  }
}

/** The next of 1, 2, 5, 10, 20, ... */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= value);
}
