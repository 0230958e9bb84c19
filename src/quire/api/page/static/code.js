// Colours for code: comments, strings, numbers and words that most languages share. No parser.

import { h } from "./dom.js";

const LONGEST = 60_000; // characters that are coloured; more is shown plain

const C_LIKE = "abstract as async await break case catch class const continue default delete do else enum export extends extern final finally fn for from func function go if impl implements import in instanceof interface let loop match mod move mut namespace new null nil operator override package private protected pub public return self static struct super switch template this throw throws trait true false try type typeof undefined union unsafe use using val var virtual void volatile when where while with yield int float double bool boolean char string long short unsigned";
const PYTHON = "and as assert async await break class continue def del elif else except False finally for from global if import in is lambda match case None nonlocal not or pass raise return self True try while with yield";
const SHELL = "if then else elif fi for while until do done case esac in function return export local set unset cd echo exit source sudo";
const SQL = "select from where and or not null insert into values update set delete create table index view drop alter add primary key foreign references join left right inner outer on as group by order having limit offset distinct union all case when then else end exists between like is in";
const KINDS = [
  { names: "py python python3 rb ruby r julia elixir nim", comment: "#[^\\n]*", words: PYTHON, triple: true },
  { names: "sh bash shell zsh console fish dockerfile make makefile toml ini yaml yml conf", comment: "#[^\\n]*", words: SHELL },
  { names: "sql", comment: "--[^\\n]*", words: SQL, ignoreCase: true },
  { names: "lua haskell hs", comment: "--[^\\n]*", words: `${C_LIKE} end local then elseif repeat until not and or data where` },
  { names: "html xml svg vue", comment: "<!--[^]*?-->", words: "" },
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
  return { pattern, known: (word) => words.has(kind.ignoreCase ? word.toLowerCase() : word) };
}

/** Nodes of a program's text. */
export function highlight(text, language = "") {
  const rules = text.length > LONGEST ? null : grammar(language);
  if (!rules) return [document.createTextNode(text)];
  const nodes = [];
  let at = 0;
  const put = (kind, piece) => nodes.push(kind ? h("span", { class: `code-${kind}` }, piece) : document.createTextNode(piece));
  for (const found of text.matchAll(new RegExp(rules.pattern, "g"))) {
    const [whole, comment, string, number, word] = found;
    let kind = comment !== undefined ? "comment" : string !== undefined ? "string" : number !== undefined ? "number" : null;
    if (word !== undefined) kind = rules.known(word) ? "word" : text[found.index + whole.length] === "(" ? "call" : null;
    if (!kind) continue;
    if (found.index > at) put(null, text.slice(at, found.index));
    put(kind, whole);
    at = found.index + whole.length;
  }
  if (at < text.length) put(null, text.slice(at));
  return nodes;
}
