/** Where a rollout ran: the image, how its limits were enforced, what it connected to, and the log of the build. */

import { empty, h } from "./dom.js";
import { bytesText, clockTime, count, duration } from "./format.js";

/** Longer tables would make the page slow; all rows are in the record. */
const MOST_ROWS = 1000;

/** @param {import("./rollout.js").Scene} scene */
export function sandboxPanel({ rollout }) {
  const image = rollout.image ?? {};
  const limits = Object.entries(rollout.limits ?? {});
  const connections = rollout.connections ?? [];
  const build = rollout.logs?.build ?? "";
  const facts = [
    ["Backend", rollout.sandbox],
    ["Image", image.name],
    ["Digest", image.digest && h("span", { class: "mono" }, image.digest)],
    ["Platform", image.platform],
    ["Users", rollout.user_ids],
    ["Image of the verifier", rollout.verifier?.image?.name],
    ["Its digest", rollout.verifier?.image?.digest && h("span", { class: "mono" }, rollout.verifier.image.digest)],
    ["Verifier", rollout.verifier?.mode && `${rollout.verifier.mode}${rollout.verifier.reason ? `: ${rollout.verifier.reason}` : ""}`],
    ...usageFacts(rollout.usage ?? {}),
  ].filter(([, value]) => value);
  if (!facts.length && !connections.length) return empty("No sandbox", h("p", null, "This rollout ran in an environment, or has not begun yet."));
  return h(
    "div",
    { class: "stack" },
    h("section", { class: "panel" }, h("h2", null, "Sandbox"), factTable(facts)),
    limits.length ? h("section", { class: "panel" }, h("h2", null, "How limits were enforced"), factTable(limits)) : null,
    connectionPanel(connections, rollout.live),
    buildPanel("Build of the image", build),
    buildPanel("Build of the image of the verifier", rollout.logs?.verifier_build ?? ""),
  );
}

/** @param {string} title @param {string} log */
function buildPanel(title, log) {
  if (!log) return null;
  const lines = log.trimEnd().split("\n").length;
  const fold = h("details", { class: "fold" }, h("summary", null, `${count(lines)} ${lines === 1 ? "line" : "lines"}, ${bytesText(log.length)}`), h("pre", { tabindex: 0 }, log));
  return h("section", { class: "panel" }, h("h2", null, title), fold);
}

/** @param {any} usage */
function usageFacts(usage) {
  return [
    ["Processor time", usage.cpu_seconds && duration(usage.cpu_seconds)],
    ["Most memory", usage.peak_memory_bytes && bytesText(usage.peak_memory_bytes)],
    ["Ended for", usage.killed_for],
  ];
}

/** @param {any[][]} rows */
function factTable(rows) {
  return h("table", { class: "plain facts" }, h("tbody", null, rows.map(([name, value]) => h("tr", null, h("th", { scope: "row" }, name), h("td", null, value)))));
}

/** @param {any[]} connections @param {boolean} live */
function connectionPanel(connections, live) {
  const refused = connections.filter((each) => !each.allowed).length;
  const summary = connections.length ? `  ${count(connections.length)}, ${count(refused)} refused` : "";
  const none = live ? "They are shown when the rollout ends." : "No connection left the sandbox, and none was refused.";
  return h(
    "section",
    { class: "panel" },
    h("h2", null, "Connections", h("span", { class: "muted" }, summary)),
    connections.length ? h("div", { class: "scroll-x", tabindex: 0, role: "region", "aria-label": "Connections" }, connectionTable(connections.slice(0, MOST_ROWS))) : h("p", { class: "muted" }, none),
    connections.length > MOST_ROWS ? h("p", { class: "muted" }, `The first ${count(MOST_ROWS)} are shown.`) : null,
  );
}

/** @param {any[]} connections */
function connectionTable(connections) {
  const titles = ["Phase", "Host", "Result", "Sent", "Received", "Address", "Time", "Took"];
  const numbers = new Set(["Sent", "Received", "Took"]);
  return h(
    "table",
    { class: "plain connections" },
    h("thead", null, h("tr", null, titles.map((title) => h("th", { scope: "col", class: numbers.has(title) ? "number" : null }, title)))),
    h("tbody", null, connections.map(connectionRow)),
  );
}

/** @param {any} connection */
function connectionRow(connection) {
  const result = connection.allowed ? connection.reason ?? "allowed" : `refused: ${connection.reason ?? "no reason was given"}`;
  const failed = !connection.allowed || connection.reason;
  return h(
    "tr",
    null,
    h("td", null, connection.phase),
    h("td", { class: "mono" }, `${connection.host}:${connection.port}`),
    h("td", { class: failed ? "error-text result" : "result" }, result),
    h("td", { class: "number" }, bytesText(connection.sent_bytes)),
    h("td", { class: "number" }, bytesText(connection.received_bytes)),
    h("td", { class: "mono" }, connection.address ?? "–"),
    h("td", null, clockTime(connection.started_at)),
    h("td", { class: "number" }, duration(connection.seconds)),
  );
}
