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

/**
 * Two keys that move the focus through elements, from the one that has it or is the first in sight.
 * @param {Element} root @param {string} selector @param {AbortSignal} signal
 * @param {{next: string, previous: string, what: string}} words
 */
export function walkKeys(root, selector, signal, { next, previous, what }) {
  /** @param {1 | -1} by */
  const move = (by) => {
    const all = /** @type {HTMLElement[]} */ ([...root.querySelectorAll(selector)]);
    const focused = all.find((each) => each.contains(document.activeElement));
    const target = focused ? all[all.indexOf(focused) + by] : beyondFocus(all, by) ?? firstInSight(all);
    if (!target) return;
    if (!target.hasAttribute("tabindex")) target.tabIndex = -1;
    target.focus({ preventScroll: true });
    target.scrollIntoView({ block: target.offsetHeight > innerHeight * 0.8 ? "start" : "nearest" });
  };
  useKeys(
    [
      { keys: next, does: `Next ${what}`, run: () => move(1) },
      { keys: previous, does: `Previous ${what}`, run: () => move(-1) },
    ],
    signal,
  );
}

/** The element next to a focus that is on none of them. @param {HTMLElement[]} all @param {1 | -1} by */
function beyondFocus(all, by) {
  const focus = document.activeElement;
  if (!focus || focus === document.body || focus.id === "main" || focus.closest("header, nav")) return undefined;
  const side = by > 0 ? Node.DOCUMENT_POSITION_FOLLOWING : Node.DOCUMENT_POSITION_PRECEDING;
  const beyond = all.filter((each) => focus.compareDocumentPosition(each) & side);
  return by > 0 ? beyond[0] : beyond.at(-1);
}

/** @param {HTMLElement[]} all */
function firstInSight(all) {
  return all.find((each) => each.getBoundingClientRect().bottom > 80) ?? all.at(-1);
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
