// Building documents. Text always becomes text: nothing here, or anywhere in the page, reads markup.

/** An element; `props` are attributes, `on...` listeners, or one of the properties set as such. */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (["value", "checked", "disabled", "hidden", "open", "selected", "textContent"].includes(name)) node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) { // one by one: there may be more than a call takes arguments
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

/** Makes `nodes` the children of `parent`. Nodes that stand where they should are not touched: they keep focus, and a click that began. */
export function place(parent, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  let next = parent.firstElementChild;
  for (const node of nodes) {
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  }
}

export const $ = (selector, root = document) => root.querySelector(selector);

const SVG = "http://www.w3.org/2000/svg";

/** An element of a picture. */
export function svg(tag, props = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  attach: "M20 11l-8 8a5 5 0 0 1-7-7l8-8a3.3 3.3 0 0 1 5 5l-8 8a1.7 1.7 0 0 1-2.5-2.5l7-7",
  sound: "M5 10v4M9 7v10M13 4v16M17 8v8M21 10.5v3",
  text: "M6 3h8l4 4v14H6zM14 3v4h4M9 12h6M9 16h6",
  mic: "M12 4a3 3 0 0 1 3 3v4a3 3 0 0 1-6 0V7a3 3 0 0 1 3-3M6 11a6 6 0 0 0 12 0M12 17v3",
  video: "M4 6h11v12H4zM15 11l5-3v8l-5-3",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15.5 9h.01",
  copy: "M9 9h10v11H9zM5 15V4h10",
  done: "M5 12l5 5 9-10",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  again: "M19 12a7 7 0 1 1-2-5l2 2M19 4v5h-5",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  columns: "M4 5h7v14H4zM13 5h7v14h-7z",
  book: "M5 4h6a2 2 0 0 1 2 2v14a2 2 0 0 0-2-2H5zM19 4h-4a2 2 0 0 0-2 2v14a2 2 0 0 1 2-2h4z",
  older: "M14 6l-6 6 6 6",
  newer: "M10 6l6 6-6 6",
  save: "M12 4v11M7 10l5 5 5-5M5 20h14",
  tune: "M4 8h9M17 8h3M4 16h3M11 16h9M15 6v4M9 14v4",
  theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  keys: "M3 7h18v10H3zM7 11h.01M11 11h.01M15 11h.01M8 14h8",
  close: "M6 6l12 12M18 6L6 18",
  tool: "M14 6a4 4 0 0 0-5 5l-5 5 3 3 5-5a4 4 0 0 0 5-5l-2.5 2.5-3-3z",
};

/** A drawn sign; whoever shows it alone gives the button its label. */
export function icon(name) {
  const path = svg("path", { d: ICONS[name] });
  return svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true", focusable: "false" }, path);
}

/** A button that shows a sign alone. */
export function iconButton(name, label, onclick, more = {}) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...more }, icon(name));
}

/** A button that copies what `text` gives, and says that it did. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    if (!(await copied(text()))) return announce("The browser does not let the page copy.");
    button.replaceChildren(icon("done"));
    announce("Copied.");
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

/** Whether a text has been copied. Where the page came by plain HTTP from another machine, there is the old way alone. */
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const before = document.activeElement;
  const field = h("textarea", { class: "unseen", value: text });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  before?.focus();
  return done;
}

/** Says something to a screen reader, without showing it. */
export function announce(text) {
  $("#announcer").textContent = text;
}
