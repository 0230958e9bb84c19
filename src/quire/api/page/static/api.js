// The server, asked as any other client would ask it.

const KEY = "quire.key";
const NO_KEY = "This server needs an API key. Enter the key, then ask again.";
let askForKey = async () => null;
let noteContact = () => {};
let noteModels = () => {};

/** Says who asks the user for an API key: given whether one was refused, gives a key or null. */
export function onKeyNeeded(asker) {
  askForKey = asker;
}

/** Says who hears how each request went: "ok", "gone" (no answer), or "key" (one is needed). */
export function onContact(listener) {
  noteContact = listener;
}

/** Says who hears of the models whenever any part of the page has them listed. */
export function onModels(listener) {
  noteModels = listener;
}

export const hasKey = () => Boolean(localStorage.getItem(KEY));
export const forgetKey = () => localStorage.removeItem(KEY);

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

let asking = null; // one dialogue, however many requests need the key
let declined = false; // polls ask for a key once, what the user sends asks again

async function newKey(refused) {
  asking ??= askForKey(refused).finally(() => { asking = null; });
  const key = await asking;
  if (key) localStorage.setItem(KEY, key);
  declined = !key;
  return key;
}

/** Asks the user for a key; whether one was given. */
export const enterKey = async () => Boolean(await newKey(false));

/** A good response; asks for a key where the server wants one. Throws ApiError. */
export async function ask(path, { body, method, stream, signal, watching } = {}) {
  for (;;) {
    const key = localStorage.getItem(KEY);
    const headers = { accept: "application/json" };
    if (watching) headers["x-quire-watch"] = "1"; // the log of the server need not tell of it
    if (stream) headers["x-quire-stream"] = stream; // goes on when this page is gone
    if (key) headers.authorization = `Bearer ${key}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    const options = { method: method ?? (body === undefined ? "GET" : "POST"), headers, signal, cache: "no-store" };
    if (body !== undefined) options.body = JSON.stringify(body);
    let response;
    try {
      response = await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      noteContact("gone");
      throw new ApiError("The server cannot be reached.", 0);
    }
    noteContact(response.status === 401 ? "key" : "ok");
    if (response.ok) return response;
    if (response.status !== 401) throw await problem(response);
    if (key !== localStorage.getItem(KEY)) continue;
    if ((declined && body === undefined) || !(await newKey(Boolean(key)))) throw new ApiError(NO_KEY, 401);
  }
}

async function problem(response) {
  const text = await response.text();
  try {
    const { message, code } = JSON.parse(text).error;
    return new ApiError(message, response.status, code);
  } catch {
    return new ApiError(text.slice(0, 300) || `HTTP ${response.status}`, response.status);
  }
}

export const get = async (path, options) => (await ask(path, options)).json();

export async function models() {
  const { data } = await get("/v1/models", { watching: true });
  noteModels(data);
  return data;
}

/** The chunks of a streamed answer, each with its number if it has one. Throws ApiError if the stream says so, or ends early. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let number;
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      noteContact("gone");
      throw new ApiError("The connection to the server was lost.", 0);
    });
    if (done) throw new ApiError("The connection to the server was lost.", 0);
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("id:")) number = Number(line.slice(3));
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, 500);
      yield [number, chunk];
    }
  }
}
