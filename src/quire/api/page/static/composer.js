// Where one writes: text that grows, pictures by drop, paste or choice, send and stop.

import { announce, h, iconButton } from "./dom.js";

const LARGEST = 20 << 20;

export class Composer {
  constructor(send, stop) {
    this.images = [];
    this.pictures = false;
    this.submit = () => {
      const text = this.field.value.trim();
      if (this.isBusy || (!text && !this.images.length)) return;
      const images = this.images.splice(0);
      this.field.value = "";
      this.refresh();
      send(text, images);
    };
    this.field = h("textarea", { rows: 1, placeholder: "Write a message", "aria-label": "Message", enterkeyhint: "send", oninput: () => this.refresh() });
    this.thumbs = h("div", { class: "thumbs" });
    this.file = h("input", { type: "file", accept: "image/*", multiple: true, hidden: true, onchange: () => { this.take(this.file.files); this.file.value = ""; } });
    this.attach = iconButton("image", "Add pictures", () => this.file.click());
    this.sendButton = iconButton("send", "Send", this.submit, { class: "icon-button round" });
    this.stopButton = iconButton("stop", "Stop", stop, { class: "icon-button round", hidden: true });
    const row = h("div", { class: "write" }, this.attach, this.field, this.sendButton, this.stopButton);
    this.node = h("div", { class: "composer" }, h("div", { class: "box" }, this.thumbs, row), this.file,
      h("p", { class: "hint" }, "Enter sends, Shift+Enter begins a line."));
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.submit(); }
      if (event.key === "Escape") stop();
    });
    this.field.addEventListener("paste", (event) => event.clipboardData.files.length && (event.preventDefault(), this.take(event.clipboardData.files)));
    for (const kind of ["dragover", "dragleave", "drop"]) addEventListener(kind, (event) => this.drag(event));
    this.refresh();
  }

  drag(event) {
    if (![...(event.dataTransfer?.types ?? [])].includes("Files")) return;
    event.preventDefault();
    document.body.classList.toggle("dropping", event.type === "dragover" && this.pictures);
    if (event.type === "drop") this.take(event.dataTransfer.files);
  }

  async take(files) {
    for (const file of files) {
      if (!this.pictures) return announce("This model takes no pictures.");
      if (!file.type.startsWith("image/")) announce(`${file.name} is no picture.`);
      else if (file.size > LARGEST) announce(`${file.name} is larger than 20 MB.`);
      else this.images.push(await dataUrl(file));
    }
    this.refresh();
    this.focus();
  }

  set busy(value) {
    this.isBusy = value;
    this.sendButton.hidden = value;
    this.stopButton.hidden = !value;
    this.refresh();
  }

  refresh() {
    this.thumbs.replaceChildren(...this.images.map((url, index) => h("span", { class: "thumb" },
      h("img", { src: url, alt: `picture ${index + 1}, not sent yet` }),
      iconButton("close", `Take picture ${index + 1} away`, () => { this.images.splice(index, 1); this.refresh(); }))));
    this.attach.hidden = !this.pictures;
    this.sendButton.disabled = !this.field.value.trim() && !this.images.length;
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight, 220)}px`;
  }

  focus() {
    if (matchMedia("(hover: hover)").matches) this.field.focus({ preventScroll: true });
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
