/** What was said and done, in order; grows while the rollout runs. */

import { get } from "./api.js";
import { broken, empty, fill, h } from "./dom.js";
import { itemElement } from "./items.js";
import { useKeys, walkKeys } from "./keys.js";
import { Outline, showEntry } from "./outline.js";

const ITEMS_A_PAGE = 200;
/** Entries among which a reported text is searched. */
const RECENT = 8;

/** @param {import("./rollout.js").Scene} scene */
export async function transcriptPanel({ id, rollout, place, signal, onItems }) {
  const list = h("div", { class: "transcript", role: "feed", "aria-label": "Transcript" });
  /** What the agent reports before the call that will contain it has ended. */
  const ahead = h("div", { class: "transcript" });
  const end = h("div", { class: "transcript-end" });
  const following = h("input", { type: "checkbox", checked: rollout.live, id: "follow" });
  const outline = new Outline();
  /** @type {any[]} */
  const shown = [];
  /** The `seq` of the item that comes next. */
  let next = 0;
  let isComplete = false;
  let asSource = false;
  /** @type {Promise<void> | null} */
  let loading = null;
  /** Items that came live before the pages had caught up. @type {Map<number, any>} */
  const early = new Map();

  /** @param {any[]} items */
  function add(items) {
    for (const item of items) {
      if (item.seq === null) {
        // Some agents report a text after its call has ended: it is there already.
        if (!shown.slice(-RECENT).some((each) => each.text?.trim() === item.text?.trim() && item.text)) ahead.appendChild(itemElement(item, id, { asSource }));
      } else if (item.seq >= next) {
        next = item.seq + 1;
        shown.push(item);
        append(item);
        ahead.replaceChildren();
      }
    }
    if (following.checked && items.length) end.scrollIntoView({ block: "end" });
  }

  /** @param {any} item */
  function append(item) {
    const last = list.lastElementChild;
    if (item.note === "stage" && last?.classList.contains("stages")) last.querySelector("p")?.append(` · ${stageText(item)}`);
    else {
      const entry = itemElement(item.note === "stage" ? { ...item, text: stageText(item) } : item, id, { asSource });
      if (item.note === "stage") entry.classList.add("stages");
      list.appendChild(entry);
      outline.add(item, entry);
    }
  }

  function load() {
    loading ??= (async () => {
      try {
        const page = await get(`rollouts/${id}/transcript`, { after: next, limit: ITEMS_A_PAGE }, signal);
        add(page.items);
        isComplete = page.items.length < ITEMS_A_PAGE;
        if (isComplete && early.size) {
          add([...early.values()].sort((a, b) => a.seq - b.seq));
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

  /** Loads pages until there is enough, or no more come. @param {() => boolean} isEnough */
  async function loadUntil(isEnough) {
    for (let before = -1; before < next && !isEnough() && !isComplete && !signal.aborted; ) {
      before = next;
      await load();
    }
  }

  const nearEnd = new IntersectionObserver((seen) => {
    if (seen.some((entry) => entry.isIntersecting) && !isComplete) load().then(() => nearEnd.takeRecords());
  }, { rootMargin: "1500px" });
  signal.addEventListener("abort", () => {
    nearEnd.disconnect();
    outline.clear();
  });
  onItems((items) => {
    if (isComplete) add(items);
    else for (const item of items) if (item.seq !== null) early.set(item.seq, item);
  });
  await load();
  if (rollout.live) await loadUntil(() => false);
  nearEnd.observe(end);
  if (!list.children.length && !rollout.live) return empty("Nothing was said", h("p", null, "The rollout ended before the agent asked its model for anything."));

  /** The entry that the address names: a call, or a tool of it. */
  async function showNamed() {
    const call = place.query.get("call");
    if (!call) return;
    const tool = place.query.get("tool");
    const find = () => entries(list).find((entry) => entry.dataset.call === call && (!tool || entry.dataset.tool === tool));
    await loadUntil(() => Boolean(find()));
    const entry = find();
    if (entry) requestAnimationFrame(() => showEntry(entry));
  }

  function switchSource() {
    asSource = !asSource;
    source.setAttribute("aria-pressed", String(asSource));
    list.replaceChildren();
    outline.clear();
    shown.forEach(append);
  }
  const source = h("button", { type: "button", class: "small", "aria-pressed": "false", title: "Messages as they were sent (m)", onclick: switchSource }, "Source");
  walkKeys(list, ".item", signal, { next: "j", previous: "k", what: "entry of the transcript" });
  walkKeys(list, ".said-assistant, .tool", signal, { next: "n", previous: "p", what: "answer or tool call" });
  useKeys(
    [
      { keys: "o", does: "Open or fold the entry", run: () => toggle(list.querySelector(".item:focus-within")) },
      { keys: "m", does: "Markdown or source of the messages", run: switchSource },
      { keys: "e", does: "To the end", run: () => end.scrollIntoView() },
    ],
    signal,
  );
  // The panel is put into the page after this function.
  setTimeout(showNamed);
  const tools = h("div", { class: "transcript-bar" }, rollout.live ? h("label", { class: "follow", for: "follow" }, following, " follow as it happens") : null, source);
  return h("div", { class: "transcript-layout" }, outline.element, h("div", { class: "stack" }, tools, list, ahead, end));
}

/** @param {Element} list */
function entries(list) {
  return /** @type {HTMLElement[]} */ ([...list.children]);
}

/** @param {any} item */
function stageText(item) {
  return String(item.text).replace(/^stage: /, "");
}

/** @param {Element | null} item */
function toggle(item) {
  const fold = item?.querySelector("details");
  if (fold) fold.open = !fold.open;
  else /** @type {HTMLElement | null | undefined} */ (item?.querySelector(".fold-button"))?.click();
}
