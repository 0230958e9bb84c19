// Conversations stay in this browser: IndexedDB, since files are large; memory where there is none.

const STORE = "conversations";
const memory = new Map();
let opened = null;

function database() {
  opened ??= new Promise((resolve) => {
    let request;
    try {
      request = indexedDB.open("quire", 1);
    } catch {
      resolve(null);
      return;
    }
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
  });
  return opened;
}

async function transact(mode, act) {
  const db = await database();
  if (!db) return null;
  return new Promise((resolve, reject) => {
    const transaction = db.transaction(STORE, mode);
    const request = act(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error); // a full disk is found when all is written
  });
}

export async function all() {
  const kept = (await transact("readonly", (store) => store.getAll())) ?? [...memory.values()];
  return kept.map(current).sort((a, b) => b.updated - a.updated);
}

/** A conversation as the page has them now; it once kept pictures alone. */
function current(conversation) {
  for (const message of conversation.messages) {
    if (!message.images) continue;
    message.files = message.images.map((url) => ({ kind: "image", name: "picture", url }));
    delete message.images;
  }
  return conversation;
}

export async function put(conversation) {
  memory.set(conversation.id, conversation);
  await transact("readwrite", (store) => store.put(conversation));
}

export async function remove(id) {
  memory.delete(id);
  await transact("readwrite", (store) => store.delete(id));
}

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
