// Markdown as models write it, to nodes. Pictures are never loaded and HTML is shown as it is written.

import { Highlighted } from "./code.js";
import { $, copyButton, h } from "./dom.js";

const DEEPEST = 12;
const LONGEST_LABEL = 2000;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/s;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)(.*)$/s;
const QUOTE = /^ {0,3}> ?/;
const AUTOLINK = /https?:\/\/[^\s<>"'`]+/y;
const WORD = /[\p{L}\p{N}_]/u;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

/** Shows a growing text: what is as before keeps its nodes. */
export class Markdown {
  constructor(root) {
    this.root = root;
    this.shown = [];
  }

  show(text) {
    update(this.root, this.shown, blocks(text.split("\n"), 0));
  }
}

/** Shows blocks under a root where others are shown: the first that differs grows if it can, those behind it are new. */
function update(root, shown, wanted) {
  let same = 0;
  while (same < wanted.length && same < shown.length && wanted[same].raw === shown[same].raw) same += 1;
  const [old, now] = [shown[same], wanted[same]];
  if (old?.view.grow && old.kind === now?.kind) {
    old.view.grow(now);
    old.raw = now.raw;
    same += 1;
  }
  for (const { view } of shown.splice(same)) view.node.remove();
  for (const block of wanted.slice(same)) {
    const view = block.make(block);
    root.append(view.node);
    shown.push({ raw: block.raw, kind: block.kind, view });
  }
}

/** What a block is that is built anew when it changes. */
const fixed = (build) => ({ make: () => ({ node: build() }) });

/** A list or a table: its parts are blocks. */
class Parts {
  constructor({ shell, parts }) {
    this.node = shell();
    this.place = $("tbody", this.node) ?? this.node;
    this.shown = [];
    this.grow({ parts });
  }

  grow({ parts }) {
    update(this.place, this.shown, parts);
  }
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [end, what] = block(lines, at, depth);
    found.push({ raw: lines.slice(at, end).join("\n"), ...what });
    at = end;
  }
  return found;
}

const built = (lines, depth) => blocks(lines, depth).map((each) => each.make(each).node);

/** Where the block that begins at a line ends, and what it is: `make` gives its view, of a `kind` that grows also from an earlier state. */
function block(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const level = Math.min(6, heading[1].length + 2);
    return [at + 1, fixed(() => h(`h${level}`, {}, inline(withoutMarks(heading[2]))))];
  }
  if (RULE.test(line)) return [at + 1, fixed(() => h("hr"))];
  if (depth < DEEPEST) {
    if (QUOTE.test(line)) {
      let end = at;
      while (end < lines.length && QUOTE.test(lines[end])) end += 1;
      const inner = lines.slice(at, end).map((each) => each.replace(QUOTE, ""));
      return [end, fixed(() => h("blockquote", {}, built(inner, depth + 1)))];
    }
    if (ITEM.test(line)) return list(lines, at, depth);
  }
  if (line.includes("|") && isRuler(lines[at + 1])) return table(lines, at);
  return paragraph(lines, at);
}

function fenced(lines, at, [, fence, language]) {
  let end = at + 1;
  const closes = (each) => each.trim().startsWith(fence) && !each.trim().slice(fence.length).replaceAll(fence[0], "");
  while (end < lines.length && !closes(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  return [Math.min(end + 1, lines.length), { kind: `code ${language}`, make: (each) => new Code(each.text, language), text }];
}

class Code {
  constructor(text, language) {
    const copy = copyButton("Copy code", () => this.text);
    const bar = h("div", { class: "code-bar" }, h("span", {}, language || "text"), copy);
    const code = h("code");
    this.node = h("div", { class: "code" }, bar, h("pre", { tabindex: "0" }, code));
    this.highlighted = new Highlighted(code, language);
    this.grow({ text });
  }

  grow({ text }) {
    this.text = text;
    this.highlighted.show(text);
  }
}

export const codeBlock = (text, language) => new Code(text, language).node;

function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > indent.length + 1 || item[1].length < indent.length || /\d/.test(item[2]) !== ordered || RULE.test(lines[end])) break;
    const inside = item[1].length + item[2].length + Math.min(Math.max(item[3].length, 1), 4);
    const content = [item[4]];
    end += 1;
    while (end < lines.length && belongs(lines, end, item[1].length)) {
      content.push(lines[end].slice(Math.min(inside, lines[end].length - lines[end].trimStart().length)));
      end += 1;
    }
    items.push(content);
  }
  const start = ordered ? parseInt(mark, 10) : 1;
  const parts = items.map((each) => ({ raw: each.join("\n"), ...fixed(() => listItem(each, depth)) }));
  const shell = () => h(ordered ? "ol" : "ul", start === 1 ? {} : { start });
  return [end, { kind: `list ${ordered} ${start}`, make: (each) => new Parts(each), shell, parts }];
}

/** Whether a line goes on with an item that is indented so far. */
function belongs(lines, at, indent) {
  const line = lines[at];
  if (!line.trim()) return at + 1 < lines.length && /^ /.test(lines[at + 1]) && lines[at + 1].search(/\S/) > indent;
  if (line.search(/\S/) > indent) return !ITEM.test(line) || line.search(/\S/) > indent + 1;
  return Boolean(lines[at - 1].trim()) && !ITEM.test(line) && !FENCE.test(line) && !HEADING.test(line) && !RULE.test(line) && !QUOTE.test(line);
}

function listItem(lines, depth) {
  const task = /^\[([ xX])\] /.exec(lines[0]);
  const content = task ? [lines[0].slice(4), ...lines.slice(1)] : lines;
  const inner = built(content, depth + 1);
  if (inner.length && inner[0].tagName === "P") inner.splice(0, 1, ...inner[0].childNodes);
  const box = task && h("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": task[1] === " " ? "open" : "done" });
  return h("li", task ? { class: "task" } : {}, box, inner);
}

const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function isRuler(line) {
  return line !== undefined && line.includes("-") && cells(line).every((cell) => /^:?-+:?$/.test(cell));
}

function table(lines, at) {
  const sides = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "middle" : "right") : ""));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const row = (tag) => (line) => h("tr", {}, cells(line).map((cell, index) => h(tag, { class: sides[index] || null }, inline(cell))));
  const parts = lines.slice(at + 2, end).map((each) => ({ raw: each, ...fixed(() => row("td")(each)) }));
  const shell = () => h("div", { class: "table", tabindex: "0" }, h("table", {}, h("thead", {}, row("th")(lines[at])), h("tbody")));
  return [end, { kind: `table ${lines[at]} ${lines[at + 1]}`, make: (each) => new Parts(each), shell, parts }];
}

function paragraph(lines, at) {
  let end = at + 1;
  const ends = (line) => !line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
  while (end < lines.length && !ends(lines[end]) && !(lines[end].includes("|") && isRuler(lines[end + 1]))) end += 1;
  return [end, fixed(() => h("p", {}, inline(lines.slice(at, end).map((each) => each.trimStart()).join("\n"))))];
}

/** Nodes of a text within a block. */
export function inline(text, depth = 0) {
  const nodes = [];
  const missing = new Set(); // marks of which no closing one follows
  let plain = "";
  const push = (node) => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
    nodes.push(node);
  };
  for (let at = 0; at < text.length; ) {
    const found = text[at] === "\\" ? null : spanAt(text, at, depth, missing);
    if (found) {
      push(found[1]);
      at = found[0];
    } else if (text[at] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  if (plain) nodes.push(document.createTextNode(plain));
  return nodes;
}

/** The span that begins at a place, as where it ends and its node; null for plain text. */
function spanAt(text, at, depth, missing) {
  const char = text[at];
  if (char === "\n") return [at + 1, h("br")];
  if (char === "`") return codeSpan(text, at, missing);
  if (char === "<") {
    const br = /^<br\s*\/?>/i.exec(text.slice(at, at + 8));
    return br && [at + br[0].length, h("br")];
  }
  if (char === "h" && !WORD.test(text[at - 1] ?? "")) {
    AUTOLINK.lastIndex = at;
    const url = withoutEnd(AUTOLINK.exec(text)?.[0] ?? "");
    return url ? [at + url.length, link(url, [url])] : null;
  }
  if (depth > 6) return null;
  if (char === "[" || (char === "!" && text[at + 1] === "[")) return bracket(text, at, depth, missing);
  return marked(text, at, depth, missing);
}

// What models write may be long and hostile. A regular expression that repeats before `$` takes quadratic time; these do not.

/** A web address without the punctuation behind it. */
function withoutEnd(url) {
  let end = url.length;
  while (end > 0 && ".,;:!?)]*_".includes(url[end - 1])) end -= 1;
  return url.slice(0, end);
}

/** A heading without the marks that close it. */
function withoutMarks(text) {
  const trimmed = text.trimEnd();
  let end = trimmed.length;
  while (trimmed[end - 1] === "#") end -= 1;
  return end < trimmed.length && trimmed[end - 1] === " " ? trimmed.slice(0, end).trimEnd() : trimmed;
}

/** Code without the one blank at either end that sets it off from its marks. */
const unpadded = (text) => (text.startsWith(" ") && text.endsWith(" ") && text.trim() ? text.slice(1, -1) : text);

function codeSpan(text, at, missing) {
  let end = at;
  while (text[end] === "`") end += 1;
  const ticks = text.slice(at, end);
  if (missing.has(ticks)) return null;
  let close = text.indexOf(ticks, end);
  while (close >= 0 && text[close + ticks.length] === "`") {
    while (text[close] === "`") close += 1;
    close = text.indexOf(ticks, close);
  }
  if (close < 0) {
    missing.add(ticks);
    return null;
  }
  return [close + ticks.length, h("code", {}, unpadded(text.slice(end, close)))];
}

function bracket(text, at, depth, missing) {
  if (missing.has("](")) return null;
  const begin = text.indexOf("[", at) + 1;
  const length = text.slice(begin, begin + LONGEST_LABEL + 2).indexOf("](");
  if (length < 0) return null;
  const middle = begin + length;
  const end = text.indexOf(")", middle);
  if (end < 0) {
    missing.add("](");
    return null;
  }
  const url = text.slice(middle + 2, end).trim().split(/\s/)[0].replace(/^<|>$/g, "");
  const label = text.slice(begin, middle);
  const picture = text[at] === "!";
  return [end + 1, link(url, picture ? [`picture: ${label || url.slice(0, 80)}`] : inline(label, depth + 3))];
}

/** A link that leads where one sees; what is no web address stays text. */
function link(url, children) {
  if (!/^(https?:\/\/|mailto:)/i.test(url)) return h("span", { class: "no-link", title: url.slice(0, 200) }, children);
  return h("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow", title: url }, children);
}

function marked(text, at, depth, missing) {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at) || missing.has(mark)) continue;
    const begin = at + mark.length;
    if (/\s/.test(text[begin] ?? " ") || (mark[0] === "_" && WORD.test(text[at - 1] ?? ""))) continue;
    const end = closing(text, begin, mark);
    if (end < 0) missing.add(mark);
    else return [end + mark.length, h(tag, {}, inline(text.slice(begin, end), depth + 1))];
  }
  return null;
}

function closing(text, begin, mark) {
  for (let end = text.indexOf(mark, begin + 1); end >= 0; end = text.indexOf(mark, end + mark.length)) {
    const doubled = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
    const inWord = mark[0] === "_" && WORD.test(text[end + mark.length] ?? "");
    if (!doubled && !inWord && !/\s/.test(text[end - 1])) return end;
  }
  return -1;
}
