/** The tokens of one call: what the model was given and what it sampled, piece by piece, with how sure it was. */

import { get } from "./api.js";
import { broken, empty, fill, h } from "./dom.js";
import { count, percent } from "./format.js";
import { useKeys } from "./keys.js";
import { linePlot } from "./plot.js";
import { placeUrl } from "./router.js";

const BLOCK = 1000;
const NEAR = "1200px";
/** A logprob of minus this, and everything below it, is as red as it gets. */
const REDDEST = 6;

/** @param {import("./rollout.js").Scene} scene */
export async function tokensPanel({ id, calls, place, signal, rollout }) {
  const list = await calls();
  if (!list.length) return empty("No tokens yet", h("p", null, rollout.live ? "The agent has not asked its model yet." : "The agent never asked its model."));
  const call = list.find((each) => each.id === place.parts[3]) ?? list.find((each) => each.completion_tokens) ?? list[0];
  const position = list.indexOf(call);
  const details = h("aside", { class: "panel token-details", "aria-live": "polite" }, h("p", { class: "muted" }, "Point at a token, or focus one and use the arrow keys."));
  const pieces = h("div", { class: "pieces heat-logprob" });
  const colour = h(
    "select",
    { "aria-label": "Colour tokens by", onchange: (/** @type {any} */ event) => (pieces.className = `pieces heat-${event.target.value}`) },
    [["logprob", "Colour by logprob"], ["entropy", "Colour by entropy"], ["mask", "Colour by loss mask"], ["none", "No colour"]].map(([value, title]) => h("option", { value }, title)),
  );
  /** @param {number} by */
  const go = (by) => {
    const next = list[position + by];
    if (next) location.hash = placeUrl(["rollouts", id, "tokens", next.id]);
  };
  useKeys(
    [
      { keys: "n", does: "Next call", run: () => go(1) },
      { keys: "p", does: "Previous call", run: () => go(-1) },
    ],
    signal,
  );
  const path = `rollouts/${id}/calls/${call.id}/tokens`;
  const completion = section(path, "completion", call.completion_tokens, details, signal);
  const prompt = section(path, "prompt", call.prompt_tokens, details, signal);
  const drift = driftText(call);
  pieces.append(
    h("section", { "aria-label": "Sampled tokens" }, h("h2", null, `Sampled: ${count(call.completion_tokens)} tokens`), call.completion_tokens ? completion : h("p", { class: "muted" }, "The endpoint returned no tokens of its answer.")),
    h("section", { "aria-label": "Prompt tokens" }, h("h2", null, `Prompt: ${count(call.prompt_tokens)} tokens`, call.shared_tokens ? h("span", { class: "muted" }, `, the first ${count(call.shared_tokens)} are those of ${call.parent}`) : ""), call.prompt_tokens ? prompt : h("p", { class: "muted" }, "The endpoint returned no tokens of the prompt.")),
  );
  return h(
    "div",
    { class: "stack" },
    h(
      "div",
      { class: "tokens-bar" },
      h("button", { type: "button", disabled: position === 0, onclick: () => go(-1), "aria-label": "Previous call" }, "←"),
      h("select", { "aria-label": "Call", onchange: (/** @type {any} */ event) => (location.hash = placeUrl(["rollouts", id, "tokens", event.target.value])) }, list.map((each) => h("option", { value: each.id, selected: each === call }, `${each.id} · ${each.label ?? each.role} · ${count(each.completion_tokens)} sampled`))),
      h("button", { type: "button", disabled: position === list.length - 1, onclick: () => go(1), "aria-label": "Next call" }, "→"),
      colour,
      h("span", { class: call.trainable ? "muted" : "error-text" }, call.trainable ? `trained on: ${count(call.completion_tokens)} tokens` : `not trained on: ${call.untrainable_because}`),
      h("span", { class: "muted" }, [call.engine, call.model, call.weight_version && `weights ${call.weight_version}`, call.level, call.temperature !== null && call.temperature !== undefined && `temperature ${call.temperature}`, call.logprobs_kind && `${call.logprobs_kind} logprobs`, call.caller && `caller ${call.caller}`].filter(Boolean).join(" · ")),
    ),
    drift ? h("p", { class: "panel drift" }, drift) : null,
    entropyPanel(id, call, signal),
    h("div", { class: "tokens-layout" }, pieces, details),
    requestPanel(id, call.id, signal),
  );
}

/** @param {any} call */
function driftText(call) {
  const drift = call.drift;
  if (!drift || drift.first_difference === null || drift.first_difference === undefined) return null;
  return `What came back in the next prompt is not what was sampled here: ${count(drift.returned)} of ${count(drift.sampled)} sampled tokens are the same, and they part at token ${drift.first_difference}. The next call is a sample of its own.`;
}

/** @param {string} id @param {any} call @param {AbortSignal} signal */
function entropyPanel(id, call, signal) {
  const panel = h("section", { class: "panel", "aria-label": "Surprise and entropy" }, h("p", { class: "muted" }, "Loading…"));
  if (!call.completion_tokens) return null;
  get(`rollouts/${id}/calls/${call.id}/tokens`, { part: "completion", offset: 0, limit: 4000 }, signal)
    .then((columns) => fill(panel, entropyPlots(columns, call)))
    .catch((error) => signal.aborted || fill(panel, broken(error)));
  return panel;
}

/** @param {any} columns @param {any} call */
function entropyPlots(columns, call) {
  const some = columns.ids.length < columns.total ? ` (the first ${count(columns.ids.length)})` : "";
  const plots = [];
  if (columns.entropy?.some((/** @type {any} */ value) => value !== null)) {
    plots.push(h("h2", null, `Entropy over the answer${some}, in nats, from the reported alternatives`), linePlot(columns.entropy.map((/** @type {any} */ y, /** @type {number} */ x) => ({ x, y })), { label: `Entropy of each sampled token of ${call.id}`, height: 110, yLow: 0, yText: (y) => y.toFixed(2) }));
  }
  if (columns.logprobs) {
    plots.push(h("h2", null, `Logprob of each sampled token${some}`), linePlot(columns.logprobs.map((/** @type {any} */ y, /** @type {number} */ x) => ({ x, y })), { label: `Logprob of each sampled token of ${call.id}`, height: 110, yHigh: 0, yText: (y) => y.toFixed(2) }));
  }
  return plots.length ? plots : h("p", { class: "muted" }, "The endpoint returned no logprobs.");
}

/**
 * Blocks of tokens that are fetched when they come near, and emptied when they are far.
 * @param {string} path @param {string} part @param {number} total @param {HTMLElement} details @param {AbortSignal} signal
 */
function section(path, part, total, details, signal) {
  const root = h("div", { class: "token-blocks", role: "group" });
  /** @type {Map<Element, number>} */
  const offsets = new Map();
  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        const block = /** @type {HTMLElement} */ (entry.target);
        if (entry.isIntersecting) load(block);
        else if (block.dataset.state === "shown") {
          block.style.minHeight = `${block.offsetHeight}px`;
          block.replaceChildren();
          block.dataset.state = "";
        }
      }
    },
    { rootMargin: NEAR },
  );
  /** @param {HTMLElement} block */
  async function load(block) {
    if (block.dataset.state) return;
    block.dataset.state = "loading";
    const offset = Number(offsets.get(block));
    try {
      const columns = await get(path, { part, offset, limit: BLOCK }, signal);
      block.replaceChildren(...tokenElements(columns, part));
      block.dataset.state = "shown";
      block.style.minHeight = "";
    } catch (error) {
      block.dataset.state = "";
      if (!signal.aborted) fill(block, broken(error, () => load(block)));
    }
  }
  for (let offset = 0; offset < total; offset += BLOCK) {
    const block = h("div", { class: "token-block" });
    block.style.minHeight = `${Math.ceil(Math.min(BLOCK, total - offset) / 22) * 22}px`;
    offsets.set(block, offset);
    root.appendChild(block);
    observer.observe(block);
  }
  signal.addEventListener("abort", () => observer.disconnect());
  /** @param {Event} event */
  const point = (event) => {
    const token = /** @type {HTMLElement} */ (event.target).closest?.(".token");
    if (token) fill(details, tokenDetails(/** @type {any} */ (token).details));
  };
  root.addEventListener("pointerover", point);
  root.addEventListener("focusin", point);
  root.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => walk(event));
  return root;
}

/** @param {KeyboardEvent} event */
function walk(event) {
  const token = /** @type {HTMLElement} */ (event.target).closest(".token");
  if (!token || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
  const next = event.key === "ArrowRight" ? token.nextElementSibling ?? token.parentElement?.nextElementSibling?.firstElementChild : token.previousElementSibling ?? token.parentElement?.previousElementSibling?.lastElementChild;
  if (next instanceof HTMLElement) {
    event.preventDefault();
    next.tabIndex = 0;
    next.focus();
    if (token instanceof HTMLElement) token.tabIndex = -1;
  }
}

/** @param {any} columns @param {string} part */
function tokenElements(columns, part) {
  return columns.ids.map((/** @type {number} */ id, /** @type {number} */ index) => {
    const text = columns.texts?.[index] ?? null;
    const logprob = columns.logprobs?.[index] ?? null;
    const entropy = columns.entropy?.[index] ?? null;
    const mask = columns.mask?.[index] ?? 0;
    const position = columns.offset + index;
    const isShared = part === "prompt" && position < (columns.shared ?? 0);
    const classes = ["token", mask ? "trained" : "given", text === null ? "unknown" : "", isShared ? "shared" : "", text?.includes("\n") ? "breaks" : ""];
    const element = h("span", { class: classes.filter(Boolean).join(" "), tabindex: index === 0 ? 0 : -1 }, text === null ? `⟨${id}⟩` : shownText(text));
    if (logprob !== null) element.style.setProperty("--unsure", String(Math.min(1, -logprob / REDDEST)));
    if (entropy !== null) element.style.setProperty("--entropy", String(Math.min(1, entropy / 2)));
    element.details = { id, text, logprob, entropy, mask, position, part, top: columns.top?.[index] ?? null, isShared };
    return element;
  });
}

/** @param {string} text */
function shownText(text) {
  return text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥");
}

/** @param {any} token */
function tokenDetails(token) {
  const facts = [
    ["Token", token.text === null ? "no text" : JSON.stringify(token.text)],
    ["Id", token.id],
    ["Place", `${token.part} ${token.position}`],
    ["Logprob", token.logprob === null ? "–" : `${token.logprob.toFixed(4)} (${percent(Math.exp(token.logprob))})`],
    ["Entropy", token.entropy === null ? "–" : `${token.entropy.toFixed(3)} nats`],
    ["Loss mask", token.mask ? "1: sampled by the model" : "0: given to the model"],
  ];
  const top = token.top ?? [];
  return [
    h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", null, name), h("dd", null, value)])),
    top.length ? h("h3", null, "Alternatives") : null,
    top.length ? h("ul", { class: "alternatives" }, top.map((/** @type {[string, number]} */ [text, logprob]) => alternative(text, logprob, text === token.text))) : token.part === "completion" ? h("p", { class: "muted" }, "No alternatives were told: run with --top-logprobs 5 to keep them.") : null,
  ];
}

/** @param {string} text @param {number} logprob @param {boolean} chosen */
function alternative(text, logprob, chosen) {
  const bar = h("span", { class: "alternative-bar" });
  bar.style.width = `${Math.max(1, Math.exp(logprob) * 100)}%`;
  return h("li", { class: chosen ? "chosen" : "" }, bar, h("code", null, JSON.stringify(text)), h("span", { class: "number" }, percent(Math.exp(logprob))));
}

/** @param {string} id @param {string} call @param {AbortSignal} signal */
function requestPanel(id, call, signal) {
  const body = h("div");
  const fold = h(
    "details",
    {
      class: "panel",
      ontoggle: async () => {
        if (!fold.open || body.firstChild) return;
        try {
          const full = await get(`rollouts/${id}/calls/${call}`, {}, signal);
          fill(body, [["The answer", full.message], ["What the agent asked", full.raw_request ?? full.request], ["What was sent to the engine", full.forwarded], ["Attempts before", full.attempts], ["Usage", full.usage]].filter(([, value]) => value && (!Array.isArray(value) || value.length)).map(([title, value]) => [h("h3", null, title), h("pre", { tabindex: 0 }, JSON.stringify(value, null, 2))]));
        } catch (error) {
          if (!signal.aborted) fill(body, broken(error));
        }
      },
    },
    h("summary", null, "Request and answer as JSON"),
    body,
  );
  return fold;
}
