/** When what happened: the phases of a rollout, and its model calls below them. */

import { empty, fill, h } from "./dom.js";
import { count, duration } from "./format.js";
import { placeUrl } from "./router.js";

const WIDTH = 1000;
const LANE = 20;
const LABEL = 90;

/** @param {import("./rollout.js").Scene} scene */
export async function timelinePanel({ id, rollout, calls, onCalls }) {
  const panel = h("div", { class: "stack" });
  /** @param {any[]} list */
  const draw = (list) => fill(panel, timeline(id, rollout, list));
  draw(await calls());
  onCalls(async () => draw(await calls()));
  return panel;
}

/** @param {string} id @param {any} rollout @param {any[]} calls */
function timeline(id, rollout, calls) {
  const phases = (rollout.timeline ?? []).filter((/** @type {any} */ phase) => phase.start !== null && phase.start !== undefined);
  if (!phases.length && !calls.length) return empty("Nothing has begun yet");
  const now = Date.now() / 1000;
  const begins = [rollout.started_at, ...phases.map((/** @type {any} */ phase) => phase.start), ...calls.map((call) => call.started)].filter(Boolean);
  const ends = [rollout.finished_at ?? (rollout.live ? now : 0), ...phases.map((/** @type {any} */ phase) => phase.end ?? 0), ...calls.map((call) => call.ended ?? call.started)];
  const first = Math.min(...begins);
  const last = Math.max(...ends, first + 0.001);
  const at = (/** @type {number} */ time) => LABEL + ((time - first) / (last - first)) * (WIDTH - LABEL - 10);
  const lanes = lanesOf(calls);
  const tall = (phases.length + Math.max(1, ...lanes.map((lane) => lane + 1))) * LANE + 40;
  const parts = [];
  phases.forEach((/** @type {any} */ phase, /** @type {number} */ index) => {
    const end = phase.end ?? (rollout.live ? now : last);
    const y = 4 + index * LANE;
    parts.push(
      h("text", { x: LABEL - 8, y: y + 12, class: "tick end" }, phase.name),
      h("rect", { x: at(phase.start), y, width: Math.max(1.5, at(end) - at(phase.start)), height: LANE - 5, rx: 3, class: `phase phase-${phase.name}` }, h("title", null, `${phase.name}: ${duration(end - phase.start)}`)),
    );
  });
  const top = 12 + phases.length * LANE;
  if (calls.length) parts.push(h("text", { x: LABEL - 8, y: top + 12, class: "tick end" }, "model calls"));
  calls.forEach((call, index) => {
    const y = top + lanes[index] * LANE;
    const end = call.ended ?? now;
    const bar = h("rect", { x: at(call.started), y, width: Math.max(2, at(end) - at(call.started)), height: LANE - 6, rx: 2, class: `call call-${call.error || call.aborted ? "failed" : call.label ?? call.role}` });
    const thought = call.first_token ? h("rect", { x: at(call.started), y, width: Math.max(0, at(call.first_token) - at(call.started)), height: LANE - 6, rx: 2, class: "call-wait" }) : null;
    const description = `${call.id}, ${call.label ?? call.role}: ${count(call.prompt_tokens)} in, ${count(call.completion_tokens)} out, ${duration(end - call.started)}${call.error ? `, ${call.error}` : ""}`;
    parts.push(svgLink(placeUrl(["rollouts", id, "tokens", call.id]), description, [bar, thought]));
  });
  for (let share = 0; share <= 4; share++) {
    const time = first + ((last - first) * share) / 4;
    parts.push(h("text", { x: at(time), y: tall - 6, class: `tick ${share === 4 ? "end" : ""}` }, duration(time - first)));
  }
  const description = phases.map((/** @type {any} */ phase) => `${phase.name} ${duration((phase.end ?? last) - phase.start)}`).join(", ");
  return [
    h("div", { class: "panel scroll-x" }, h("svg", { class: "timeline", viewBox: `0 0 ${WIDTH} ${tall}`, role: "group", "aria-label": `Timeline: ${description}; ${calls.length} model calls` }, parts)),
    h("p", { class: "muted" }, "Light: waiting for the first token. Click a call to see its tokens."),
  ];
}

/** @param {string} href @param {string} label @param {any[]} children */
export function svgLink(href, label, children) {
  const link = document.createElementNS("http://www.w3.org/2000/svg", "a");
  link.setAttribute("href", href);
  link.setAttribute("aria-label", label);
  link.append(h("title", null, label), ...children.filter(Boolean));
  return link;
}

/** Calls that overlap get lanes of their own. @param {any[]} calls @returns {number[]} */
function lanesOf(calls) {
  /** @type {number[]} */
  const free = [];
  return calls.map((call) => {
    let lane = free.findIndex((until) => until <= call.started);
    if (lane < 0) lane = free.length;
    free[lane] = call.ended ?? Infinity;
    return lane;
  });
}
