// What is set for a conversation: the chosen model, system message, sampling, thoughts, tools; kept as presets.

import { h } from "./dom.js";
import { serverChoice } from "./mcp.js";
import { settings } from "./store.js";

export const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: "any" }],
  ["top_p", "Top p", { min: 0, max: 1, step: "any" }],
  ["top_k", "Top k", { min: 0, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: "any" }],
  ["repetition_penalty", "Repetition penalty", { min: 0.01, max: 10, step: "any" }],
  ["max_tokens", "Tokens at most", { min: 1, step: 1 }],
  ["seed", "Seed", { step: 1 }],
];
const THOUGHTS = [["", "Model's choice"], ["on", "Think first"], ["off", "Answer at once"]];

/** The values that hold for a conversation: its own, or those of new ones; the model is everybody's. */
export function valuesOf(conversation) {
  const general = settings.read("parameters", {});
  return { ...(conversation.parameters ?? general), model: general.model };
}

export class Parameters {
  /** `changed` is told when those of the open conversation change. */
  constructor(changed) {
    this.changed = changed;
    this.values = settings.read("parameters", {});
    this.list = [];
  }

  /** Go over to a conversation. */
  open(conversation) {
    this.conversation = conversation;
    this.values = valuesOf(conversation);
  }

  models(list) {
    this.list = list;
  }

  /** The chosen model; the first that is served if none is chosen, undefined before they are known. */
  get model() {
    return this.list.find((model) => model.id === this.values.model) ?? this.list[0];
  }

  choose(name) {
    this.values.model = name;
    settings.write("parameters", { ...settings.read("parameters", {}), model: name });
  }

  /** Show the dialogue; `chosen` is the preset whose values it shows. */
  show(chosen = "") {
    const { values, model } = this;
    const defaults = model?.sampling_defaults ?? {};
    const fields = new Map();
    const labelled = (name, label, field) => {
      fields.set(name, field);
      return h("label", {}, h("span", {}, label), field);
    };
    const choice = (name, options) => h("select", {}, options.map(([value, label]) => h("option", { value, selected: (values[name] ?? "") === value }, label)));
    const formats = (model?.kv_formats ?? []).filter((name) => /^(plain|page-\d)$/.test(name));
    if (!model?.kv_formats && values.kv) formats.push(values.kv); // chosen before; only a loaded model says what it offers
    const tools = h("textarea", { rows: 4, spellcheck: "false", value: values.tools ?? "", placeholder: '[{"type": "function", "function": {"name": …}}]' });
    const servers = serverChoice(values.servers ?? []);
    const now = () => ({ ...read(fields), ...(servers.chosen().length ? { servers: servers.chosen() } : {}) });
    const general = h("input", { type: "checkbox" });
    const presets = settings.read("presets", {});
    const preset = h("select", { "aria-label": "Preset", onchange: () => this.again(dialog, presets[preset.value] ?? {}, preset.value) },
      h("option", { value: "" }, "Presets"), Object.keys(presets).map((name) => h("option", { value: name, selected: name === chosen }, name)));
    const wrong = h("p", { class: "error", role: "alert", hidden: true });
    const form = h("form", { method: "dialog" },
      h("h2", {}, "Parameters of this conversation"),
      h("div", { class: "row" }, preset,
        h("button", { type: "button", onclick: () => this.save(dialog, presets, now()) }, "Save as preset"),
        h("button", { type: "button", disabled: !chosen, onclick: () => this.drop(dialog, presets, { name: chosen, values: now() }) }, "Delete preset")),
      labelled("system", "System message", h("textarea", { rows: 3, dir: "auto", value: values.system ?? "" })),
      h("div", { class: "grid" },
        NUMBERS.map(([name, label, more]) => labelled(name, label, h("input", { type: "number", value: values[name] ?? "", placeholder: defaults[name] ?? "default", ...more }))),
        labelled("thoughts", "Thoughts", choice("thoughts", THOUGHTS)),
        labelled("kv", "KV cache", choice("kv", [["", "Server's default"], ...formats.map((name) => [name, name])]))),
      h("p", { class: "hint", hidden: Boolean(model?.kv_formats) }, "Which KV cache formats it can use is known once the model has been loaded."),
      servers.node,
      labelled("tools", "Tools the model may call (a JSON list, as the API takes it). You type what a call returns.", tools),
      h("label", { class: "check" }, general, " Also for new conversations"),
      wrong,
      h("div", { class: "row end" },
        h("button", { type: "button", onclick: () => { this.keep({}, general.checked); dialog.close(); } }, "Defaults"),
        h("span", { class: "space" }),
        h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
        h("button", { class: "main" }, "Use")));
    const dialog = h("dialog", { "aria-label": "Parameters", onclose: () => dialog.remove() }, form);
    form.addEventListener("submit", (event) => {
      const problem = toolProblem(tools.value);
      wrong.hidden = !problem;
      wrong.textContent = problem;
      if (problem) event.preventDefault();
      else this.keep(now(), general.checked);
    });
    document.body.append(dialog);
    dialog.showModal();
  }

  /** Show the dialogue anew with other values, which are kept when they are used. */
  again(dialog, values, chosen) {
    dialog.close();
    const kept = this.values;
    this.values = { ...values, model: kept.model };
    this.show(chosen);
    this.values = kept;
  }

  save(dialog, presets, values) {
    const name = prompt("Name of the preset")?.trim();
    if (!name) return;
    settings.write("presets", { ...presets, [name]: values });
    this.again(dialog, values, name);
  }

  /** Delete a preset; the values that the dialogue shows stay. */
  drop(dialog, presets, { name, values }) {
    if (!confirm(`Delete the preset "${name}"?`)) return;
    const { [name]: gone, ...rest } = presets;
    settings.write("presets", rest);
    this.again(dialog, values);
  }

  /** Keep values for the open conversation, and for new ones if they are `general`. */
  keep(values, general) {
    this.conversation.parameters = values;
    this.values = { ...values, model: this.values.model };
    if (general) settings.write("parameters", this.values);
    this.changed();
  }
}

function toolProblem(text) {
  if (!text.trim()) return "";
  try {
    return Array.isArray(JSON.parse(text)) ? "" : "Tools are a list: […].";
  } catch (error) {
    return `Tools are no JSON: ${error.message}`;
  }
}

function read(fields) {
  const values = {};
  for (const [name, field] of fields) {
    if (field.value.trim() !== "") values[name] = field.type === "number" ? Number(field.value) : field.value;
  }
  return values;
}
