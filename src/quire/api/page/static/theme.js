// Light, dark, or as the machine has it.

import { iconButton } from "./dom.js";
import { settings } from "./store.js";

const THEMES = ["auto", "light", "dark"];

/** Gives the page its theme, and a place the button that changes it. */
export function themeButton(place) {
  const button = iconButton("theme", "", () => use(after(settings.read("theme", "auto"))), { id: "theme" });
  const use = (name) => {
    settings.write("theme", name);
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    button.title = button.ariaLabel = `Theme: ${name}. Change to ${after(name)}`;
  };
  use(settings.read("theme", "auto"));
  place.append(button);
}

const after = (name) => THEMES[(THEMES.indexOf(name) + 1) % THEMES.length];
