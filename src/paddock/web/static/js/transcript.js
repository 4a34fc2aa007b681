/** What was said and done, in order; grows while the rollout runs. Everything an agent wrote is shown as text. */

import { get } from "./api.js";
import { broken, empty, fill, h } from "./dom.js";
import { diffBlock } from "./diff.js";
import { clockTime, shorten } from "./format.js";
import { useKeys } from "./keys.js";
import { placeUrl } from "./router.js";

const ITEMS_A_PAGE = 200;
const LONG_TEXT = 3000;
const RASTER = ["image/png", "image/jpeg", "image/gif", "image/webp"];

/** @param {import("./rollout.js").Scene} scene */
export async function transcriptPanel({ id, rollout, signal, onItems }) {
  const list = h("div", { class: "transcript", role: "feed", "aria-label": "Transcript" });
  const end = h("div", { class: "transcript-end" });
  const following = h("input", { type: "checkbox", checked: rollout.live, id: "follow" });
  /** The `seq` of the item that comes next. */
  let next = 0;
  let isComplete = false;
  /** @type {Promise<void> | null} */
  let loading = null;
  /** Items that came live before the pages had caught up. @type {Map<number, any>} */
  const early = new Map();

  /** @param {any[]} items */
  function add(items) {
    for (const item of items) {
      if (item.seq < next) replace(item);
      else {
        next = item.seq + 1;
        list.appendChild(itemElement(item, id));
      }
    }
    if (following.checked && items.length) end.scrollIntoView({ block: "end" });
  }

  /** A tool that was running has its result now. @param {any} item */
  function replace(item) {
    const existing = list.querySelector(`[data-seq="${Number(item.seq)}"]`);
    if (existing) existing.replaceWith(itemElement(item, id));
  }

  function load() {
    loading ??= (async () => {
      try {
        const page = await get(`rollouts/${id}/transcript`, { after: next, limit: ITEMS_A_PAGE }, signal);
        add(page.items);
        isComplete = page.items.length < ITEMS_A_PAGE;
        if (isComplete && early.size) {
          add([...early.values()].filter((item) => item.seq >= next).sort((a, b) => a.seq - b.seq));
          early.clear();
        }
        fill(end, isComplete ? null : h("span", { class: "muted" }, "More below…"));
      } catch (error) {
        if (!signal.aborted) fill(end, broken(error, load));
      } finally {
        loading = null;
      }
    })();
    return loading;
  }

  const nearEnd = new IntersectionObserver((seen) => {
    if (seen.some((entry) => entry.isIntersecting) && !isComplete) load().then(() => nearEnd.takeRecords());
  }, { rootMargin: "1500px" });
  signal.addEventListener("abort", () => nearEnd.disconnect());
  onItems((items) => {
    if (isComplete) add(items);
    else for (const item of items) early.set(item.seq, item);
  });
  await load();
  if (rollout.live) while (!isComplete && !signal.aborted) await load();
  nearEnd.observe(end);
  if (!list.children.length && !rollout.live) return empty("Nothing was said", h("p", null, "The rollout ended before the agent asked its model for anything."));

  let chosen = -1;
  /** @param {number} by */
  const move = (by) => {
    const items = /** @type {HTMLElement[]} */ ([...list.children]);
    chosen = Math.max(0, Math.min(items.length - 1, chosen + by));
    items[chosen]?.focus();
    items[chosen]?.scrollIntoView({ block: "nearest" });
  };
  useKeys(
    [
      { keys: "j", does: "Next entry of the transcript", run: () => move(1) },
      { keys: "k", does: "Previous entry", run: () => move(-1) },
      { keys: "o", does: "Open or close the entry", run: () => toggle(list.children[chosen]) },
      { keys: "e", does: "To the end", run: () => end.scrollIntoView() },
    ],
    signal,
  );
  return h("div", { class: "stack" }, rollout.live ? h("label", { class: "follow", for: "follow" }, following, " follow as it happens") : null, list, end);
}

/** @param {Element | undefined} item */
function toggle(item) {
  const fold = item?.querySelector("details");
  if (fold) fold.open = !fold.open;
}

/** One entry of a transcript. @param {any} item @param {string} id of its rollout */
export function itemElement(item, id) {
  const side = item.role && !["agent", "system", "user", "assistant", "tool"].includes(item.role) ? item.role : null;
  const { title, body, kind } = described(item);
  return h(
    "article",
    { class: `item ${kind}`, dataset: { seq: item.seq }, tabindex: -1, "aria-label": title },
    h(
      "header",
      { class: "item-head" },
      h("span", { class: "item-title" }, title),
      side ? h("span", { class: "tag side" }, side) : null,
      item.call ? h("a", { class: "muted", href: placeUrl(["rollouts", id, "tokens", item.call]) }, item.call) : null,
      item.at ? h("time", { class: "muted" }, clockTime(item.at)) : null,
    ),
    body,
  );
}

/** @param {any} item @returns {{title: string, kind: string, body: any}} */
function described(item) {
  switch (item.kind) {
    case "message":
      return { title: item.role === "assistant" || item.role === "agent" ? "Agent" : item.role === "system" ? "System" : "User", kind: `said-${item.role === "agent" ? "assistant" : item.role}`, body: item.role === "system" ? folded(item.text, "system prompt") : longText(item.text) };
    case "thinking":
      return { title: "Thinking", kind: "thought", body: folded(item.text, "thought") };
    case "tool_call":
      return { title: `Tool ${item.name}`, kind: "tool", body: item.change ? diffBlock(item.change) : h("pre", { tabindex: 0 }, argumentsText(item.arguments)) };
    case "tool_result":
      return { title: item.error ? `Result of ${item.name ?? "tool"}: failed` : `Result of ${item.name ?? "tool"}`, kind: item.error ? "result failed" : "result", body: longText(item.text, true) };
    case "image":
      return { title: "Image", kind: "image", body: picture(item) };
    case "event":
      return { title: "Now", kind: "now", body: longText(item.text ?? JSON.stringify(item.data ?? {})) };
    case "note":
      if (item.note === "warning") return { title: "Warning", kind: "note", body: h("p", { class: "error-text" }, `warning: ${item.text}`) };
    // falls through
    default:
      return { title: "Note", kind: "note", body: h("p", { class: "muted" }, item.text ?? "") };
  }
}

/** Known raster types only, from data that is in the item: nothing is ever fetched for it. @param {any} item */
export function picture(item) {
  if (!RASTER.includes(item.mime) || !/^[A-Za-z0-9+/=\s]*$/.test(item.data ?? "")) return h("p", { class: "muted" }, `An image of type ${item.mime}, which is not shown.`);
  return h("img", { src: `data:${item.mime};base64,${item.data}`, alt: "Image in the conversation", loading: "lazy" });
}

/** @param {any} value */
function argumentsText(value) {
  if (typeof value === "string") return value;
  const parts = Object.entries(value ?? {});
  if (parts.length === 1 && typeof parts[0][1] === "string") return String(parts[0][1]);
  return JSON.stringify(value, null, 2);
}

/** @param {string} text @param {string} what */
function folded(text, what) {
  return h("details", null, h("summary", { class: "muted" }, `${what}, ${text.length.toLocaleString("en")} characters: ${shorten(text.replace(/\s+/g, " "), 100)}`), h("pre", { tabindex: 0 }, text));
}

/** @param {string} text @param {boolean} [mono] */
function longText(text, mono = false) {
  const element = h(mono ? "pre" : "div", { class: mono ? "" : "prose", tabindex: mono ? 0 : null }, text.slice(0, LONG_TEXT));
  if (text.length <= LONG_TEXT) return element;
  const more = h("button", { type: "button", class: "link", onclick: () => (fill(element, text), more.remove()) }, `Show all ${text.length.toLocaleString("en")} characters`);
  return h("div", null, element, more);
}
