/** Which rollouts are shown: a form for the usual filters, and a chip for each other one. */

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { count, dateTime, modelName, outcomeText, shorten } from "./format.js";

const NAMES = ["q", "task", "agent", "model", "outcome", "batch", "tag", "min_reward", "max_reward", "since", "until", "weights", "cause", "running"];
const TYPING_MS = 250;
const DAY = 86400;
const TIMES = [["3600", "Last hour"], [String(DAY), "Last day"], [String(7 * DAY), "Last week"]];
const CHIP_CHARACTERS = 60;

/** @param {URLSearchParams} query @returns {Record<string, any>} */
export function readFilters(query) {
  const filters = Object.fromEntries(NAMES.map((name) => [name, query.get(name) ?? ""]));
  const outcomes = query.getAll("outcome").filter(Boolean);
  return outcomes.length > 1 ? { ...filters, outcome: outcomes } : filters;
}

export function clearedFilters() {
  return Object.fromEntries(NAMES.map((name) => [name, ""]));
}

/**
 * @param {Record<string, any>} filters
 * @param {(name: string, value: string) => void} choose
 * @param {() => void} clear
 * @param {AbortSignal} signal
 */
export function filterForm(filters, choose, clear, signal) {
  /** @type {Record<string, {title: string, facet: string, text: (name: string) => string, element: HTMLSelectElement}>} */
  const selects = {};
  /** @param {string} name @param {string} facet @param {string} title @param {(name: string) => string} [text] */
  function addSelect(name, facet, title, text = String) {
    const element = h("select", { name, "aria-label": title, onchange: () => choose(name, element.value) });
    selects[name] = { title, facet, text, element };
  }
  addSelect("task", "tasks", "Any task");
  addSelect("agent", "agents", "Any agent");
  addSelect("model", "models", "Any model", modelName);
  addSelect("outcome", "outcomes", "Any outcome", outcomeText);
  addSelect("batch", "batches", "Any batch");
  addSelect("tag", "tags", "Any tag");

  /** @param {string} name @param {string} title @param {string} sign */
  const number = (name, title, sign) => h("input", { name, type: "number", step: "any", placeholder: sign, title, "aria-label": title, onchange: (/** @type {any} */ event) => choose(name, event.target.value) });
  const numbers = [number("min_reward", "Reward from", "reward ≥"), number("max_reward", "Reward to", "reward ≤")];
  const times = h("select", { name: "since", "aria-label": "Time", onchange: () => choose("since", times.value && (Number(times.value) <= 7 * DAY ? String(Math.floor(Date.now() / 1000 - Number(times.value))) : times.value)) });
  let typing = 0;
  const search = h("input", {
    name: "q",
    type: "search",
    placeholder: "Search transcripts and names…",
    title: "All words have to occur. \"Words in quotes\" have to stand next to each other.",
    "aria-label": "Search",
    "aria-keyshortcuts": "/",
    oninput: () => {
      clearTimeout(typing);
      typing = setTimeout(() => choose("q", search.value), TYPING_MS);
    },
  });
  const chips = h("div", { class: "chips" });
  const element = h(
    "form",
    { class: "filters", role: "search", "aria-label": "Filters", onsubmit: (/** @type {Event} */ event) => event.preventDefault() },
    search,
    h("button", { type: "button", class: "more-filters", onclick: () => element.classList.toggle("open") }, "Filters"),
    Object.values(selects).map((each) => each.element),
    numbers,
    times,
    h("button", { type: "button", class: "quiet clear", onclick: clear }, "Clear"),
    chips,
  );
  /** @type {Record<string, any[]>} */
  let facets = {};

  /** Make the form show the filters. Values are counted anew, as a tag or a batch may be new. */
  function draw() {
    drawChoices();
    if (document.activeElement !== search) search.value = filters.q;
    for (const input of numbers) input.value = filters[input.name];
    const since = filters.since && !filters.until;
    fill(times, h("option", { value: "" }, "Any time"), since ? h("option", { value: filters.since, selected: true }, `Since ${dateTime(Number(filters.since))}`) : null, TIMES.map(([value, title]) => h("option", { value }, title)));
    fill(chips, chipList(filters, choose));
    element.classList.toggle("open", element.classList.contains("open") || NAMES.some((name) => name !== "q" && filters[name].length > 0));
    get("facets", {}, signal)
      .then((found) => {
        facets = found;
        drawChoices();
      })
      .catch(() => {
        // Without choices the search still finds everything; the table tells what is wrong with the server.
      });
  }

  function drawChoices() {
    for (const [name, { title, facet, text, element: select }] of Object.entries(selects)) {
      const choices = facets[facet] ?? [];
      const chosen = Array.isArray(filters[name]) ? "" : filters[name];
      const isListed = !chosen || choices.some((choice) => choice.name === chosen);
      fill(
        select,
        h("option", { value: "" }, title),
        isListed ? null : h("option", { value: chosen, selected: true }, text(chosen)),
        choices.map((choice) => h("option", { value: choice.name, selected: choice.name === chosen }, `${text(choice.name)} (${count(choice.count)})`)),
      );
      select.hidden = !choices.length && !chosen;
    }
  }

  return {
    element,
    draw,
    focus: () => search.focus(),
    isFiltered: () => NAMES.some((name) => filters[name].length > 0),
  };
}

/** A chip for each filter that has no field in the form. @param {Record<string, any>} filters @param {(name: string, value: any) => void} choose */
function chipList(filters, choose) {
  /** @type {[string, string][]} */
  const shown = [];
  if (filters.weights) shown.push(["weights", `weight version ${filters.weights}`]);
  if (filters.cause) shown.push(["cause", `cause: ${shorten(filters.cause, CHIP_CHARACTERS)}`]);
  if (filters.until) shown.push(["until", `${filters.since ? `from ${dateTime(Number(filters.since))} ` : ""}until ${dateTime(Number(filters.until))}`]);
  if (filters.running) shown.push(["running", filters.running === "0" ? "ended" : "running"]);
  if (Array.isArray(filters.outcome)) shown.push(["outcome", filters.outcome.map(outcomeText).join(" or ")]);
  return shown.map(([name, text]) => {
    function remove() {
      if (name === "until") filters.since = "";
      choose(name, "");
    }
    return h("button", { type: "button", class: "chip", title: "Remove this filter", onclick: remove }, text, " ×");
  });
}
