/** When what happened: the phases of a rollout, its model calls, and the tools that ran between them. */

import { get } from "./api.js";
import { empty, fill, h } from "./dom.js";
import { clockTime, count, duration, percent, shorten } from "./format.js";
import { walkKeys } from "./keys.js";
import { placeUrl } from "./router.js";

const NARROWEST = 560;
const LANE = 22;
const BAR = 17;
const LABEL = 92;
const MOST_ROWS = 100;
/** A bar is named inside if it has room for some letters. */
const LETTER = 6.6;

/** @typedef {{id: string, name: string, call: string, gist: string, started: number | null, ended: number | null, ended_by: string | null, error: boolean}} Tool */
/** @typedef {[number, number]} Span */

/** @param {import("./rollout.js").Scene} scene */
export async function timelinePanel({ id, rollout, calls, onCalls, signal }) {
  const panel = h("div", { class: "stack" });
  let width = 0;
  /** @type {[any[], Tool[]]} */
  let known = [[], []];
  const draw = () => width && fill(panel, timeline(id, rollout, ...known, Math.max(NARROWEST, width - 30)));
  async function load() {
    const [list, { tools }] = await Promise.all([calls(), get(`rollouts/${id}/tools`, {}, signal)]);
    known = [list, tools];
    draw();
  }
  const observer = new ResizeObserver(() => {
    if (Math.abs(panel.clientWidth - width) < 8) return;
    width = panel.clientWidth;
    draw();
  });
  observer.observe(panel);
  signal.addEventListener("abort", () => observer.disconnect());
  await load();
  onCalls(() => load().catch(() => {}));
  walkKeys(panel, "svg a", signal, { next: "j", previous: "k", what: "call or tool" });
  return panel;
}

/** @param {string} id @param {any} rollout @param {any[]} calls @param {Tool[]} tools @param {number} width */
function timeline(id, rollout, calls, tools, width) {
  const phases = (rollout.timeline ?? []).filter((/** @type {any} */ phase) => phase.start !== null && phase.start !== undefined);
  if (!phases.length && !calls.length) return empty("Nothing has begun yet");
  const now = Date.now() / 1000;
  const ended = rollout.live ? now : null;
  const begins = [rollout.started_at, ...phases.map((/** @type {any} */ phase) => phase.start), ...calls.map((call) => call.started)].filter(Boolean);
  const ends = [rollout.finished_at ?? ended ?? 0, ...phases.map((/** @type {any} */ phase) => phase.end ?? 0), ...calls.map((call) => call.ended ?? call.started)];
  const first = Math.min(...begins);
  const last = Math.max(...ends, first + 0.001);
  const at = (/** @type {number} */ time) => LABEL + ((Math.min(time, last) - first) / (last - first)) * (width - LABEL - 10);
  const parts = [];
  let top = 4;
  for (const phase of phases) {
    const end = phase.end ?? ended ?? last;
    parts.push(label(phase.name, top), bar(at(phase.start), at(end), top, `phase phase-${phase.name}`, `${phase.name}: ${duration(end - phase.start)}`, [duration(end - phase.start)]));
    top += LANE;
  }
  top += 8;
  /** @param {string} title @param {any[]} list @param {(each: any) => Node} element */
  const lanes = (title, list, element) => {
    if (!list.length) return;
    parts.push(label(title, top));
    const lane = lanesOf(list, last);
    list.forEach((each, index) => {
      const group = element(each);
      /** @type {Element} */ (group).setAttribute("transform", `translate(0 ${top + lane[index] * LANE})`);
      parts.push(group);
    });
    top += (Math.max(...lane) + 1) * LANE + 8;
  };
  lanes("model calls", calls, (call) => callBar(id, call, at, call.ended ?? ended ?? last));
  const ran = tools.filter((tool) => tool.started !== null && (tool.ended !== null || rollout.live));
  lanes("tools", ran, (tool) => toolBar(id, tool, at, tool.ended ?? now));
  const ticks = Math.max(2, Math.floor((width - LABEL) / 150));
  for (let tick = 0; tick <= ticks; tick++) {
    const time = first + ((last - first) * tick) / ticks;
    parts.unshift(h("line", { x1: at(time), x2: at(time), y1: 0, y2: top, class: "grid-line" }));
    parts.push(h("text", { x: at(time), y: top + 14, class: `tick ${tick === ticks ? "end" : tick ? "middle" : ""}` }, tick ? duration(time - first) : "0 s"));
  }
  const words = phases.map((/** @type {any} */ phase) => `${phase.name} ${duration((phase.end ?? last) - phase.start)}`).join(", ");
  return [
    whereTimeWent(phases, calls, ran, last),
    h("div", { class: "panel scroll-x" }, h("svg", { class: "timeline", width, height: top + 20, viewBox: `0 0 ${width} ${top + 20}`, role: "group", "aria-label": `Timeline: ${words}; ${calls.length} model calls, ${ran.length} tools` }, parts)),
    h("p", { class: "muted" }, "Light: waiting for the first token. Click a call or a tool to see it."),
    toolTable(id, ran, first),
  ];
}

/** @param {string} text @param {number} y */
function label(text, y) {
  return h("text", { x: LABEL - 8, y: y + 13, class: "tick end" }, text);
}

/** A bar with its name inside, where it fits. @param {number} from @param {number} to @param {number} y @param {string} kind @param {string} title @param {string[]} names the longest first */
function bar(from, to, y, kind, title, names) {
  const width = Math.max(2, to - from);
  const name = names.find((each) => each.length * LETTER + 8 <= width);
  return h("g", null, h("rect", { x: from, y, width, height: BAR, rx: 3, class: kind }, h("title", null, title)), name ? h("text", { x: from + 5, y: y + 12.5, class: "bar-name" }, name) : null);
}

/** @param {string} id @param {any} call @param {(time: number) => number} at @param {number} end */
function callBar(id, call, at, end) {
  const name = call.label ?? call.role;
  const description = `${call.id}, ${name}: ${count(call.prompt_tokens)} in, ${count(call.completion_tokens)} out, ${duration(end - call.started)}${call.error ? `, ${call.error}` : ""}`;
  const waited = call.first_token ? h("rect", { x: at(call.started), y: 0, width: Math.max(0, at(call.first_token) - at(call.started)), height: BAR, rx: 3, class: "call-wait" }) : null;
  return svgLink(placeUrl(["rollouts", id, "tokens", call.id]), description, [bar(at(call.started), at(end), 0, `call call-${call.error || call.aborted ? "failed" : name}`, description, [call.id]), waited]);
}

/** @param {string} id @param {Tool} tool @param {(time: number) => number} at @param {number} end */
function toolBar(id, tool, at, end) {
  const seconds = duration(end - Number(tool.started));
  const description = `${tool.name} of ${tool.call}: ${seconds}${tool.error ? ", failed" : ""}. ${tool.gist}`;
  return svgLink(placeUrl(["rollouts", id, "transcript"], { call: tool.call, tool: tool.id }), description, [bar(at(Number(tool.started)), at(end), 0, `tool-span${tool.error ? " failed" : ""}`, description, [`${tool.name} ${seconds}`, tool.name])]);
}

/** The share of model, tools and the agent's own program in the time of the agent. @param {any[]} phases @param {any[]} calls @param {Tool[]} tools @param {number} last */
function whereTimeWent(phases, calls, tools, last) {
  const agent = phases.filter((phase) => phase.name === "agent").map((phase) => /** @type {Span} */ ([phase.start, phase.end ?? last]));
  const whole = covered(agent);
  if (!whole || !calls.length) return null;
  const asked = calls.map((call) => /** @type {Span} */ ([call.started, call.ended ?? last]));
  const ran = tools.map((tool) => /** @type {Span} */ ([tool.started, tool.ended ?? last]));
  const model = Math.min(whole, covered(asked));
  const both = Math.min(whole, covered([...asked, ...ran]));
  const shares = [["model", "Model", model], ["tools", "Tools", both - model], ["rest", "Agent's own program", whole - both]];
  return h(
    "section",
    { class: "panel time-shares", "aria-label": "Where the time went" },
    h("h2", null, `The agent ran for ${duration(whole)}`),
    h("div", { class: "share-bar", "aria-hidden": "true" }, shares.map(([name, , seconds]) => sharePiece(String(name), Number(seconds) / whole))),
    h("p", null, shares.map(([name, title, seconds]) => h("span", { class: "share" }, h("span", { class: `swatch share-${name}` }), ` ${title} `, h("strong", null, duration(Number(seconds))), h("span", { class: "muted" }, ` ${percent(Number(seconds) / whole)}`)))),
  );
}

/** @param {string} name @param {number} share */
function sharePiece(name, share) {
  const piece = h("span", { class: `share-${name}` });
  piece.style.width = `${share * 100}%`;
  return piece;
}

/** The time in which at least one of the spans runs. @param {Span[]} spans */
function covered(spans) {
  let total = 0;
  let until = -Infinity;
  for (const [start, end] of [...spans].sort((a, b) => a[0] - b[0])) {
    total += Math.max(0, end - Math.max(start, until));
    until = Math.max(until, end);
  }
  return total;
}

/** The tools that took longest. @param {string} id @param {Tool[]} tools @param {number} first */
function toolTable(id, tools, first) {
  const took = (/** @type {Tool} */ tool) => Number(tool.ended) - Number(tool.started);
  const rows = tools.filter((tool) => tool.ended !== null).sort((a, b) => took(b) - took(a)).slice(0, MOST_ROWS);
  if (!rows.length) return null;
  return h(
    "section",
    { class: "panel" },
    h("h2", null, `Tools by duration`, tools.length > rows.length ? h("span", { class: "muted" }, `  the longest ${rows.length} of ${count(tools.length)}`) : null),
    h(
      "div",
      { class: "scroll-x", tabindex: 0, role: "region", "aria-label": "Tools" },
      h(
        "table",
        { class: "plain tool-table" },
        h("thead", null, h("tr", null, h("th", { scope: "col", class: "number" }, "Took"), h("th", { scope: "col" }, "Tool"), h("th", { scope: "col" }, "Call"), h("th", { scope: "col", class: "number" }, "Began after"), h("th", { scope: "col" }, "End known from"))),
        h("tbody", null, rows.map((tool) =>
          h("tr", null,
            h("td", { class: "number" }, duration(took(tool))),
            h("td", { class: "what" }, h("a", { href: placeUrl(["rollouts", id, "transcript"], { call: tool.call, tool: tool.id }) }, tool.name), tool.error ? h("span", { class: "error-text" }, " failed") : null, h("span", { class: "muted mono" }, `  ${shorten(tool.gist, 90)}`)),
            h("td", null, tool.call),
            h("td", { class: "number", title: clockTime(Number(tool.started)) }, duration(Number(tool.started) - first)),
            h("td", { class: "muted" }, tool.ended_by === "agent" ? "the agent's report" : "the next request"),
          ))),
      ),
    ),
  );
}

/** @param {string} href @param {string} label @param {any[]} children */
export function svgLink(href, label, children) {
  const link = document.createElementNS("http://www.w3.org/2000/svg", "a");
  link.setAttribute("href", href);
  link.setAttribute("aria-label", label);
  link.append(h("title", null, label), ...children.filter(Boolean));
  return link;
}

/** What overlaps gets lanes of its own. @param {{started: any, ended: any}[]} spans @param {number} last @returns {number[]} */
function lanesOf(spans, last) {
  /** @type {number[]} */
  const free = [];
  return spans.map((span) => {
    let lane = free.findIndex((until) => until <= span.started);
    if (lane < 0) lane = free.length;
    free[lane] = span.ended ?? last;
    return lane;
  });
}
