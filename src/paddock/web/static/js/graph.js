/** The calls of a rollout as a graph: which continued which, by exact tokens, and where history was changed. */

import { empty, fill, h } from "./dom.js";
import { count, duration, shorten } from "./format.js";
import { useKeys } from "./keys.js";
import { placeUrl } from "./router.js";
import { svgLink } from "./timeline.js";
import { VirtualList } from "./virtual.js";

const STEP = 34;
const LANE_HEIGHT = 34;
const NODE = 8;
const CALL_ROW = 32;

/** @type {Record<string, string>} */
const LABELS = {
  main: "continues the conversation",
  branch: "another way on from the same history",
  subagent: "a sub-agent",
  compaction: "the history was summarised",
  title: "a side call",
  retried: "the answer did not arrive whole, and was asked again",
  edited: "the history before it was changed",
};

/** @param {import("./rollout.js").Scene} scene */
export async function graphPanel({ id, calls, onCalls, signal, rollout }) {
  const picture = h("div", { class: "panel scroll-x graph-box", tabindex: 0, "aria-label": "Call graph, scrolls sideways" });
  const legend = h("p", { class: "muted legend" });
  const problems = h("div");
  let list = await calls();
  const table = new VirtualList({
    rowHeight: CALL_ROW,
    label: "Calls",
    fetch: async (offset, limit) => ({ total: list.length, rows: list.slice(offset, offset + limit) }),
    render: (call) => callRow(id, call),
  });
  function draw() {
    fill(picture, graph(id, list));
    fill(legend, [...new Set(list.map((call) => call.label))].map((label) => h("span", null, h("span", { class: `swatch call-${label}` }), ` ${label}: ${LABELS[label] ?? ""} `)));
    fill(problems, driftNotes(id, list));
    table.reset();
  }
  onCalls(async () => {
    list = await calls();
    draw();
  });
  useKeys(
    [
      { keys: "j", does: "Next call", run: () => table.move(1) },
      { keys: "k", does: "Previous call", run: () => table.move(-1) },
      { keys: "Enter", does: "Show the tokens of the call", run: () => table.current() && (location.hash = placeUrl(["rollouts", id, "tokens", table.current().id])) },
    ],
    signal,
  );
  if (!list.length) return empty("No model calls", h("p", null, rollout.live ? "The agent has not asked its model yet." : "The agent never asked its model."));
  requestAnimationFrame(draw);
  const titles = ["Call", "What", "Prompt", "Sampled", "Mean logprob", "Time", "Weights", "Ends", "Says"];
  const classes = ["id", "what", "number prompt", "number sampled", "number logprob", "number wall", "weights", "ends", "says"];
  return h(
    "div",
    { class: "stack" },
    picture,
    legend,
    problems,
    h("div", { class: "grid call-table", role: "table", "aria-label": "Calls" }, h("div", { class: "row head", role: "row" }, titles.map((title, index) => h("div", { class: `cell ${classes[index]}`, role: "columnheader" }, title))), table.element),
  );
}

/** @param {string} id @param {any} call */
function callRow(id, call) {
  const cells = [
    ["id", h("a", { href: placeUrl(["rollouts", id, "tokens", call.id]) }, call.id)],
    ["what", h("span", { class: "tag side" }, call.caller === "foreign" ? "foreign" : call.label ?? call.role)],
    ["number prompt", count(call.prompt_tokens)],
    ["number sampled", count(call.completion_tokens)],
    ["number logprob", call.mean_logprob === null || call.mean_logprob === undefined ? "–" : call.mean_logprob.toFixed(3)],
    ["number wall", duration(call.ended === null || call.ended === undefined ? null : call.ended - call.started)],
    ["weights", call.weight_version ?? "–"],
    ["ends", call.error ? shorten(call.error, 40) : call.aborted ? "aborted" : call.finish_reason ?? "…"],
    ["says", call.gist ?? ""],
  ];
  const why = call.trainable ? "can be trained on" : call.untrainable_because;
  return h("div", { class: `row ${call.trainable ? "" : "dim"}`, role: "row", title: why, onclick: () => (location.hash = placeUrl(["rollouts", id, "tokens", call.id])) }, cells.map(([name, inside]) => h("div", { class: `cell ${name}`, role: "cell" }, inside)));
}

/** Where what came back is not what was sampled. @param {string} id @param {any[]} calls */
function driftNotes(id, calls) {
  const drifted = calls.filter((call) => call.drift && call.drift.first_difference !== null && call.drift.first_difference !== undefined);
  if (!drifted.length) return null;
  return h(
    "details",
    { class: "panel drift" },
    h("summary", null, `${drifted.length} of ${calls.length} calls came back changed: their sampled tokens are not the ones in the next prompt`),
    h("ul", null, drifted.slice(0, 50).map((call) => h("li", null, h("a", { href: placeUrl(["rollouts", id, "tokens", call.id]) }, call.id), `: ${count(call.drift.sampled)} sampled, ${count(call.drift.returned)} returned as they were, first difference at token ${call.drift.first_difference}`))),
  );
}

/** A lane for each branch: a call stays in its parent's lane if it is the first to continue it. @param {any[]} calls */
function graphLanes(calls) {
  /** @type {Map<string, number>} */
  const lanes = new Map();
  const continued = new Set();
  let used = 0;
  for (const call of calls) {
    const parent = call.parent;
    if (parent !== null && lanes.has(parent) && !continued.has(parent) && !["subagent", "title", "retried"].includes(call.label)) {
      continued.add(parent);
      lanes.set(call.id, /** @type {number} */ (lanes.get(parent)));
    } else lanes.set(call.id, used++);
  }
  return compactLanes(calls, lanes);
}

/** Lanes whose calls do not overlap share a row. @param {any[]} calls @param {Map<string, number>} lanes */
function compactLanes(calls, lanes) {
  /** @type {Map<number, [number, number]>} */
  const spans = new Map();
  calls.forEach((call, index) => {
    const lane = Number(lanes.get(call.id));
    const span = spans.get(lane) ?? [index, index];
    spans.set(lane, [Math.min(span[0], index), Math.max(span[1], index)]);
  });
  /** @type {number[]} */
  const rows = [];
  /** @type {Map<number, number>} */
  const rowOf = new Map();
  for (const [lane, [from, to]] of [...spans].sort((a, b) => a[1][0] - b[1][0])) {
    let row = rows.findIndex((until, index) => until < from - 1 && (index > 0 || lane === 0));
    if (row < 0) row = rows.length;
    rows[row] = to;
    rowOf.set(lane, row);
  }
  return new Map(calls.map((call) => [call.id, rowOf.get(Number(lanes.get(call.id))) ?? 0]));
}

/** @param {string} id @param {any[]} calls */
function graph(id, calls) {
  const lanes = graphLanes(calls);
  const place = new Map(calls.map((call, index) => [call.id, { x: 24 + index * STEP, y: 22 + Number(lanes.get(call.id)) * LANE_HEIGHT }]));
  const width = 48 + calls.length * STEP;
  const height = 30 + (Math.max(0, ...lanes.values()) + 1) * LANE_HEIGHT;
  const edges = [];
  const nodes = [];
  for (const call of calls) {
    const to = /** @type {{x: number, y: number}} */ (place.get(call.id));
    const from = call.parent === null ? undefined : place.get(call.parent);
    if (from) {
      const middle = (from.x + to.x) / 2;
      edges.push(h("path", { d: `M${from.x} ${from.y} C${middle} ${from.y} ${middle} ${to.y} ${to.x} ${to.y}`, class: `edge ${call.label === "edited" || call.label === "branch" ? "broken-edge" : ""}` }));
    }
    const drifted = call.drift && call.drift.first_difference !== null && call.drift.first_difference !== undefined;
    const description = `${call.id}, ${call.label ?? call.role}${drifted ? ", came back changed" : ""}: ${count(call.prompt_tokens)} in, ${count(call.completion_tokens)} out. ${call.gist ?? ""}`;
    nodes.push(
      svgLink(placeUrl(["rollouts", id, "tokens", call.id]), description, [
        drifted ? h("circle", { cx: to.x, cy: to.y, r: NODE + 4, class: "drift-ring" }) : null,
        h("circle", { cx: to.x, cy: to.y, r: NODE, class: `node call-${call.error || call.aborted ? "failed" : call.label ?? call.role}` }),
        h("text", { x: to.x, y: to.y + NODE + 12, class: "tick middle" }, call.id),
      ]),
    );
  }
  return h("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Graph of ${calls.length} calls` }, edges, nodes);
}
