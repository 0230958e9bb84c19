// An answer as it comes: asked for or taken up again, kept while it grows, whichever conversation is open.

import { ask, events } from "./api.js";
import { withNames } from "./files.js";
import * as store from "./store.js";
import { newId } from "./tree.js";

const KEEP_MS = 500; // between two writes of an answer that grows
const RETRIES_MS = [500, 1000, 2000, 4000];
const FRESH_MS = 60_000; // in which a question that the server never got is sent again

const pause = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

/** Whether an answer has not ended, not even by an error: it was left behind, or goes on. */
export const isUnfinished = ({ role, finish, error, stopped }) => role === "assistant" && !finish && !error && !stopped;

/** Whether an answer says nothing: there is nothing to send along, or to go on with. */
export const isEmpty = ({ content, calls }) => !content && !calls.length;

/** Make a message one that waits for its answer; one that is continued keeps its text. */
export function prepare(message, model) {
  for (const name of ["finish", "error", "stopped", "waited"]) delete message[name];
  Object.assign(message, { content: message.content ?? "", reasoning: message.reasoning ?? "", calls: message.calls ?? [], stats: null, model, events: 0, stream: newId(), asked: Date.now() });
}

export class Run {
  /** `changed` is told after each piece, with the view's news; `message` is this run's alone until it ends. */
  constructor(conversation, message, changed) {
    this.conversation = conversation;
    this.message = message;
    this.changed = changed;
    this.controller = new AbortController();
    this.progress = null;
    this.kept = false; // whether any of it was written
    this.timer = null;
  }

  /** Ends the answer here and on the server. */
  stop() {
    this.stopping = true;
    this.controller.abort();
    if (this.message.stream) ask(`/streams/${this.message.stream}`, { method: "DELETE" }).catch(() => {});
  }

  /** The page is being left: what fails from now on says nothing of the answer. */
  leave() {
    this.leaving = true;
    return this.message;
  }

  /** Asks for the answer; where the server has it already, takes it up. `request` makes the body. */
  async ask(request) {
    await this.through(async () => {
      const body = this.body = await request();
      const response = await ask("/v1/chat/completions", { body, stream: this.message.stream, signal: this.controller.signal }).catch((error) => {
        if (error.code !== "stream_exists") throw error;
        return this.again();
      });
      if (!response.headers.has("x-quire-stream")) delete this.message.stream; // this server keeps none
      return response;
    }, true);
  }

  /**
   * Takes the answer up again where this browser's text ends. False if the server does not have it now.
   * A question of just now may not have reached the server: it is sent again, under the same id.
   */
  async resume(request) {
    const { message } = this;
    try {
      await this.through(() => this.again());
    } catch (error) {
      if (error.status === 404 && !message.events && Date.now() - message.asked < FRESH_MS) {
        await this.ask(request);
        return true;
      }
      if (error.status === 404) delete message.stream;
      await this.keep();
      return false;
    }
    return true;
  }

  again() {
    const { stream, events: after } = this.message;
    return ask(`/streams/${stream}?after=${after}`, { signal: this.controller.signal });
  }

  async through(open, asking) {
    const { message } = this;
    this.speed = new Speed(message.stats);
    try {
      await this.read(await open());
    } catch (error) {
      if (this.leaving) return;
      if (this.stopping) message.stopped = true;
      else if (!asking && !this.begun) throw error;
      else message.error = withNames(error.message, this.body?.messages ?? []);
    }
    await this.keep();
  }

  /** Reads a response to its end; where the connection is lost, the stream is taken up again. */
  async read(response) {
    for (let lost = 0; ; lost += 1) {
      try {
        for await (const [number, chunk] of events(response)) {
          this.begun = true;
          lost = 0;
          this.take(number, chunk);
        }
        return;
      } catch (error) {
        response = await this.reconnected(error, lost);
      }
    }
  }

  async reconnected(error, lost) {
    for (let trial = lost; error.status === 0 && this.message.stream && trial < RETRIES_MS.length; trial += 1) {
      await pause(RETRIES_MS[trial]);
      if (this.stopping || this.leaving) throw error;
      try {
        return await this.again();
      } catch (problem) {
        if (problem.name === "AbortError") throw problem;
        if (problem.status !== 0) break;
      }
    }
    throw error;
  }

  take(number, chunk) {
    const { message } = this;
    message.events = number ?? message.events;
    if (chunk.prompt_progress) this.progress = chunk.prompt_progress;
    take(message, chunk);
    message.stats = this.speed.stats(chunk, message.stats);
    this.changed(this);
    this.timer ??= setTimeout(() => this.keep(), this.kept ? KEEP_MS : 0);
  }

  async keep() {
    clearTimeout(this.timer);
    this.timer = null;
    this.kept = true;
    await store.keep(this.conversation, [this.message]).catch(() => {});
  }
}

/** An answer's figures, from when it is asked for. */
class Speed {
  constructor(before) {
    this.started = performance.now();
    if (before?.first_s === undefined) return;
    this.first = { at: this.started - 1000 * before.write_s, tokens: before.first_tokens };
    this.started = this.first.at - 1000 * before.first_s;
  }

  /** Those after a chunk, which tells of all tokens so far. */
  stats({ choices, usage }, before) {
    const now = performance.now();
    const { content, reasoning_content: thought, tool_calls: calls } = choices[0]?.delta ?? {};
    const tokens = usage?.completion_tokens ?? before?.tokens;
    if (content || thought || calls) this.first ??= { at: now, tokens };
    const counts = { tokens, prompt: usage?.prompt_tokens ?? before?.prompt, cached: usage?.prompt_tokens_details?.cached_tokens ?? before?.cached };
    if (!this.first) return counts;
    return {
      ...counts,
      first_s: (this.first.at - this.started) / 1000,
      write_s: (now - this.first.at) / 1000,
      first_tokens: this.first.tokens,
    };
  }
}

/** Adds what a chunk says to a message. */
function take(message, chunk) {
  const delta = chunk.choices[0]?.delta ?? {};
  message.reasoning += delta.reasoning_content ?? "";
  message.content += delta.content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  message.model = chunk.model ?? message.model;
  message.finish = chunk.choices[0]?.finish_reason ?? message.finish;
}
