// Files that go along with a message: what they are, who takes them, how they are sent and shown.

import { h, icon, iconButton } from "./dom.js";

const LARGEST = 20 << 20;
const LONGEST_TEXT = 1 << 20; // bytes of a file that goes along as text

/** By the name that /v1/models has for each; `formats` are those that the server reads. */
const KINDS = {
  image: {
    noun: "picture", plural: "pictures", sign: "image", formats: "PNG, JPEG, WebP, GIF or BMP",
    types: /^image\/(png|jpeg|webp|gif|bmp|x-ms-bmp)$/, names: /\.(png|jpe?g|webp|gif|bmp)$/i,
    accept: "image/png,image/jpeg,image/webp,image/gif,image/bmp",
    player: (url, label) => h("img", { class: "sent", src: url, alt: label }),
  },
  audio: {
    noun: "sound", plural: "sound", sign: "sound", formats: "WAV, MP3, FLAC, Ogg or AAC",
    types: /^audio\//, names: /\.(wav|mp3|flac|og[ga]|opus|aac|m4a)$/i, accept: "audio/*,.flac,.opus,.m4a",
    player: (url, label) => h("audio", { class: "sent", src: url, controls: true, preload: "metadata", "aria-label": label }),
  },
  video: {
    noun: "video", plural: "video", sign: "video", formats: "MP4, WebM, Matroska or AVI",
    types: /^video\//, names: /\.(mp4|m4v|mov|webm|mkv|avi|ogv)$/i, accept: "video/*,.mkv",
    player: (url, label) => h("video", { class: "sent", src: url, controls: true, preload: "metadata", playsinline: true, "aria-label": label }),
  },
};
/** Those that the server reads for every model. */
const READ = {
  document: { noun: "PDF", plural: "PDFs", sign: "text", types: /^application\/pdf$/, names: /\.pdf$/i },
  text: { noun: "text", plural: "text", sign: "text" },
};
const ALL = { ...KINDS, ...READ };

/** The kinds that a model takes; all of them for one that has not said so yet. */
export const taken = (model) => Object.keys(KINDS).filter((kind) => model?.modalities?.includes(kind) ?? true);

/** "pictures, sound, PDFs or text", as far as these kinds go. */
export const named = (kinds) => listed([...kinds, ...Object.keys(READ)].map((kind) => ALL[kind].plural));

/** What a message that is nothing but files is called. */
export const titled = ([{ kind, name }]) => (kind in READ ? name : `A ${KINDS[kind].noun}`);

/** A file's words, where the file itself cannot stand. */
export const described = ({ kind, name }) => (name ? `${ALL[kind].noun}: ${name}` : ALL[kind].noun);

/** Why a model cannot be sent a file; "" if it can. */
export function refusal({ kind, name }, model) {
  if (kind in READ || taken(model).includes(kind)) return "";
  return `${name ?? `The ${KINDS[kind].noun}`} is not sent: ${model.id} takes no ${KINDS[kind].plural}.`;
}

/** A file as the page keeps it. Throws an Error that says why it cannot be sent. */
export async function read(file, model) {
  const { name, size, type } = file;
  const kind = [...Object.keys(KINDS), "document"].find((each) => (type ? ALL[each].types : ALL[each].names).test(type || name));
  if (!kind) return textFile(file, model);
  const problem = refusal({ kind, name }, model);
  if (problem) throw new Error(problem);
  if (size > LARGEST) throw new Error(`${name} is larger than 20 MB, the most that the page sends.`);
  return { kind, name, url: await dataUrl(file) };
}

/** A file whose words go along. Throws an Error if it holds none, or too many. */
async function textFile(file, model) {
  const { name, size } = file;
  if (size > LONGEST_TEXT) throw new Error(`${name} is larger than 1 MB, the most that the page sends as text.`);
  const text = await file.arrayBuffer().then((bytes) => new TextDecoder("utf-8", { fatal: true }).decode(bytes)).catch(() => "\0");
  if (!text.includes("\0")) return { kind: "text", name, text };
  const known = taken(model).map((each) => `${KINDS[each].plural} (${KINDS[each].formats})`);
  throw new Error(`${name} is of no kind that the page sends: ${listed([...known, "PDFs", "text (UTF-8)"])}.`);
}

const names = new WeakMap(); // of files, by their parts

/** As the API takes it. */
export function part({ kind, name, url, text }) {
  if (kind === "text") return { type: "text", text: quoted(name, text) };
  const wire = kind === "document" ? { type: "file", file: { filename: name, file_data: url } } : { type: `${kind}_url`, [`${kind}_url`]: { url } };
  names.set(wire, name);
  return wire;
}

/** A file's name and text, fenced by more marks than it has in a row itself. */
function quoted(name, text) {
  const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), ([marks]) => marks.length));
  const fence = "`".repeat(longest + 1);
  return `${name}\n\n${fence}\n${text.replace(/\n$/, "")}\n${fence}\n\n`;
}

/** An error of the API with the files' names where it has their places in the request. */
export function withNames(error, messages) {
  messages.forEach(({ content }, at) => Array.isArray(content) && content.forEach((wire, index) => {
    const name = names.get(wire);
    if (name) error = error.replaceAll(`'messages[${at}].content[${index}].${wire.type}.${wire.type === "file" ? "file_data" : "url"}'`, name);
  }));
  return error;
}

/** A file that was sent: a picture, or a player with the file's name; the name alone of what the browser cannot show. */
export function player(file) {
  const { kind, url, name, text } = file;
  if (kind === "text") return h("details", { class: "attached" }, h("summary", {}, chip(file)), h("pre", { dir: "auto" }, text));
  if (kind === "document") return chip(file);
  const shown = KINDS[kind].player(url, name);
  if (kind === "image") return orName(shown, file);
  const node = h("figure", { class: "media" }, shown, h("figcaption", {}, name));
  shown.addEventListener("error", () => node.replaceChildren(thumb(file), h("figcaption", {}, "This browser cannot play it.")));
  return node;
}

/** Files that are not sent yet, with a button each that takes one away. */
export const removable = (files, remove) => files.map((file) => h("span", { class: "thumb" }, thumb(file),
  iconButton("close", `Take ${file.name} away`, () => remove(file))));

function thumb(file) {
  const { kind, url, name } = file;
  return kind === "image" ? orName(h("img", { src: url, alt: name, title: name }), file) : chip(file);
}

/** A picture; its file's name where the browser cannot show it. */
function orName(picture, file) {
  picture.addEventListener("error", () => picture.replaceWith(chip(file, "cannot be shown")));
  return picture;
}

const chip = ({ kind, name }, more) => h("span", { class: "chip", title: name }, icon(ALL[kind].sign),
  h("span", {}, name), more && h("small", {}, more));

function listed(words) {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} or ${words.at(-1)}`;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}
