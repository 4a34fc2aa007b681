/** The fleet: instances with their time to live, how long they took to come, and how they ended. */

import { get } from "./api.js";
import { broken, copyable, empty, fill, h } from "./dom.js";
import { count, duration } from "./format.js";
import { histogram, shareBar } from "./plot.js";
import { cellText } from "./server.js";

const AGAIN_MS = 2000;
const COLUMNS_SHOWN = ["instance_id", "env_key", "version", "state", "age_s", "ttl_left_s", "provisioning_s", "outcome", "run_id"];

/** @param {import("./router.js").Place} place @param {AbortSignal} signal */
export async function fleetView(place, signal) {
  const body = h("div", { class: "stack" });
  async function draw() {
    if (signal.aborted) return;
    try {
      const status = await get("fleet", {}, signal);
      fill(body, fleetBody(status));
    } catch (error) {
      if (!signal.aborted) fill(body, broken(error, draw));
    }
    if (!signal.aborted) setTimeout(draw, AGAIN_MS);
  }
  await draw();
  return h("div", { class: "view wide" }, h("h1", null, "Fleet"), body);
}

/** @param {any} status */
function fleetBody(status) {
  const instances = status.instances ?? [];
  if (!instances.length) return empty("No instance yet", h("p", null, "Run tasks on this plane, and their instances appear here:"), copyable("paddock fleet run tasks.json"));
  const kinds = Object.entries(status.counts ?? {}).map(([name, value]) => ({ name, value: Number(value) }));
  const times = instances.map((/** @type {any} */ each) => each.provisioning_s).filter((/** @type {any} */ value) => typeof value === "number");
  return [
    h("section", { class: "figures", "aria-label": "Figures" }, kinds.map((kind) => h("div", { class: "card" }, h("h2", null, kind.name), h("div", { class: "figure" }, count(kind.value))))),
    shareBar(kinds, kinds.map((kind) => `${kind.value} ${kind.name}`).join(", ")),
    h("section", { class: "panel", "aria-label": "Provisioning times" }, h("h2", null, "Provisioning times"), histogram(equalBuckets(times, 16), { label: "How long instances took to come", text: duration })),
    h("section", { class: "panel scroll-x" }, h("h2", null, `${instances.length} instances`), h("table", { class: "plain" }, h("thead", null, h("tr", null, COLUMNS_SHOWN.map((name) => h("th", { scope: "col" }, name.replace(/_s$/, "").replaceAll("_", " "))))), h("tbody", null, instances.slice(0, 500).map((/** @type {any} */ each) => h("tr", null, COLUMNS_SHOWN.map((name) => h("td", null, cellText(name, each[name])))))))),
  ];
}

/** @param {number[]} values @param {number} number */
function equalBuckets(values, number) {
  if (!values.length) return [];
  const high = Math.max(...values);
  // From zero: times that are alike make one bar among others, and one can see how long they are.
  const low = 0;
  const step = Math.max(high / number, 0.001);
  const buckets = Array.from({ length: number }, (_, index) => ({ from: low + index * step, to: low + (index + 1) * step, count: 0 }));
  for (const value of values) buckets[Math.min(number - 1, Math.floor((value - low) / step))].count++;
  return buckets;
}
