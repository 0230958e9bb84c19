// Conversations as files: Markdown to read, or JSON with everything.

import { h } from "./dom.js";
import { described } from "./files.js";
import { whose } from "./message.js";
import { path, versions } from "./tree.js";

function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Save all conversations as one file, which can be imported. */
export const exportAll = (conversations) => download("conversations.json", "application/json", JSON.stringify(conversations, null, 2));

/** Ask for the form of one conversation, and save it. */
export function exported(conversation) {
  const save = (kind, type, text) => () => {
    const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").toLowerCase() || "conversation";
    download(`${name}.${kind}`, type, text);
  };
  const dialog = h("dialog", { class: "small", "aria-label": "Export conversation", onclose: () => dialog.remove() },
    h("form", { method: "dialog" },
      h("h2", {}, "Export"),
      h("p", {}, "Markdown is for reading, and has the versions that are shown. JSON has everything: all versions, files and figures."),
      h("div", { class: "row end" },
        h("button", {}, "Cancel"), h("span", { class: "space" }),
        h("button", { onclick: save("md", "text/markdown", markdown(conversation)) }, "Markdown"),
        h("button", { class: "main", onclick: save("json", "application/json", JSON.stringify(conversation, null, 2)) }, "JSON"))));
  document.body.append(dialog);
  dialog.showModal();
}

function markdown(conversation) {
  const parts = path(conversation).map((message) => {
    const calls = (message.calls ?? []).map((call) => `\`\`\`json\n${call.name}(${call.arguments})\n\`\`\``);
    const files = (message.files ?? []).map((file) => `(${described(file)})`);
    const all = versions(conversation, message);
    const version = all.length > 1 ? ` (version ${all.indexOf(message) + 1} of ${all.length})` : "";
    return [`## ${whose(message)}${version}`, ...files, message.content, ...calls].filter(Boolean).join("\n\n");
  });
  return `# ${conversation.title}\n\n${parts.join("\n\n")}\n`;
}
