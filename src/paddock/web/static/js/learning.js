/** How rewards develop: over time, by batch or by weight version, with 95 % intervals, also for each task or model. */

import { get } from "./api.js";
import { broken, fill, h } from "./dom.js";
import { clockTime, count, dateTime, modelName, rewardText, shorten } from "./format.js";
import { seriesPlot } from "./plot.js";

const AXES = [["time", "time"], ["batch", "batch"], ["weights", "weight version"]];
const SPLITS = [["", "all rollouts"], ["task", "each task"], ["model", "each model"], ["agent", "each agent"]];
/** The filters that a point of an axis stands for. The chart is drawn without them, so that the other points stay. @type {Record<string, string[]>} */
const OWN_FILTERS = { time: ["since", "until"], batch: ["batch"], weights: ["weights"] };
const DAY = 86400;
const LABEL_CHARACTERS = 14;

/** @typedef {{by: string, split: string}} Chart the axis and the lines, empty for time and for one line */

/**
 * @param {Record<string, any>} filters of the view
 * @param {Chart} chart
 * @param {(changes: Record<string, any>) => void} choose shows the rollouts of a point
 * @param {() => void} onChange called when another axis or other lines were chosen
 * @param {AbortSignal} signal
 */
export function learningPanel(filters, chart, choose, onChange, signal) {
  const body = h("div", { class: "learning-body" });
  let drawn = "";

  async function draw() {
    const axis = chart.by || "time";
    const asked = Object.fromEntries(Object.entries(filters).filter(([name]) => !OWN_FILTERS[axis].includes(name)));
    try {
      const found = await get("learning", { ...asked, by: axis, split: chart.split }, signal);
      const text = JSON.stringify([found, OWN_FILTERS[axis].map((name) => filters[name])]);
      if (text !== drawn) fill(body, chartOf(found, filters, choose));
      drawn = text;
    } catch (error) {
      drawn = "";
      if (!signal.aborted) fill(body, broken(error, draw));
    }
  }

  /** @param {keyof Chart} name @param {string[][]} choices @param {string} label */
  const select = (name, choices, label) =>
    h(
      "select",
      { "aria-label": label, onchange: (/** @type {any} */ event) => changed(name, event.target.value) },
      choices.map(([value, title]) => h("option", { value, selected: value === chart[name] }, title)),
    );
  /** @param {keyof Chart} name @param {string} value */
  function changed(name, value) {
    chart[name] = value === "time" ? "" : value;
    onChange();
    draw();
  }
  const element = h(
    "section",
    { class: "panel learning", "aria-label": "Learning" },
    h("div", { class: "learning-head" }, h("h2", null, "Reward by "), select("by", AXES, "Reward by"), h("span", { class: "muted" }, "for"), select("split", SPLITS, "Lines")),
    body,
  );
  return { element, draw };
}

/** @param {any} found @param {Record<string, any>} filters @param {(changes: Record<string, any>) => void} choose */
function chartOf(found, filters, choose) {
  const lines = found.lines.filter((/** @type {any} */ line) => line.points.length);
  if (!lines.length) return h("p", { class: "muted" }, found.by === "weights" && !found.places.length ? "None of these rollouts has a weight version. A trainer sets one for each update." : found.by === "batch" && !found.places.length ? "None of these rollouts is in a batch." : "No reward yet.");
  const text = placeText(found);
  const chart = seriesPlot({
    label: `Mean reward by ${found.by === "weights" ? "weight version" : found.by}, with 95 % intervals`,
    places: found.places.map((/** @type {any} */ _, /** @type {number} */ index) => shorten(text(index), LABEL_CHARACTERS)),
    lines: lines.map((/** @type {any} */ line) => ({
      name: found.split === "model" ? modelName(line.name) : line.name,
      points: line.points.map((/** @type {any} */ point) => ({
        place: point.place,
        y: point.mean,
        low: point.ci?.[0],
        high: point.ci?.[1],
        isChosen: isChosen(found, point.place, filters),
        title: `${line.name ? `${line.name}, ` : ""}${text(point.place)}: ${rewardText(point.mean)}${point.ci ? ` (95 %: ${rewardText(point.ci[0])} to ${rewardText(point.ci[1])})` : ""}, ${count(point.scored)} of ${count(point.count)} scored`,
        pick: () => choose({ ...filtersOf(found, point.place), ...(found.split ? { [found.split]: line.name } : {}) }),
      })),
    })),
  });
  const left = found.line_count - found.lines.length;
  return [chart, left > 0 ? h("p", { class: "muted" }, `The ${found.lines.length} with the most rollouts; ${count(left)} more.`) : null];
}

/** @param {any} found @param {number} place @returns {Record<string, any>} */
function filtersOf(found, place) {
  if (found.by !== "time") return { [found.by]: found.places[place] };
  // Rounded outwards: the address shall be readable, and the first and the last rollout are inside.
  return { since: Math.floor(found.places[place]), until: Math.ceil(found.places[place] + found.width) };
}

/** @param {any} found @param {number} place @param {Record<string, any>} filters */
function isChosen(found, place, filters) {
  const own = filtersOf(found, place);
  return Object.entries(own).every(([name, value]) => String(filters[name]) === String(value));
}

/** @param {any} found @returns {(place: number) => string} */
function placeText(found) {
  if (found.by !== "time") return (place) => (found.by === "weights" ? `version ${found.places[place]}` : found.places[place]);
  const span = found.width * found.places.length;
  if (span < DAY) return (place) => clockTime(found.places[place]).slice(0, span < 600 ? 8 : 5);
  return (place) => (span < 30 * DAY ? dateTime(found.places[place]).slice(5) : dateTime(found.places[place]).slice(0, 10));
}
