// The page: its parts together, and which view shows.

import { onKeyNeeded } from "./api.js";
import { Chat } from "./chat.js";
import { $, iconButton } from "./dom.js";
import { keyDialog } from "./key.js";
import { Live } from "./live.js";
import { listen, sheet } from "./shortcuts.js";
import { Status } from "./status.js";
import { themeButton } from "./theme.js";

onKeyNeeded(keyDialog);

function show(name) {
  document.body.dataset.view = name;
  for (const view of document.querySelectorAll(".view")) view.hidden = view.id !== name;
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.tagName !== "A") continue;
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  live.watch(name === "live");
}

function drawer(open = !document.body.classList.contains("drawer")) {
  document.body.classList.toggle("drawer", open);
  $("#menu").setAttribute("aria-expanded", String(open));
  if (open) $("#side button")?.focus();
}

const chat = new Chat($("#chat"), $("#side"), () => drawer(false), (running) => status.turn(running));
const live = new Live($("#live"));
const status = new Status($("#state"), chat, (list) => {
  chat.models(list);
  live.models(list);
});

$("#menu-place").append(iconButton("menu", "Conversations", () => drawer(), { id: "menu", "aria-controls": "side", "aria-expanded": "false" }));
$("#tools-place").append(iconButton("keys", "Keyboard shortcuts", sheet));
themeButton($("#tools-place"));
listen({
  search: () => { drawer(true); chat.sidebar.search.focus(); },
  begin: () => { location.hash = "#chat"; chat.open(null); },
});
addEventListener("hashchange", () => show(location.hash === "#live" ? "live" : "chat"));
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && document.body.classList.contains("drawer")) drawer(false);
});
$("#main").addEventListener("click", () => document.body.classList.contains("drawer") && drawer(false));
show(location.hash === "#live" ? "live" : "chat");

await chat.begin();
await status.poll();
document.documentElement.dataset.ready = "";
