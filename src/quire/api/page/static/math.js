// LaTeX in Markdown: where it stands, and its typesetting by KaTeX. What KaTeX cannot read is shown as it is written.

import "./vendor/katex.min.js"; // makes globalThis.katex

const LONGEST = 5000; // characters of one formula
const PAIRS = [["\\(", "\\)", false], ["\\[", "\\]", true], ["$$", "$$", true], ["$", "$", false]];
const DISPLAYS = [["\\[", "\\]"], ["$$", "$$"]];

/**
 * Teach a reader of Markdown formulas: `\(…\)` and `$…$` in a line, `\[…\]`, `$$…$$` and `\begin{…}` on their own.
 * One without an end, as in an answer that grows, is shown as it is written.
 */
export function addMath(reader) {
  reader.inline.ruler.before("escape", "math", inline);
  reader.block.ruler.before("fence", "math", block, { alt: ["paragraph", "reference", "blockquote", "list"] });
  const { escapeHtml } = reader.utils;
  reader.renderer.rules.math_inline = (tokens, at) => `<span class="math" title="${tokens[at].markup}">${escapeHtml(tokens[at].content)}</span>`;
  reader.renderer.rules.math_block = (tokens, at) => `<div class="math display">${escapeHtml(tokens[at].content)}</div>\n`;
  reader.renderer.rules.math_open = (tokens, at) => `<p class="plain" dir="ltr">${escapeHtml(tokens[at].content)}</p>\n`;
}

function inline(state, silent) {
  const { src, pos } = state;
  const pair = PAIRS.find(([open]) => src.startsWith(open, pos));
  if (!pair) return false;
  const [open, close, display] = pair;
  const begin = pos + open.length;
  const end = close === "$" ? dollar(src, begin, state.posMax) : next(state, close, begin);
  if (end <= begin || end > Math.min(state.posMax, begin + LONGEST)) {
    if (open[0] !== "\\") return false;
    if (!silent) state.pending += open; // the backslash stays
    state.pos = begin;
    return true;
  }
  if (!silent) {
    const token = state.push("math_inline", "span", 0);
    token.content = src.slice(begin, end);
    token.markup = display ? "display" : "";
  }
  state.pos = end + close.length;
  return true;
}

/** Where a mark stands next; -1 if it does not. What was found holds for later places, so that a text is searched once. */
function next(state, mark, from) {
  const known = (state.marks ??= new Map()).get(mark);
  if (known && known.from <= from && (known.at < 0 || from <= known.at)) return known.at;
  const at = state.src.indexOf(mark, from);
  state.marks.set(mark, { from, at });
  return at;
}

/** Where the dollar sign stands that closes a formula; -1 if none does. One beside a blank or a digit is money. */
function dollar(src, begin, limit) {
  const rest = src.slice(begin, Math.min(limit, begin + LONGEST));
  if (/^[\s$]/.test(rest)) return -1;
  for (let end = rest.indexOf("$"); end > 0; end = rest.indexOf("$", end + 1)) {
    if (rest[end - 1] === "\\") continue;
    if (/\s/.test(rest[end - 1]) || /\d/.test(rest[end + 1] ?? "")) return -1;
    return begin + end;
  }
  return -1;
}

function block(state, startLine, endLine, silent) {
  const first = state.src.slice(state.bMarks[startLine] + state.tShift[startLine], state.eMarks[startLine]);
  const environment = /^\\begin\{([a-z]{1,20}\*?)\}/.exec(first);
  const pair = environment ? ["", `\\end{${environment[1]}}`] : DISPLAYS.find(([open]) => first.startsWith(open));
  if (!pair || state.sCount[startLine] - state.blkIndent >= 4) return false;
  const [open, close] = pair;
  const begin = state.bMarks[startLine] + state.tShift[startLine] + open.length;
  const closed = next(state, close, begin);
  if (closed < 0 || closed > begin + LONGEST) return unclosed(state, { startLine, endLine, alone: first.trim() === open || Boolean(environment) }, silent);
  const found = [];
  for (let line = startLine; line < endLine; line += 1) {
    const text = line === startLine ? first.slice(open.length) : state.getLines(line, line + 1, state.blkIndent, false);
    const end = text.indexOf(close);
    if (end < 0) {
      found.push(text);
      continue;
    }
    if (text.slice(end + close.length).trim()) return false; // text goes on behind it
    if (silent) return true;
    found.push(text.slice(0, end) + (environment ? close : ""));
    const token = state.push("math_block", "div", 0);
    token.block = true;
    token.content = found.join("\n").trim();
    token.map = [startLine, line + 1];
    state.line = line + 1;
    return true;
  }
  return false;
}

/** Read a formula without an end, whose mark stands alone on its line, as plain text until the next blank line. */
function unclosed(state, { startLine, endLine, alone }, silent) {
  if (!alone) return false;
  if (silent) return true;
  let line = startLine + 1;
  while (line < endLine && !state.isEmpty(line) && state.sCount[line] >= state.blkIndent) line += 1;
  const token = state.push("math_open", "p", 0);
  token.block = true;
  token.content = state.getLines(startLine, line, state.blkIndent, false).trim();
  token.map = [startLine, line];
  state.line = line;
  return true;
}

/** Typeset the formulas within a node. */
export function typeset(root) {
  for (const node of root.querySelectorAll(".math")) {
    const source = node.textContent;
    const displayMode = node.matches(".display") || node.title === "display";
    node.removeAttribute("title");
    try {
      globalThis.katex.render(source, node, { displayMode, output: "htmlAndMathml", throwOnError: true, strict: false, trust: false, maxExpand: 200, maxSize: 40 });
    } catch {
      node.classList.add("raw");
      node.textContent = source;
    }
  }
}
