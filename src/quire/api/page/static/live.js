// The live view. Its one source is /metrics, as JSON: the figures that Prometheus reads, and the streams.

import { get } from "./api.js";
import { h } from "./dom.js";
import { Blocks } from "./blocks.js";
import { bytes, count, rate, seconds, share } from "./figures.js";
import { Chart } from "./chart.js";
import { Served } from "./served.js";

const EVERY_MS = 1000;
const MISSES = {
  "": "All but the last token were cached; the last one is always computed",
  new: "No earlier prompt begins like this one",
  "first difference": "Differs from an earlier prompt",
  "cached prefix ends": "Continues an earlier prompt",
  "still being written": "Another request was still computing the same beginning",
  evicted: "Was cached, then evicted to free memory",
  "snapshot missing": "Cached, but no state was kept at that place",
  off: "The prefix cache is off",
};
const DRAFTERS = {
  prediction: "the request's expected answer",
  cached: "earlier requests",
  ngram: "the text so far",
  mtp: "a head of the model",
  draft: "the draft model",
};
const ENDS = { stop: "done", length: "limit of tokens", loop: "repeated itself", abort: "stopped", error: "failed" };

export class Live {
  constructor(root) {
    this.root = root;
    this.speeds = new Map();
    this.tiles = h("dl", { class: "tiles" });
    this.written = new Chart("Tokens written a second");
    this.read = new Chart("Prompt tokens read a second");
    this.streams = h("div", { class: "table", tabindex: "0" });
    this.ended = h("div", { class: "table", tabindex: "0" });
    this.refused = h("div", { class: "table", tabindex: "0" });
    this.blocks = new Blocks();
    this.prefix = h("div");
    this.memory = h("div");
    this.drafts = h("div");
    this.served = new Served();
    this.problem = h("p", { class: "error", role: "alert", hidden: true });
    const card = (title, ...nodes) => h("section", { class: "card", "aria-label": title }, h("h2", {}, title), nodes);
    this.inner = h("div", { class: "live-inner" }, h("h1", { class: "unseen" }, "Live view of the server"), this.problem,
      card("Models", this.served.node), this.tiles,
      h("div", { class: "cards" },
        card("Tokens written a second", this.written.node), card("Prompt tokens read a second", this.read.node)),
      card("Streams", this.streams),
      card("Last requests", this.ended),
      this.refusedCard = card("Refused requests", this.refused),
      card("KV cache", this.blocks.node),
      h("div", { class: "cards" }, card("Shared beginnings", this.prefix), card("Memory", this.memory)),
      this.draftsCard = card("Guessed tokens", this.drafts));
    root.append(this.inner);
  }

  models(list) {
    this.names = list.map(({ id }) => id);
    this.served.show(list);
  }

  watch(on) {
    this.on = on;
    clearTimeout(this.timer);
    if (on) this.poll();
  }

  async poll() {
    if (document.visibilityState === "visible") {
      try {
        await this.show(await get("/metrics"));
        this.seenAt = Date.now();
        this.age("");
      } catch (error) {
        this.age(error.message);
      }
    }
    clearTimeout(this.timer);
    if (this.on) this.timer = setTimeout(() => this.poll(), EVERY_MS);
  }

  /** Figures that no longer hold are dimmed; the problem says since when. */
  age(problem) {
    this.inner.classList.toggle("stale", Boolean(problem));
    this.problem.hidden = !problem;
    if (!problem) return;
    const since = this.seenAt ? ` These figures are from ${new Date(this.seenAt).toLocaleTimeString()}, ${seconds(Math.round((Date.now() - this.seenAt) / 1000))} ago.` : "";
    this.problem.textContent = problem + since;
  }

  show({ metrics, streams, ended, refused, history }) {
    const samples = new Samples(metrics);
    this.written.show(history.written_tokens);
    this.read.show(history.read_tokens);
    this.showTiles(samples, history, streams, ended);
    this.showStreams(streams);
    this.showEnded(ended);
    this.showRefused(refused);
    this.blocks.show(samples.table("quire_kv_bytes", "pool", "state"), samples.map("quire_kv_block_bytes", "pool"), samples.one("quire_kv_budget_bytes"), samples.loaded());
    this.showPrefix(samples);
    this.showMemory(samples);
    this.showDrafts(samples);
    this.served.tick();
    return this.showStates(samples, streams);
  }

  /** Asks for the models again when one was loaded or unloaded, or is used by others than before. */
  async showStates(samples, streams) {
    const states = JSON.stringify([samples.metrics.quire_models, streams.map(({ id }) => id)]);
    if (states === this.states) return;
    this.states = states;
    await this.served.refresh(!samples.metrics.quire_models);
  }

  showTiles(samples, history, streams, ended) {
    const firsts = ended.filter(({ first_token_s: first }) => first !== null);
    const several = firsts.filter(({ generated_tokens: tokens }) => tokens > 1);
    const waiting = samples.one("quire_waiting_sequences");
    const reading = streams.filter((stream) => stream.first_token_s === null).length;
    const tile = (label, value, more) => h("div", { class: "tile" }, h("dt", {}, label), h("dd", {}, value, more && h("small", {}, more)));
    this.tiles.replaceChildren(
      tile("writing now", count(history.written_tokens.at(-1)), "tokens/s"),
      tile("running", count(samples.one("quire_running_sequences")), `${Math.max(0, reading - waiting)} being read`),
      tile("queue", count(waiting), "waiting"),
      tile(`first token${ofLast(firsts)}`, seconds(median(firsts.map((each) => each.first_token_s)))),
      tile(`between tokens${ofLast(several)}`, seconds(median(several.map((each) => (each.age_s - each.first_token_s) / (each.generated_tokens - 1))))),
      tile("paused to free memory", count(samples.one("quire_preemptions_total")), "requests"));
  }

  showStreams(streams) {
    const now = performance.now() / 1000;
    const speeds = new Map();
    const rows = streams.map((stream) => {
      const before = this.speeds.get(stream.id);
      const speed = before && now > before.at ? (stream.generated_tokens - before.tokens) / (now - before.at) : stream.generated_tokens / Math.max(stream.age_s - (stream.first_token_s ?? 0), 0.05);
      speeds.set(stream.id, { at: now, tokens: stream.generated_tokens, speed });
      return [stream, speed];
    });
    this.speeds = speeds;
    const most = Math.max(1, ...rows.map(([, speed]) => speed));
    if (!rows.length) {
      this.streams.replaceChildren(h("p", { class: "hint" }, "No request is running. Streams show here while they run."));
      return;
    }
    const several = new Set(this.names).size > 1;
    const head = [["#", "number"], ["model", "of-model"], ["state"], ["prompt"], ["cached"], ["written"], ["speed"], ["age", "age"]]
      .filter(([name]) => several || name !== "model").map(([name, kind]) => h("th", { scope: "col", class: kind }, name));
    this.streams.replaceChildren(h("table", { class: "streams" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows.map(([stream, speed]) => h("tr", {},
      h("td", { class: "number" }, stream.id),
      several && h("td", { class: "of-model", title: stream.model }, stream.model),
      h("td", {}, h("span", { class: stream.first_token_s === null ? "dot reading" : "dot" }), stateOf(stream)),
      h("td", {}, count(stream.prompt_tokens)),
      h("td", { title: why(stream.reuse) }, stream.reuse === null ? "–" : share(stream.cached_tokens, stream.prompt_tokens)),
      h("td", {}, count(stream.generated_tokens)),
      h("td", { class: "speed" }, meter(stream.first_token_s === null ? 0 : speed / most), stream.first_token_s === null ? "–" : `${rate(speed)}/s`),
      h("td", { class: "age" }, seconds(stream.age_s)))))));
  }

  showEnded(ended) {
    if (!ended.length) {
      this.ended.replaceChildren(h("p", { class: "hint" }, "None yet. What was asked shows here with its end, also where nobody was looking."));
      return;
    }
    const several = new Set(this.names).size > 1;
    const rows = ended.map((each) => [
      ["ended", "age", ago(each)],
      several && ["model", "of-model", each.model],
      ["prompt reused", "", `${each.reuse === null ? "–" : count(each.cached_tokens)} of ${count(each.prompt_tokens)}`],
      ["why not more", "why", each.reuse === null ? "Ended before it was read" : why(each.reuse)],
      ["written", "", count(each.generated_tokens)],
      ["first token", "age", seconds(each.first_token_s)],
      ["took", "age", seconds(each.age_s)],
      ["end", "age", ENDS[each.finish] ?? each.finish],
    ].filter(Boolean));
    this.ended.replaceChildren(table(rows),
      h("p", { class: "hint" }, "Times count from when a request is handed to its model, after the model was loaded."));
  }

  showRefused(refused) {
    this.refusedCard.hidden = !refused.length;
    if (!refused.length) return;
    const several = new Set(this.names).size > 1;
    this.refused.replaceChildren(table(refused.map((each) => [
      ["refused", "age", ago(each)],
      ["asked", "", each.path],
      several && ["model", "of-model", each.model ?? "–"],
      ["status", "", each.status],
      ["why", "why", each.message],
      ["times", "", count(each.count)],
    ].filter(Boolean))));
  }

  showPrefix(samples) {
    const all = samples.one("quire_prompt_tokens_total");
    const cached = samples.one("quire_cached_tokens_total");
    if (!all) {
      this.prefix.replaceChildren(h("p", { class: "hint" }, "No prompt was read yet."));
      return;
    }
    const misses = [...samples.map("quire_prefix_misses_total", "reason")].sort((a, b) => b[1] - a[1]);
    const most = Math.max(1, ...misses.map(([, value]) => value));
    this.prefix.replaceChildren(
      h("p", { class: "big" }, share(cached, all)),
      h("p", { class: "hint" }, `${count(cached)} of ${count(all)} prompt tokens were known already, since the models were loaded.`),
      h("p", { class: "hint", hidden: !misses.length }, "How requests' prompts began:"),
      h("ul", { class: "bars" }, misses.map(([reason, value]) => h("li", {},
        h("span", { class: "bar-name" }, MISSES[reason] ?? reason), meter(value / most), h("span", { class: "bar-value" }, count(value))))));
  }

  /** Of the tokens that steps verified, how many were right, by what guessed them. */
  showDrafts(samples) {
    const drafted = samples.map("quire_drafted_tokens_total", "drafter");
    const accepted = samples.map("quire_accepted_draft_tokens_total", "drafter");
    this.draftsCard.hidden = !drafted.size;
    const all = samples.one("quire_drafted_tokens_total");
    const right = samples.one("quire_accepted_draft_tokens_total");
    this.drafts.replaceChildren(
      h("p", { class: "big" }, share(right, all)),
      h("p", { class: "hint" }, `${count(right)} of ${count(all)} guessed tokens were right, since the models were loaded. Each saved a step.`),
      h("ul", { class: "bars" }, [...drafted].sort((a, b) => b[1] - a[1]).map(([drafter, value]) => h("li", {},
        h("span", { class: "bar-name" }, DRAFTERS[drafter] ?? drafter),
        meter((accepted.get(drafter) ?? 0) / Math.max(1, value)),
        h("span", { class: "bar-value" }, `${count(accepted.get(drafter) ?? 0)} of ${count(value)}`)))));
  }

  showMemory(samples) {
    const memory = samples.map("quire_memory_bytes", "what");
    if (memory.has("free")) memory.set("free", samples.least("quire_memory_bytes", "what", "free")); // each engine tells of the same machine
    const names = { arrays: "weights and cache", buffers: "kept buffers", process: "whole engine process", free: "free on the machine" };
    const most = Math.max(1, ...[...memory.values()]);
    if (!memory.size) {
      this.memory.replaceChildren(h("p", { class: "hint" }, samples.loaded() ? "No model is loaded." : "The key that was given sees no memory."));
      return;
    }
    this.memory.replaceChildren(h("ul", { class: "bars" }, Object.entries(names).filter(([what]) => memory.has(what)).map(([what, name]) => h("li", {},
      h("span", { class: "bar-name" }, name), meter(memory.get(what) / most), h("span", { class: "bar-value" }, bytes(memory.get(what)))))));
  }
}

const ago = ({ ended_s: since }) => `${seconds(Math.round(since))} ago`;

/** Of rows of cells: a column's name, its class and what stands there. */
const table = (rows) => h("table", { class: "streams" },
  h("thead", {}, h("tr", {}, rows[0].map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))),
  h("tbody", {}, rows.map((row) => h("tr", {}, row.map(([, kind, value]) => h("td", { class: kind }, value))))));

/** What a stream does; the share of a prompt that takes several steps to read. */
function stateOf({ first_token_s, read_tokens, prompt_tokens, left_s }) {
  if (first_token_s !== null) return "writing";
  const left = left_s === null ? "" : `, ${seconds(Math.ceil(left_s))} left`;
  return read_tokens ? `reading, ${share(read_tokens, prompt_tokens)}${left}` : "reading";
}

/** Why no more of a prompt was reused: for people, with the place where the server names one. */
function why(reuse) {
  const [, reason, place] = /^(.*?)(?: at token (\d+))?$/.exec(reuse ?? "");
  if (place && reason === "first difference") return `Cached up to token ${count(place)}, then different`;
  if (place && reason === "cached prefix ends") return `Goes on after token ${count(place)}, where one before ended`;
  if (place && reason === "still being written") return `Another request was still writing the same from token ${count(place)}`;
  return reuse === null ? "–" : MISSES[reuse] ?? reuse;
}

/** null of no values. */
function median(values) {
  const sorted = values.toSorted((a, b) => a - b);
  const middle = sorted.length >> 1;
  if (!sorted.length) return null;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

const ofLast = ({ length }) => (length > 1 ? `, median of the last ${length}` : length ? ", last request" : "");

function meter(part) {
  const fill = h("span");
  fill.style.width = `${Math.round(100 * Math.min(1, Math.max(0, part)))}%`;
  return h("span", { class: "meter", "aria-hidden": "true" }, fill);
}

const named = (labels, label) => (label === "pool" && labels.model ? `${labels.model}: ${labels.pool}` : labels[label]);

/** The samples of one answer of /metrics. */
class Samples {
  constructor(metrics) {
    this.metrics = metrics;
  }

  /** Of all models together. */
  one(name) {
    return (this.metrics[name] ?? []).reduce((sum, { value }) => sum + value, 0);
  }

  /** Of all models together, but for pools, which are a model's own. */
  map(name, label) {
    const found = new Map();
    for (const { labels, value } of this.metrics[name] ?? []) found.set(named(labels, label), (found.get(named(labels, label)) ?? 0) + value);
    return found;
  }

  /** The smallest value among those with this label. */
  least(name, label, wanted) {
    return Math.min(...this.metrics[name].filter(({ labels }) => labels[label] === wanted).map(({ value }) => value));
  }

  /** Names of the models that are loaded; null for a key that is not told. */
  loaded() {
    return this.metrics.quire_models?.filter(({ labels }) => labels.state === "loaded").map(({ labels }) => labels.model) ?? null;
  }

  table(name, row, column) {
    const rows = new Map();
    for (const { labels, value } of this.metrics[name] ?? []) {
      const name = named(labels, row);
      if (!rows.has(name)) rows.set(name, {});
      rows.get(name)[labels[column]] = value;
    }
    return rows;
  }
}
