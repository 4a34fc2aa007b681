/** Keys. A view names its own while it is shown; `?` lists all that work here. */

import { h } from "./dom.js";

/** @typedef {{keys: string, does: string, run: () => void}} Key */

/** @type {Set<Key>} */
const active = new Set();
let pending = "";
let pendingSince = 0;
const PENDING_MS = 900;

/** Make keys work until the signal aborts. `keys` is one key, or two with a space between. @param {Key[]} keys @param {AbortSignal} [signal] */
export function useKeys(keys, signal) {
  for (const key of keys) active.add(key);
  signal?.addEventListener("abort", () => keys.forEach((key) => active.delete(key)));
}

/** @param {KeyboardEvent} event */
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
  const typed = performance.now() - pendingSince < PENDING_MS && pending ? `${pending} ${event.key}` : event.key;
  const list = [...active].reverse();
  const binding = list.find((key) => key.keys === typed) ?? list.find((key) => key.keys === event.key);
  if (binding) {
    event.preventDefault();
    pending = "";
    binding.run();
  } else if (list.some((key) => key.keys.startsWith(`${event.key} `))) {
    pending = event.key;
    pendingSince = performance.now();
  } else pending = "";
}

/** @param {EventTarget | null} target */
function isTyping(target) {
  if (!(target instanceof HTMLElement)) return false;
  return target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName);
}

export function startKeys() {
  addEventListener("keydown", onKey);
  useKeys([{ keys: "?", does: "Show this help", run: showHelp }]);
}

export function showHelp() {
  const rows = [...active].map((key) => h("tr", null, h("td", null, key.keys.split(" ").map((part) => h("kbd", null, part))), h("td", null, key.does)));
  const dialog = h(
    "dialog",
    { class: "help", "aria-label": "Keyboard help", onclose: () => dialog.remove() },
    h("h2", null, "Keys"),
    h("table", null, h("tbody", null, rows)),
    h("form", { method: "dialog" }, h("button", { autofocus: true }, "Close")),
  );
  document.body.appendChild(dialog);
  dialog.showModal();
}
