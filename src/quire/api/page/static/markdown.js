// Shows Markdown: markup of the reader, made safe by DOMPurify, as nodes that stay while the text grows.

import { copyButton } from "./dom.js";
import { typeset } from "./math.js";
import { blocks, codeMarkup, WEB_ADDRESS } from "./reader.js";
import "./vendor/purify.min.js";

const PLAIN = ["checked", "class", "dir", "disabled", "rel", "start", "tabindex", "target", "title", "type"];
const ALLOWED = {
  ALLOWED_TAGS: "a blockquote br code del div em h3 h4 h5 h6 hr input li ol p pre s span strong table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: [...PLAIN, "href"],
  ADD_URI_SAFE_ATTR: PLAIN,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: WEB_ADDRESS,
  RETURN_DOM_FRAGMENT: true,
};

/** Nodes for markup that the libraries made; what is not expected in it is taken out. */
function nodes(markup) {
  const fragment = globalThis.DOMPurify.sanitize(markup, ALLOWED);
  for (const bar of fragment.querySelectorAll(".code > .code-bar")) {
    const copy = copyButton("Copy code", () => copy.closest(".code").querySelector("code").textContent);
    bar.append(copy);
  }
  for (const box of fragment.querySelectorAll("input")) box.setAttribute("aria-label", box.checked ? "done" : "open");
  typeset(fragment);
  return [...fragment.children];
}

export const codeBlock = (text, language) => nodes(codeMarkup(text, language))[0];

/** Shows a growing text: what is as before keeps its nodes, and selections with them. */
export class Markdown {
  constructor(root) {
    this.root = root;
    this.shown = [];
  }

  show(text) {
    const wanted = blocks(text);
    let same = 0;
    while (same < wanted.length && same < this.shown.length && wanted[same].raw === this.shown[same]) same += 1;
    if (same === wanted.length && same === this.shown.length) return;
    const markup = wanted.slice(same).map(({ markup: each }) => each()).join("");
    align(this.root, same, nodes(markup));
    this.shown = wanted.map(({ raw }) => raw);
  }
}

/** Make the children of a node, from one on, those that are wanted; equal parts stay. */
function align(parent, from, wanted) {
  const old = [...parent.childNodes].slice(from);
  wanted.forEach((node, at) => {
    if (!old[at]) parent.append(node);
    else if (!grown(old[at], node)) old[at].replaceWith(node);
  });
  for (const node of old.slice(wanted.length)) node.remove();
}

/** Whether a node has been made equal to another one. */
function grown(old, node) {
  if (old.isEqualNode(node)) return true;
  if (old.nodeType === Node.TEXT_NODE && node.nodeType === Node.TEXT_NODE) {
    if (node.data.startsWith(old.data)) old.appendData(node.data.slice(old.data.length));
    else old.data = node.data;
    return true;
  }
  if (old.nodeName !== node.nodeName || old.nodeType !== Node.ELEMENT_NODE || node.matches(".math") || !old.cloneNode(false).isEqualNode(node.cloneNode(false))) return false;
  align(old, 0, [...node.childNodes]);
  return true;
}
