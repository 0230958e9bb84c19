// Tools of the MCP servers that the operator named: what there is, and calls, each confirmed by the user.

import { ask, get } from "./api.js";
import { h } from "./dom.js";

const MOST_ROUNDS = 20; // of answers to one question whose calls are made unasked
const forms = new WeakMap(); // by the message whose calls they make
let listing = null;

/** The servers with their tools; asked for once, and again where `anew`. */
export function servers(anew = false) {
  if (anew || !listing) listing = get("/mcp/tools").then(({ data }) => data);
  listing.catch(() => { listing = null; });
  return listing;
}

/** The tools of some servers, as a request has them. Throws an Error for a server that cannot be asked. */
export async function offered(names) {
  if (!names?.length) return [];
  const all = await servers();
  return names.flatMap((name) => {
    const found = all.find(({ server }) => server === name);
    if (!found || found.problem) {
      listing = null; // it may be there again
      throw new Error(found?.problem ?? `This server has no MCP server "${name}" any more.`);
    }
    return found.tools.map(({ function: called, description, parameters }) => ({ type: "function", function: { name: called, description, parameters } }));
  });
}

/** The server and the tool of a call; null if it is for a tool whose result the user writes. */
async function target({ name }) {
  for (const { server, tools } of await servers().catch(() => [])) {
    const tool = tools.find((each) => each.function === name);
    if (tool) return { server, tool: tool.name };
  }
  return null;
}

async function made({ server, tool }, call, signal) {
  const given = call.arguments.trim() ? JSON.parse(call.arguments) : {};
  const response = await ask("/mcp/call", { body: { server, tool, arguments: given }, signal });
  const { text, failed } = await response.json();
  return failed ? `The tool failed: ${text}` : text;
}

/**
 * Where the calls of an answer get their results: from MCP servers, once the user allows it, else from the user.
 * `options.allowed` tells which tools need no more asking, `allow` notes one more, `keep` keeps the
 * message, `rounds` is how many answers with calls came since the question, `send` takes the results.
 */
export function callForm(message, options) {
  if (!forms.has(message)) forms.set(message, newForm(message, options));
  return forms.get(message); // a call runs on while another conversation is open
}

function newForm(message, options) {
  const results = message.calls.map(() => null);
  const send = h("button", { class: "main", hidden: true }, "Send results");
  const form = h("form", { class: "results" });
  const finish = () => {
    form.hidden = true;
    options.send(message.calls.map((call, at) => ({ tool_call_id: call.id, content: results[at]() })));
  };
  const got = () => {
    if (results.every(Boolean) && send.hidden) finish();
  };
  const parts = message.calls.map((call, at) => {
    const part = h("div", { class: "tool-call" });
    const write = () => {
      const field = h("textarea", { rows: 2, dir: "auto", required: true, placeholder: `What ${call.name} gives`, "aria-label": `Result of ${call.name}` });
      part.append(field);
      send.hidden = false;
      results[at] = () => field.value;
    };
    const take = (text) => {
      results[at] = () => text;
      part.replaceChildren(h("p", { class: "note", role: "status" }, `${call.name}: done`));
      got();
    };
    target(call).then((found) => (found ? confirmed(part, call, { ...options, found, take, keep: () => options.keep(message) }) : write()));
    return part;
  });
  form.append(...parts, h("div", { class: "row end" }, send));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (results.every(Boolean)) finish();
  });
  return form;
}

/** Boxes that choose servers, once they are known; `chosen()` gives their names. */
export function serverChoice(chosen) {
  const boxes = new Map();
  const node = h("fieldset", { hidden: true }, h("legend", {}, "Tools of this server's MCP servers. You are asked before each call."));
  servers(true).then((all) => {
    node.hidden = !all.length;
    for (const { server, tools, problem } of all) {
      boxes.set(server, h("input", { type: "checkbox", checked: chosen.includes(server) }));
      const what = problem || tools.map(({ name }) => name).join(", ");
      node.append(h("label", { class: "check" }, boxes.get(server), ` ${server} `, h("span", { class: "hint" }, what)));
    }
  }, () => {});
  return { node, chosen: () => (boxes.size ? [...boxes].filter(([, box]) => box.checked).map(([name]) => name) : chosen) };
}

/** Ask whether a call may be made, and make it. One that was begun before a reload is never repeated unasked. */
function confirmed(part, call, { found, allowed, allow, rounds, keep, take }) {
  const run = async () => {
    const controller = new AbortController();
    const stop = h("button", { type: "button", onclick: () => controller.abort() }, "Stop");
    part.replaceChildren(h("div", { class: "row" }, h("p", { class: "note", role: "status" }, `Calling ${found.tool} on ${found.server}…`), stop));
    call.begun = true;
    await keep();
    take(await made(found, call, controller.signal).catch((error) => (error.name === "AbortError" ? "The user stopped this call." : `The call failed: ${error.message}`)));
  };
  if (allowed(call.name) && !call.begun && rounds <= MOST_ROUNDS) {
    run();
    return;
  }
  const question = call.begun ? "This call was begun before, here or in another tab. Make it again?" : `May the model call the tool “${found.tool}” of the MCP server “${found.server}”?`;
  const button = (label, act, more = {}) => h("button", { type: "button", onclick: act, ...more }, label);
  part.replaceChildren(h("p", { class: "note" }, question), h("div", { class: "row" },
    button("Allow once", run, { class: "main" }),
    button("Allow in this conversation", () => { allow(call.name); run(); }),
    button("Decline", () => take("The user declined this call."))));
}
