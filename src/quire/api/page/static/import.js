// Conversations from files: those that this page exported, and the exports of ChatGPT and Open WebUI.

import { created, linked, newId } from "./tree.js";

const ROLES = ["user", "assistant", "tool"];

/** The conversations of an export. Throws an Error if it is none that is known. */
export function read(data) {
  const found = (Array.isArray(data) ? data : [data]).map(conversation);
  if (!found.length) throw new Error("there is no conversation in it.");
  return found;
}

function conversation(entry) {
  if (entry?.mapping) return fromChatGPT(entry);
  const chat = entry?.chat ?? entry;
  if (chat?.history?.messages) return fromOpenWebUI(chat);
  if (Array.isArray(entry?.messages) && entry.messages.every(({ role, content }) => ROLES.includes(role) && typeof content === "string")) return renamed(linked({ ...created(), ...entry }));
  throw new Error("this is no conversation of this page, of ChatGPT or of Open WebUI.");
}

/** The same conversation with ids of its own, so that it overwrites none. */
function renamed({ title, updated, messages, chosen, parameters, tags }) {
  const ids = new Map(messages.map(({ id }) => [id, newId()]));
  const to = (id) => ids.get(id) ?? null;
  return {
    ...created(String(title)),
    updated: Number(updated) || Date.now(),
    ...(parameters ? { parameters } : {}),
    ...(Array.isArray(tags) ? { tags: tags.map(String) } : {}),
    chosen: Object.fromEntries(Object.entries(chosen).map(([parent, id]) => [to(parent) ?? "", to(id)])),
    messages: messages.map(({ stream, ...message }) => ({ ...message, id: to(message.id), parent: to(message.parent) })),
  };
}

/** Messages of another program's tree; nodes that are no messages are passed over. */
function tree(title, updated, nodes, leaf) {
  const parentOf = (id) => {
    let at = nodes.get(id)?.parent;
    while (at && !nodes.get(at)?.message) at = nodes.get(at)?.parent;
    return at ?? null;
  };
  const messages = [];
  for (const [id, { message }] of nodes) if (message) messages.push({ ...message, id, parent: parentOf(id), created: messages.length });
  const chosen = {};
  for (let at = nodes.get(leaf)?.message ? leaf : parentOf(leaf); at; at = parentOf(at)) chosen[parentOf(at) ?? ""] = at;
  return renamed({ title, updated, messages, chosen });
}

const answer = (content, model) => ({ role: "assistant", content, reasoning: "", calls: [], stats: null, finish: "stop", ...(model ? { model } : {}) });

const NOT_EXPORTED = "(a picture or file that the export does not hold)";

function fromChatGPT({ title, mapping, update_time: updated, current_node: leaf }) {
  const nodes = new Map(Object.entries(mapping).map(([id, { message, parent }]) => {
    const role = message?.author?.role;
    const content = (message?.content?.parts ?? []).map((part) => (typeof part === "string" ? part : NOT_EXPORTED)).join("\n\n");
    const kept = content && (role === "user" ? { role, content } : role === "assistant" && answer(content, message.metadata?.model_slug));
    return [id, { parent, message: kept || null }];
  }));
  return tree(title || "Imported", 1000 * updated, nodes, leaf);
}

/** A message of Open WebUI's with its pictures; of other files the export holds the names. */
function question(text, files) {
  const pictures = files.filter(({ type, url }) => type === "image" && /^data:image\//.test(url));
  const others = files.filter((file) => !pictures.includes(file)).map(({ name, file }) => `(${name ?? file?.filename ?? "file"}: not in the export)`);
  return { role: "user", content: [text, ...others].filter(Boolean).join("\n\n"), files: pictures.map(({ name, url }) => ({ kind: "image", name: name ?? "picture", url })) };
}

function fromOpenWebUI({ title, history, timestamp }) {
  const nodes = new Map(Object.entries(history.messages).map(([id, { role, content, parentId, model, files }]) => {
    const text = String(content ?? "");
    return [id, { parent: parentId, message: role === "user" ? question(text, files ?? []) : role === "assistant" ? answer(text, model) : null }];
  }));
  return tree(title || "Imported", timestamp > 1e12 ? timestamp : 1000 * timestamp, nodes, history.currentId);
}
