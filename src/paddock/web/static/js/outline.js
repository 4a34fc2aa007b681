/** The outline beside a transcript: a line for each message and tool, which leads to it, and where one reads now. */

import { h } from "./dom.js";
import { shorten } from "./format.js";
import { noteText } from "./items.js";

const LONGEST = 70;

export class Outline {
  constructor() {
    this.list = h("ol", null);
    this.element = h("nav", { class: "outline", "aria-label": "Outline" }, this.list);
    /** @type {Map<Element, HTMLElement>} the line of each entry: its own, or the one before it */
    this.lines = new Map();
    /** @type {HTMLElement | null} */
    this.last = null;
    /** @type {Map<string, HTMLElement>} the line of each tool call that has no result yet */
    this.waiting = new Map();
    this.observer = new IntersectionObserver((seen) => this.mark(seen), { rootMargin: "-15% 0px -75% 0px" });
  }

  /** @param {any} item @param {HTMLElement} entry */
  add(item, entry) {
    const tool = item.kind === "tool_result" ? this.waiting.get(item.id) : undefined;
    if (item.error) tool?.classList.add("failed");
    const line = tool ?? this.newLine(item, entry) ?? this.last;
    if (!line) return;
    this.last = line;
    this.lines.set(entry, line);
    this.observer.observe(entry);
  }

  /** A line for what an entry is; null for what needs none. @param {any} item @param {HTMLElement} entry @returns {HTMLElement | null} */
  newLine(item, entry) {
    const text = lineText(item);
    if (text === null) return null;
    const isBad = item.kind === "note" && item.text !== "outcome: ok";
    const line = h("li", { class: `outline-${item.kind} ${item.role ?? ""} ${isBad ? "failed" : ""}` }, h("button", { type: "button", class: "link", onclick: () => showEntry(entry) }, shorten(text, LONGEST)));
    if (item.kind === "tool_call") this.waiting.set(item.id, line);
    this.list.appendChild(line);
    return line;
  }

  /** @param {IntersectionObserverEntry[]} seen */
  mark(seen) {
    const entry = seen.filter((each) => each.isIntersecting).at(-1)?.target;
    if (!entry) return;
    const line = this.lines.get(entry);
    this.list.querySelector("[aria-current]")?.removeAttribute("aria-current");
    line?.setAttribute("aria-current", "true");
    if (line && this.element.scrollHeight > this.element.clientHeight) this.element.scrollTop = line.offsetTop - this.element.clientHeight / 2;
  }

  clear() {
    this.list.replaceChildren();
    this.lines.clear();
    this.waiting.clear();
    this.last = null;
    this.observer.disconnect();
  }
}

/** Bring an entry of the transcript into sight. @param {HTMLElement} entry */
export function showEntry(entry) {
  entry.scrollIntoView({ block: "start" });
  entry.focus({ preventScroll: true });
}

/** @param {any} item */
function lineText(item) {
  if (item.kind === "message") return (item.role === "system" ? "System prompt" : firstWords(item.text)) || null;
  if (item.kind === "tool_call") return `${item.name} ${firstWords(argument(item.arguments))}`;
  if (item.kind === "image") return "Image";
  if (item.note === "outcome") return noteText(item);
  if (item.kind === "note" && ["warning", "error"].includes(item.note)) return firstWords(item.text);
  return null;
}

/** @param {any} value */
function argument(value) {
  if (typeof value === "string") return value;
  return String(Object.values(value ?? {}).find((each) => typeof each === "string") ?? "");
}

/** The first line, without its marks. @param {string} text */
function firstWords(text) {
  return (text.trimStart().split("\n", 1)[0] ?? "").slice(0, 400).replace(/\*+|`/g, "").replace(/^[\s#>-]+/, "").trim();
}
