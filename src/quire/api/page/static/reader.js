// Markdown, maths and code as models write them, to blocks of markup. It makes no nodes and trusts nothing: see markdown.js.

import hljs from "./vendor/highlight.min.js";
import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";
import { addMath } from "./math.js";

export const WEB_ADDRESS = /^(https?:\/\/|mailto:)/i;
const LONGEST = 200_000; // characters that are read as Markdown; a longer text is shown as it is
const LONGEST_CODE = 40_000; // characters that are coloured; more is shown plain
const LONGEST_LINK = 2000;

const reader = new MarkdownIt({ html: false, linkify: true, breaks: true });
const { escapeHtml } = reader.utils;
reader.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
reader.validateLink = (url) => url.length <= LONGEST_LINK && WEB_ADDRESS.test(url);
addMath(reader);
reader.core.ruler.after("inline", "tasks", tasks);
const { rules } = reader.renderer;
const RIGHT_TO_LEFT = /^\P{L}*[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;
const SIDES = { "text-align:center": "middle", "text-align:right": "right" };
rules.fence = (tokens, at) => codeMarkup(tokens[at].content, /^[\w+#.-]*/.exec(tokens[at].info.trim())[0]);
rules.code_block = (tokens, at) => codeMarkup(tokens[at].content, "");
rules.image = (tokens, at) => {
  const { content, attrs } = tokens[at];
  const url = new Map(attrs).get("src");
  return `<a href="${escapeHtml(url)}" title="${escapeHtml(url)}" target="_blank" rel="${REL}">picture: ${escapeHtml(content || url.slice(0, 80))}</a>`;
};
rules.table_open = (tokens, at) => `<div class="table" tabindex="0"${RIGHT_TO_LEFT.test(tableText(tokens, at)) ? ' dir="rtl"' : ""}><table>\n`;
rules.table_close = () => "</table></div>\n";
const REL = "noopener noreferrer nofollow";
rules.link_open = (tokens, at, options, env, self) => {
  const token = tokens[at];
  token.attrSet("title", token.attrGet("href"));
  token.attrSet("target", "_blank");
  token.attrSet("rel", REL);
  return self.renderToken(tokens, at, options);
};

/** The text of the table that begins at a token: its columns run as its first letter does. */
function tableText(tokens, at) {
  const rest = tokens.slice(at);
  return rest.slice(0, rest.findIndex(({ type }) => type === "table_close")).map(({ content }) => content).join(" ");
}

/** What begins with `[ ]` or `[x]` in a list becomes a box; headings begin below those of the page; blocks find their direction. */
function tasks(state) {
  state.tokens.forEach((token, at) => {
    if (token.nesting > 0 && token.level === 0 && token.type !== "table_open") token.attrSet("dir", "auto");
    if (/^t[hd]_open$/.test(token.type)) token.attrs = [["class", SIDES[token.attrGet("style")] ?? ""], ["dir", "auto"]];
    if (/^heading_/.test(token.type)) token.tag = `h${Math.min(6, Number(token.tag[1]) + 2)}`;
    if (token.type !== "inline" || state.tokens[at - 2]?.type !== "list_item_open") return;
    const [first] = token.children;
    const box = /^\[([ xX])\] /.exec(first?.content ?? "");
    if (first?.type !== "text" || !box) return;
    first.content = first.content.slice(box[0].length);
    const input = new state.Token("task", "input", 0);
    input.attrs = [["type", "checkbox"], ["disabled", ""], ...(box[1] === " " ? [] : [["checked", ""]])];
    token.children.unshift(input);
    state.tokens[at - 2].attrJoin("class", "task");
  });
}

export function codeMarkup(text, language) {
  const code = text.replace(/\n$/, "");
  const known = language && code.length <= LONGEST_CODE && hljs.getLanguage(language);
  const marked = known ? hljs.highlight(code, { language, ignoreIllegals: true }).value : escapeHtml(code);
  return `<div class="code"><div class="code-bar"><span>${escapeHtml(language || "text")}</span></div><pre tabindex="0" dir="ltr"><code>${marked}</code></pre></div>`;
}

/** The blocks of a text: what each was written as, and a function that gives its markup. */
export function blocks(text) {
  if (text.length > LONGEST) return [{ raw: text, markup: () => `<pre class="plain" dir="auto">${escapeHtml(text)}</pre>` }];
  const env = {};
  const tokens = reader.parse(text, env);
  const lines = text.split("\n");
  const links = env.references ? JSON.stringify(env.references) : ""; // may stand behind what refers to them
  const found = [];
  for (let at = 0; at < tokens.length; ) {
    let end = at + 1;
    for (let depth = tokens[at].nesting; depth > 0; end += 1) depth += tokens[end].nesting;
    const [from, to] = tokens[at].map;
    const part = tokens.slice(at, end);
    found.push({ raw: `${part[0].type} ${lines.slice(from, to).join("\n")}${links}`, markup: () => reader.renderer.render(part, reader.options, env) });
    at = end;
  }
  return found;
}
