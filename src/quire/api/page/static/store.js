// Conversations stay in this browser: IndexedDB, since files are large; memory where there is none.
// A conversation's head and each of its messages are records of their own, so that tabs that write to
// one conversation do not overwrite each other's messages.

import { linked } from "./tree.js";

const [HEADS, MESSAGES] = ["conversations", "messages"];
const memory = new Map();
const writing = new Set(); // what `keep` was given and the database does not hold yet
const tabs = "BroadcastChannel" in globalThis ? new BroadcastChannel("quire") : null;
let connection = null;

function database() {
  connection ??= new Promise((resolve) => {
    let request;
    try {
      request = indexedDB.open("quire", 2);
    } catch {
      resolve(null);
      return;
    }
    request.onupgradeneeded = () => upgrade(request);
    request.onsuccess = () => {
      request.result.onversionchange = () => request.result.close();
      resolve(request.result);
    };
    request.onerror = () => resolve(null);
  });
  return connection;
}

/** Make the stores; conversations of the first version held their messages. */
function upgrade({ result: db, transaction }) {
  const messages = db.createObjectStore(MESSAGES, { keyPath: "id" });
  messages.createIndex("conversation", "conversation");
  if (!db.objectStoreNames.contains(HEADS)) {
    db.createObjectStore(HEADS, { keyPath: "id" });
    return;
  }
  const heads = transaction.objectStore(HEADS);
  heads.openCursor().onsuccess = ({ target: { result: cursor } }) => {
    if (!cursor) return;
    const conversation = linked(cursor.value);
    for (const message of conversation.messages) messages.put({ ...message, conversation: conversation.id });
    cursor.update(headOf(conversation));
    cursor.continue();
  };
}

const headOf = ({ messages, ...head }) => head;

/** Run `act` on both stores in one transaction; its result once all is written, null without a database. */
async function transact(mode, act) {
  const db = await database();
  if (!db) return null;
  return new Promise((resolve, reject) => {
    const transaction = db.transaction([HEADS, MESSAGES], mode);
    const got = act(transaction.objectStore(HEADS), transaction.objectStore(MESSAGES));
    transaction.oncomplete = () => resolve(got);
    transaction.onabort = () => reject(transaction.error); // a full disk is found when all is written
  });
}

/** Write answers that grow, and what is being kept, while the page is left: the database would not get to it any more. */
export function leave(messages) {
  try {
    settings.write("left", [...settings.read("left", []), ...messages]);
  } catch { /* no room: at most the last half second is missing */ }
  for (const each of writing) {
    try {
      settings.write("left-kept", [...settings.read("left-kept", []), each]);
    } catch { /* no room for its files: what was written stays a draft */ }
  }
}

/** Take what was written while a page was left into the database, where that knows less. */
async function arrive() {
  const [left, unkept] = [settings.read("left", []), settings.read("left-kept", [])];
  if (!left.length && !unkept.length) return;
  await transact("readwrite", (heads, messages) => {
    for (const each of unkept) takeIn(each, heads, messages);
    for (const message of left) {
      messages.get(message.id).onsuccess = ({ target: { result: stored } }) => {
        if (stored?.stream === message.stream && stored.events < message.events) messages.put({ ...message, conversation: stored.conversation });
      };
    }
  });
  settings.write("left", []);
  settings.write("left-kept", []);
}

/** Put in what was being kept, unless the database holds it or another tab has deleted its conversation. */
function takeIn({ head, added, fresh }, heads, messages) {
  heads.get(head.id).onsuccess = ({ target: { result: stored } }) => {
    if (!stored && !fresh) return;
    if (!stored || stored.updated <= head.updated) heads.put({ ...head, chosen: { ...stored?.chosen, ...head.chosen } });
    for (const message of added) {
      messages.get(message.id).onsuccess = ({ target: { result: known } }) => {
        if (!known) messages.put({ ...message, conversation: head.id });
      };
    }
  };
}

/** The conversation that last changed first. */
export async function all() {
  await arrive();
  const got = await transact("readonly", (heads, messages) => [heads.getAll(), messages.getAll()]);
  if (!got) return [...memory.values()].sort(newest);
  const [heads, messages] = got.map(({ result }) => result);
  const of = Map.groupBy(messages.sort((a, b) => a.created - b.created), ({ conversation }) => conversation);
  return heads.map((head) => ({ ...head, messages: of.get(head.id) ?? [] })).sort(newest);
}

const newest = (a, b) => b.updated - a.updated;

/** A conversation with some of its messages, or all; null if it is not there. */
async function read(id, ids) {
  const got = await transact("readonly", (heads, messages) => [heads.get(id), ids ? ids.map((each) => messages.get(each)) : [messages.index("conversation").getAll(id)]]);
  if (!got?.[0].result) return null;
  const found = got[1].flatMap(({ result }) => result ?? []);
  return { ...got[0].result, messages: found.sort((a, b) => a.created - b.created) };
}

/**
 * Keep a conversation's head and some of its messages. One that another tab has deleted stays deleted.
 * @param {boolean} more.fresh whether the conversation may be new
 */
export async function keep(conversation, messages, { fresh = false } = {}) {
  memory.set(conversation.id, conversation);
  const head = headOf(conversation);
  const pending = { head, added: messages, fresh };
  writing.add(pending);
  let written = true;
  await transact("readwrite", (heads, store) => {
    heads.get(conversation.id).onsuccess = ({ target: { result: stored } }) => {
      written = Boolean(stored) || fresh;
      if (!written) return;
      heads.put({ ...head, chosen: { ...stored?.chosen, ...head.chosen } });
      for (const message of messages) store.put({ ...message, conversation: conversation.id });
    };
  });
  writing.delete(pending);
  if (written) tabs?.postMessage({ id: conversation.id, ids: messages.map(({ id }) => id) });
}

export async function remove(id) {
  memory.delete(id);
  await transact("readwrite", (heads, messages) => {
    heads.delete(id);
    messages.index("conversation").getAllKeys(id).onsuccess = ({ target: { result } }) => result.forEach((key) => messages.delete(key));
  });
  tabs?.postMessage({ id, removed: true });
}

/** Says who hears of other tabs' changes: given an id and the conversation with what changed, null if it was deleted. */
export function onChange(listener) {
  if (tabs) tabs.onmessage = async ({ data: { id, ids, removed } }) => {
    const conversation = removed ? null : await read(id, ids);
    if (removed || conversation) listener(id, conversation, () => read(id));
  };
}

/** The id of the conversation that this tab shows, which a reload opens again. */
export const opened = {
  read: () => sessionStorage.getItem("quire.opened"),
  write: (id) => sessionStorage.setItem("quire.opened", id),
};

/** What is written and not sent: by conversation, and by message for one that is edited. */
export const drafts = {
  read: (id) => settings.read("drafts", {})[id],
  write(id, text) {
    const { [id]: before, ...others } = settings.read("drafts", {});
    settings.write("drafts", text ? { ...others, [id]: text } : others);
  },
};

/** Small settings, by name. */
export const settings = {
  read(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(`quire.${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  write(name, value) {
    localStorage.setItem(`quire.${name}`, JSON.stringify(value));
  },
};
