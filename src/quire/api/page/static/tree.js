// A conversation as a tree of messages: answering again, or sending a message in other words, adds a branch.

/** An id that nobody guesses; `crypto.randomUUID` is missing where the page came by plain HTTP. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

const parentOf = ({ parent }) => parent ?? "";

/** The messages that go on from a message, in the order in which they came; "" is the conversation's beginning. */
const children = ({ messages }, id) => messages.filter((message) => parentOf(message) === id);

/** The message that stands before another one; undefined at the beginning. */
export const before = ({ messages }, { parent }) => messages.find(({ id }) => id === parent);

/** The messages that lead to a message, from the beginning, without itself. */
export function ancestors(conversation, message) {
  const found = [];
  for (let at = before(conversation, message); at; at = before(conversation, at)) found.unshift(at);
  return found;
}

/** The messages of a message's place: itself and its other versions. */
export const versions = (conversation, message) => children(conversation, parentOf(message));

/** The messages that are shown and sent: from the beginning, the chosen branch at each fork, the newest where none was chosen. */
export function path(conversation) {
  const after = Map.groupBy(conversation.messages, parentOf);
  const found = [];
  for (let next = after.get(""); next; next = after.get(found.at(-1).id)) {
    const chosen = conversation.chosen[parentOf(next[0])];
    found.push(next.find(({ id }) => id === chosen) ?? next.at(-1));
  }
  return found;
}

/** Make a message the chosen version of its place. */
export function choose(conversation, message) {
  conversation.chosen[parentOf(message)] = message.id;
}

/** Add a message behind another one (or at the beginning), as the chosen version of its place. */
export function add(conversation, after, message) {
  message.id ??= newId();
  message.parent = after?.id ?? null;
  message.created ??= Math.max(Date.now(), ...conversation.messages.map(({ created }) => created + 1)); // versions are told apart by it
  conversation.messages.push(message);
  choose(conversation, message);
  return message;
}

export const created = (title = "New conversation") => ({ id: newId(), title, updated: Date.now(), chosen: {}, messages: [] });

/** Give the messages of a conversation that has no branches their ids and places. */
export function linked(conversation) {
  conversation.chosen ??= {};
  let before = null;
  for (const message of conversation.messages) {
    if (!message.id) Object.assign(message, { id: newId(), parent: before, created: conversation.updated });
    if (message.images) message.files = message.images.map((url) => ({ kind: "image", name: "picture", url }));
    delete message.images; // conversations once held pictures alone
    before = message.id;
  }
  return conversation;
}

/** Take over what another tab wrote; `busy` tells which messages this tab writes itself. */
export function merge(mine, theirs, busy) {
  const known = new Map(mine.messages.map((message) => [message.id, message]));
  for (const message of theirs.messages) {
    const old = known.get(message.id);
    if (!old) mine.messages.push(message);
    else if (!busy(old)) replace(old, message);
  }
  const { messages, chosen, ...head } = theirs;
  mine.chosen = { ...chosen, ...mine.chosen };
  Object.assign(mine, head);
}

function replace(old, message) {
  for (const name of Object.keys(old)) delete old[name];
  Object.assign(old, message);
}
