/** The steps of a task: how each one ended, and what it scored. */

import { h } from "./dom.js";
import { count, duration, outcomeText, rewardClass, rewardText } from "./format.js";

const TITLES = ["Step", "Outcome", "Reward", "Took", "Calls", "Exit code", "Tests", "Reason"];
const NUMBERS = new Set(["Reward", "Took", "Calls", "Exit code"]);

/** @param {any[]} steps */
export function stepPanel(steps) {
  if (!steps.length) return null;
  return h(
    "section",
    { class: "panel" },
    h("h2", null, "Steps"),
    h(
      "div",
      { class: "scroll-x", tabindex: 0, role: "region", "aria-label": "Steps" },
      h(
        "table",
        { class: "plain" },
        h("thead", null, h("tr", null, TITLES.map((title) => h("th", { scope: "col", class: NUMBERS.has(title) ? "number" : null }, title)))),
        h("tbody", null, steps.map(stepRow)),
      ),
    ),
  );
}

/** @param {any} step */
function stepRow(step) {
  const reached = step.started_at !== null;
  return h(
    "tr",
    null,
    h("th", { scope: "row" }, step.name),
    h("td", null, step.outcome ? outcomeText(step.outcome) : (reached ? "not ended" : "not reached")),
    h("td", { class: `number ${rewardClass(step.reward)}` }, rewardText(step.reward)),
    h("td", { class: "number" }, step.seconds === null ? "–" : duration(step.seconds)),
    h("td", { class: "number" }, reached ? count(step.calls) : "–"),
    h("td", { class: "number" }, step.exit_code === null ? "–" : String(step.exit_code)),
    h("td", null, step.verifier?.mode ?? "–"),
    h("td", null, step.error ?? step.reward_reason ?? ""),
  );
}
