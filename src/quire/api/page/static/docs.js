// /openapi.json for people.

import { ask, enterKey, onKeyNeeded } from "./api.js";
import { $, h } from "./dom.js";
import { keyDialog } from "./key.js";
import { codeBlock } from "./markdown.js";
import { themeButton } from "./theme.js";

const EXAMPLES = {
  "/v1/chat/completions": { messages: [{ role: "user", content: "What is 27 plus 45?" }] },
  "/v1/completions": { prompt: "Once", max_tokens: 16 },
  "/v1/messages": { max_tokens: 64, messages: [{ role: "user", content: "What is 27 plus 45?" }] },
  "/v1/messages/count_tokens": { messages: [{ role: "user", content: "Hello" }] },
  "/v1/responses": { input: "What is 27 plus 45?" },
  "/tokenize": { prompt: "Hello" },
  "/detokenize": { tokens: [1, 2, 3] },
  "/models/load": {},
  "/models/unload": {},
};
themeButton($("#tools-place"));
onKeyNeeded(keyDialog);

const anchor = (method, path) => `${method}${path.replace(/[^\w]+/g, "-")}`.replace(/-$/, "");

try {
  const spec = await (await ask("/openapi.json")).json();
  const operations = Object.entries(spec.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => ({ path, method, operation })));
  const names = spec.components.schemas.ChatRequest?.properties?.model?.enum ?? [];
  $("#main").replaceChildren(
    h("h1", {}, `${spec.info.title} API`),
    h("p", {}, `Version ${spec.info.version}. The document itself: `, h("a", { href: "/openapi.json" }, "/openapi.json"), ". With an API key, send it as ", h("code", {}, "Authorization: Bearer KEY"), " or ", h("code", {}, "x-api-key: KEY"), "."),
    h("ul", { class: "contents" }, operations.map(({ path, method, operation }) => h("li", {}, h("a", { href: `#${anchor(method, path)}` }, verb(method), h("code", {}, path)), h("span", {}, operation.summary)))),
    ...operations.map((each) => section(spec, each, names[0])));
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
} catch (error) {
  const enter = h("button", { type: "button", class: "main", onclick: async () => (await enterKey()) && location.reload() }, "Enter key");
  $("#main").replaceChildren(h("p", { class: "error", role: "alert" }, error.message), error.status === 401 ? enter : "");
}

function verb(method) {
  return h("span", { class: `verb ${method}` }, method.toUpperCase());
}

function section(spec, { path, method, operation }, model) {
  const reference = operation.requestBody?.content["application/json"]?.schema;
  const schema = reference && resolved(spec, reference);
  const example = EXAMPLES[path];
  const body = example && { ...(model ? { model } : {}), ...example };
  const asked = method === (body ? "post" : "get") ? "" : `-X ${method.toUpperCase()} `;
  const command = `curl ${asked}${location.origin}${path}${body ? ` \\\n  -H 'content-type: application/json' \\\n  -d '${JSON.stringify(body)}'` : ""}`;
  const statuses = Object.entries(operation.responses).map(([status, { description }]) => h("tr", {}, h("td", {}, h("code", {}, status)), h("td", {}, description)));
  return h("section", { id: anchor(method, path), class: "operation" },
    h("h2", {}, verb(method), h("code", {}, path)),
    h("p", {}, operation.summary, "."),
    codeBlock(command, "sh"),
    schema && h("details", {}, h("summary", {}, `Fields of the body (${Object.keys(schema.properties ?? {}).length})`), fields(spec, schema)),
    h("details", {}, h("summary", {}, "Answers"), h("div", { class: "table" }, h("table", {}, h("tbody", {}, statuses)))));
}

function resolved(spec, schema) {
  const found = /^#\/components\/schemas\/(.+)$/.exec(schema.$ref ?? "");
  return found ? spec.components.schemas[found[1]] : schema;
}

function fields(spec, schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => h("tr", {},
    h("td", {}, h("code", {}, name), required.has(name) && h("span", { class: "needed" }, "required")),
    h("td", {}, kind(spec, field)),
    h("td", {}, resolved(spec, field).description ?? field.description ?? "")));
  const head = h("tr", {}, ["field", "type", ""].map((name) => h("th", { scope: "col" }, name)));
  return h("div", { class: "table" }, h("table", {}, h("thead", {}, head), h("tbody", {}, rows)));
}

/** A schema in a few words. */
function kind(spec, schema, depth = 0) {
  const name = /\/([^/]+)$/.exec(schema.$ref ?? "")?.[1];
  if (name) return depth ? name : `${name}${inner(spec, schema)}`;
  const several = schema.anyOf ?? schema.oneOf;
  if (several) return several.filter((each) => each.type !== "null").map((each) => kind(spec, each, depth + 1)).join(" or ");
  if (schema.enum) return schema.enum.filter((each) => each !== null).map((each) => JSON.stringify(each)).join(", ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${schema.items ? kind(spec, schema.items, depth + 1) : "anything"}`;
  return `${schema.type ?? "anything"}${range(schema)}`;
}

function inner(spec, schema) {
  const properties = Object.keys(resolved(spec, schema).properties ?? {});
  return properties.length ? ` {${properties.slice(0, 6).join(", ")}${properties.length > 6 ? ", …" : ""}}` : "";
}

function range(schema) {
  const low = schema.minimum ?? (schema.exclusiveMinimum !== undefined ? `above ${schema.exclusiveMinimum}` : undefined);
  const high = schema.maximum ?? (schema.exclusiveMaximum !== undefined ? `below ${schema.exclusiveMaximum}` : undefined);
  if (low === undefined && high === undefined) return "";
  if (high === undefined) return `, from ${low}`;
  return low === undefined ? `, to ${high}` : `, ${low} to ${high}`;
}
