/** Rollouts that broke, grouped by cause: an error that many have is there once. */

import { h } from "./dom.js";
import { count } from "./format.js";
import { placeUrl } from "./router.js";
import { outcomeTag } from "./table.js";

const SUMMARY_CHARACTERS = 160;

/** @param {{total: number, causes: any[]}} found @param {Record<string, any>} filters that all of them fit */
export function causeList(found, filters) {
  if (!found.causes.length) return h("p", { class: "muted" }, "No rollout broke.");
  return h("ul", { class: "causes" }, found.causes.map((cause) => causeElement(cause, filters)));
}

/** @param {any} cause @param {Record<string, any>} filters */
function causeElement(cause, filters) {
  const error = cause.error ?? "no error was recorded";
  const place = placeUrl(["rollouts"], { ...filters, outcome: cause.outcome, cause: cause.cause });
  const tasks = cause.tasks === 1 ? "1 task" : `${count(cause.tasks)} tasks`;
  const [line] = error.split("\n");
  const isLong = error.length > SUMMARY_CHARACTERS || error !== line;
  const text = isLong
    ? h("details", null, h("summary", { class: "error-text" }, line.length > SUMMARY_CHARACTERS ? `${line.slice(0, SUMMARY_CHARACTERS)}…` : line), h("pre", null, error))
    : h("span", { class: "error-text" }, error);
  return h(
    "li",
    null,
    h("div", { class: "cause-head" }, h("a", { class: "figure", href: place, title: "Show all of them" }, `${count(cause.count)} ×`), outcomeTag(cause), h("span", { class: "muted" }, tasks)),
    h("div", { class: "cause-text" }, text, h("p", { class: "muted" }, "Latest: ", cause.rollouts.map((/** @type {string} */ id, /** @type {number} */ index) => [index ? ", " : "", h("a", { class: "mono", href: placeUrl(["rollouts", id]) }, id)]))),
  );
}
