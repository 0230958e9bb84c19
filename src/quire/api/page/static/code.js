// Colours for code: comments, strings, numbers and words that most languages share. No parser.

import { h } from "./dom.js";

const LONGEST = 60_000; // characters that are coloured; more is shown plain
const BLOCK = 50; // lines that are laid out together

const C_LIKE = "abstract as async await break case catch class const continue default delete do else enum export extends extern final finally fn for from func function go if impl implements import in instanceof interface let loop match mod move mut namespace new null nil operator override package private protected pub public return self static struct super switch template this throw throws trait true false try type typeof undefined union unsafe use using val var virtual void volatile when where while with yield int float double bool boolean char string long short unsigned";
const PYTHON = "and as assert async await break class continue def del elif else except False finally for from global if import in is lambda match case None nonlocal not or pass raise return self True try while with yield";
const SHELL = "if then else elif fi for while until do done case esac in function return export local set unset cd echo exit source sudo";
const SQL = "select from where and or not null insert into values update set delete create table index view drop alter add primary key foreign references join left right inner outer on as group by order having limit offset distinct union all case when then else end exists between like is in";
const KINDS = [
  { names: "py python python3 rb ruby r julia elixir nim", comment: "#[^\\n]*", words: PYTHON, triple: true },
  { names: "sh bash shell zsh console fish dockerfile make makefile toml ini yaml yml conf", comment: "#[^\\n]*", words: SHELL },
  { names: "sql", comment: "--[^\\n]*", words: SQL, ignoreCase: true },
  { names: "lua haskell hs", comment: "--[^\\n]*", words: `${C_LIKE} end local then elseif repeat until not and or data where` },
  { names: "html xml svg vue", comment: "<!--[^]*?(?:-->|$)", words: "" },
  { names: "text txt plain markdown md diff", plain: true },
];
const OTHER = { comment: "\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)", words: C_LIKE, backtick: true };
const made = new Map();

function grammar(language) {
  const name = language.toLowerCase();
  const kind = KINDS.find((each) => each.names.split(" ").includes(name)) ?? OTHER;
  if (kind.plain || !name) return null;
  if (!made.has(kind)) made.set(kind, compiled(kind));
  return made.get(kind);
}

function compiled(kind) {
  const strings = ['"(?:[^"\\\\\\n]|\\\\[^])*"?', "'(?:[^'\\\\\\n]|\\\\[^])*'?"];
  if (kind.triple) strings.unshift('"""[^]*?(?:"""|$)', "'''[^]*?(?:'''|$)");
  if (kind.backtick) strings.push("`(?:[^`\\\\]|\\\\[^])*`?");
  const words = new Set(kind.words.split(" "));
  const pattern = `(${kind.comment})|(${strings.join("|")})|(\\b\\d[\\w.]*)|([A-Za-z_$][\\w$]*)`;
  return { pattern: new RegExp(pattern, "g"), known: (word) => words.has(kind.ignoreCase ? word.toLowerCase() : word) };
}

/**
 * Shows a growing program's text. What no further text can change keeps its nodes, and selections with
 * them. It stands in blocks of lines, so that a browser lays out the last one alone.
 */
export class Highlighted {
  constructor(root, language = "") {
    this.root = root;
    this.rules = grammar(language);
    this.begin();
  }

  begin() {
    this.settled = ""; // ends behind a line, and within no string or comment
    this.rest = [];
    this.root.replaceChildren();
    this.newBlock();
  }

  newBlock() {
    this.block = h("span", { class: "code-lines" });
    this.lines = 0;
    this.root.append(this.block);
  }

  show(text) {
    if (!text.startsWith(this.settled)) this.begin();
    for (const node of this.rest.splice(0)) node.remove();
    const pieces = this.rules && text.length <= LONGEST ? colours(text.slice(this.settled.length), this.rules) : [[null, text.slice(this.settled.length)]];
    const last = pieces.findLastIndex(([kind, piece]) => !kind && piece.includes("\n"));
    const whole = pieces.slice(0, last + 1);
    const rest = pieces.slice(last + 1);
    if (whole.length) {
      const [, piece] = whole.pop();
      const cut = piece.lastIndexOf("\n") + 1;
      whole.push([null, piece.slice(0, cut)]);
      rest.unshift([null, piece.slice(cut)]);
    }
    for (const [kind, piece] of whole) this.settle(kind, piece);
    this.rest = rest.filter(([, piece]) => piece).map(([kind, piece]) => this.put(kind, piece));
  }

  /** A block ends with its last line's end left out: that of the block is one already. */
  settle(kind, piece) {
    this.settled += piece;
    const ends = !kind && this.lines >= BLOCK ? piece.indexOf("\n") : -1;
    if (ends < 0) {
      this.lines += kind ? 0 : piece.split("\n").length - 1;
      if (piece) this.put(kind, piece);
      return;
    }
    if (ends) this.put(null, piece.slice(0, ends));
    this.newBlock();
    const after = piece.slice(ends + 1);
    this.lines = after.split("\n").length - 1;
    if (after) this.put(null, after);
  }

  put(kind, piece) {
    const node = kind ? h("span", { class: `code-${kind}` }, piece) : document.createTextNode(piece);
    this.block.append(node);
    return node;
  }
}

/** The pieces of a program's text, each with its kind; null is none. */
function colours(text, rules) {
  const pieces = [];
  let at = 0;
  for (const found of text.matchAll(rules.pattern)) {
    const [whole, comment, string, number, word] = found;
    let kind = comment !== undefined ? "comment" : string !== undefined ? "string" : number !== undefined ? "number" : null;
    if (word !== undefined) kind = rules.known(word) ? "word" : text[found.index + whole.length] === "(" ? "call" : null;
    if (!kind) continue;
    pieces.push([null, text.slice(at, found.index)], [kind, whole]);
    at = found.index + whole.length;
  }
  pieces.push([null, text.slice(at)]);
  return pieces;
}
