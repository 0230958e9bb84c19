// The server, asked as any other client would ask it.

const KEY = "quire.key";
let askForKey = async () => null;

/** Says who asks the user for an API key: given whether one was refused, gives a key or null. */
export function onKeyNeeded(asker) {
  askForKey = asker;
}

export const hasKey = () => Boolean(localStorage.getItem(KEY));
export const forgetKey = () => localStorage.removeItem(KEY);

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let asking = null; // one dialogue, however many requests need the key

async function newKey(refused) {
  asking ??= askForKey(refused).finally(() => { asking = null; });
  const key = await asking;
  if (key) localStorage.setItem(KEY, key);
  return key;
}

/** A good response; asks for a key where the server wants one. Throws ApiError. */
export async function ask(path, { body, signal } = {}) {
  for (;;) {
    const key = localStorage.getItem(KEY);
    const headers = { accept: "application/json" };
    if (key) headers.authorization = `Bearer ${key}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    const options = { method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store" };
    if (body !== undefined) options.body = JSON.stringify(body);
    let response;
    try {
      response = await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server does not answer.", 0);
    }
    if (response.ok) return response;
    if (response.status === 401 && (key !== localStorage.getItem(KEY) || (await newKey(Boolean(key))))) continue;
    throw new ApiError(await reason(response), response.status);
  }
}

async function reason(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 300) || `HTTP ${response.status}`;
  }
}

export const get = async (path, options) => (await ask(path, options)).json();

/** The chunks of a streamed answer. Throws ApiError if the stream says so, or ends early. */
export async function* chunks(body, signal) {
  const response = await ask("/v1/chat/completions", { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError("The answer ended early.", 0);
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, 500);
      yield chunk;
    }
  }
}
