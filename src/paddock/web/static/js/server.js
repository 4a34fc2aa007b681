/** The server: its sessions, how long calls take, and what fails. The numbers are those of /health and /metrics. */

import { get, live } from "./api.js";
import { empty, fill, h } from "./dom.js";
import { count, duration } from "./format.js";
import { histogram, spark } from "./plot.js";

const KEPT = 120;

/** @param {import("./router.js").Place} place @param {AbortSignal} signal */
export async function serverView(place, signal) {
  const body = h("div", { class: "stack" });
  /** @type {number[]} */
  const rates = [];
  let before = { steps: 0, at: 0 };
  /** @param {any} status */
  function draw(status) {
    const now = Date.now() / 1000;
    if (before.at) rates.push(Math.max(0, (status.steps - before.steps) / Math.max(0.2, now - before.at)));
    if (rates.length > KEPT) rates.shift();
    before = { steps: status.steps, at: now };
    fill(body, serverCards(status, rates), latencyPanel(status.latency), errorsPanel(status.errors), sessionsPanel(status.sessions));
  }
  draw(await get("server", {}, signal));
  live("server/live", { server: draw }, signal);
  return h("div", { class: "view" }, h("h1", null, "Server"), body);
}

/** @param {any} status @param {number[]} rates */
function serverCards(status, rates) {
  const { health } = status;
  const cards = [
    ["Status", health.status ?? "–", health.environment ?? "", null],
    ["Sessions", `${count(health.sessions)} of ${count(health.capacity)}`, `${count(health.available ?? health.capacity - health.sessions)} free`, null],
    ["Waiting", count(status.queue ?? health.waiting ?? 0), "newcomers in the queue", null],
    ["Steps", count(status.steps), rates.length ? `${count(Math.round(rates[rates.length - 1]))} a second now` : "", spark(rates, { low: 0, label: "Steps a second" })],
  ];
  return h("section", { class: "figures", "aria-label": "Figures" }, cards.map(([title, figure, words, picture]) => h("div", { class: "card" }, h("h2", null, title), h("div", { class: "figure" }, figure), picture, h("p", { class: "muted" }, words))));
}

/** @param {Record<string, {buckets: [number | string, number][], sum: number, count: number}>} latency */
function latencyPanel(latency) {
  const measured = Object.entries(latency ?? {}).filter(([, each]) => each.count);
  if (!measured.length) return h("section", { class: "panel" }, h("h2", null, "Latency"), h("p", { class: "muted" }, "No call yet."));
  return h(
    "section",
    { class: "panel", "aria-label": "Latency" },
    h("h2", null, "Latency of environment calls"),
    h("div", { class: "histograms" }, measured.map(([name, each]) => h("figure", null, h("figcaption", null, `${name}: ${count(each.count)} calls, mean ${duration(each.sum / each.count)}`), histogram(bucketed(each.buckets), { label: `Latency of ${name}`, text: duration })))),
  );
}

/** Counts in each bucket from counts up to each bound. @param {[number | string, number][]} buckets */
export function bucketed(buckets) {
  let from = 0;
  let before = 0;
  const counts = buckets.map(([bound, upTo]) => {
    const to = bound === "+Inf" || bound === null ? Infinity : Number(bound);
    const bucket = { from, to, count: upTo - before };
    from = to;
    before = upTo;
    return bucket;
  });
  const last = counts[counts.length - 1];
  if (last && last.to === Infinity) last.to = last.from;
  // One empty bucket on each side shows that it is empty there.
  while (counts.length > 3 && !counts[counts.length - 1].count && !counts[counts.length - 2].count) counts.pop();
  while (counts.length > 3 && !counts[0].count && !counts[1].count) counts.shift();
  return counts;
}

/** @param {Record<string, number>} errors */
function errorsPanel(errors) {
  const counted = Object.entries(errors ?? {}).filter(([, number]) => number);
  return h("section", { class: "panel", "aria-label": "Errors" }, h("h2", null, "Errors"), counted.length ? h("table", { class: "plain" }, h("tbody", null, counted.map(([code, number]) => h("tr", null, h("td", null, code), h("td", { class: "number" }, count(number)))))) : h("p", { class: "muted" }, "None so far."));
}

/** @param {any[]} sessions */
function sessionsPanel(sessions) {
  if (!sessions?.length) return empty("No session is open", h("p", null, "A client that connects appears here."));
  const names = [...new Set(sessions.flatMap((session) => Object.keys(session)))];
  return h(
    "section",
    { class: "panel scroll-x", "aria-label": "Sessions" },
    h("h2", null, `${sessions.length} sessions`),
    h("table", { class: "plain" }, h("thead", null, h("tr", null, names.map((name) => h("th", { scope: "col" }, name.replaceAll("_", " "))))), h("tbody", null, sessions.slice(0, 500).map((session) => h("tr", null, names.map((name) => h("td", null, cellText(name, session[name]))))))),
  );
}

/** @param {string} name @param {any} value */
export function cellText(name, value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number" && (name.endsWith("_s") || name === "age" || name.endsWith("seconds") || name === "idle")) return duration(value);
  if (typeof value === "object") return JSON.stringify(value);
  return String(value);
}
