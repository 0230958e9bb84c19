// The request for an answer, made of a conversation and what is set for it.

import { part } from "./files.js";
import { failed } from "./message.js";
import { offered } from "./mcp.js";
import { NUMBERS, valuesOf } from "./parameters.js";
import { ancestors } from "./tree.js";

/** The request for an answer that stands in its place, or for its rest if it has text. Throws an Error if tools are missing. */
export async function requestOf(conversation, answer) {
  const values = valuesOf(conversation);
  const body = { stream: true, return_progress: true, stream_options: { include_usage: true, continuous_usage_stats: true }, messages: [] };
  if (answer.model) body.model = answer.model;
  for (const [name] of NUMBERS) if (values[name] !== undefined) body[name] = values[name];
  if (values.thoughts) body.enable_thinking = values.thoughts === "on";
  if (values.kv) [body.kv_scheme, body.kv_bits] = kvOf(values.kv);
  const tools = [...(values.tools ? JSON.parse(values.tools) : []), ...(await offered(values.servers))];
  if (tools.length) body.tools = tools;
  if (values.system) body.messages.push({ role: "system", content: values.system });
  const messages = ancestors(conversation, answer);
  const left = failed(messages);
  for (const message of messages) if (!left.has(message)) body.messages.push(wire(message));
  if (answer.content) {
    body.messages.push({ role: "assistant", content: answer.content });
    body.continue_final_message = true;
  }
  return body;
}

function kvOf(name) {
  const [scheme, bits] = name.split("-");
  return scheme === "plain" ? ["plain", undefined] : [scheme, Number(bits)];
}

function wire(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.tool_call_id, content: message.content };
  if (message.role === "assistant") {
    const calls = message.finish ? message.calls : []; // the last call of an answer that was cut off is not whole
    const sent = { role: "assistant", content: message.content };
    if (calls.length) sent.tool_calls = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    return sent;
  }
  if (!message.files?.length) return { role: "user", content: message.content };
  const parts = message.files.map(part);
  return { role: "user", content: message.content ? [...parts, { type: "text", text: message.content }] : parts };
}
