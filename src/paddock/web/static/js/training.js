/** Training: the rewards of a stream by weight version and by task, how old its samples were, and what was left out. */

import { get } from "./api.js";
import { broken, empty, fill, h } from "./dom.js";
import { count, dateTime, percent, rewardText } from "./format.js";
import { linePlot } from "./plot.js";
import { placeUrl } from "./router.js";

const AGAIN_MS = 3000;
const OWN_CHARTS = ["entropy", "logprob_difference"];

/** @param {import("./router.js").Place} place @param {AbortSignal} signal */
export async function trainingView(place, signal) {
  const { streams } = await get("streams", {}, signal);
  if (!streams.length) return h("div", { class: "view" }, h("h1", null, "Training"), empty("No stream yet", h("p", null, "A trainer that takes rollouts from paddock.train.stream.Stream appears here.")));
  const name = place.parts[1] ?? streams[0].name;
  const body = h("div", { class: "content" });
  let drawn = "";
  async function draw() {
    if (signal.aborted) return;
    try {
      const view = await get(`streams/${encodeURIComponent(name)}`, {}, signal);
      const text = JSON.stringify(view);
      if (text !== drawn) fill(body, trainingBody(view));
      drawn = text;
    } catch (error) {
      if (!signal.aborted) fill(body, broken(error, draw));
    }
    if (!signal.aborted) setTimeout(draw, AGAIN_MS);
  }
  await draw();
  return h("div", { class: "view" }, h("h1", null, "Training"), chooser(streams, name), body);
}

/** @param {any[]} streams @param {string} name */
function chooser(streams, name) {
  const options = streams.map((each) => h("option", { value: each.name, selected: each.name === name }, `${each.name} · ${dateTime(each.created_at)} · version ${each.version}`));
  const select = h("select", { id: "stream", onchange: () => (location.hash = placeUrl(["training", select.value])) }, options);
  return h("div", { class: "filters" }, h("label", { for: "stream", class: "muted" }, "Stream"), select);
}

/** @param {any} view */
function trainingBody(view) {
  const sampled = view.versions.filter((/** @type {any} */ each) => each.rollouts);
  if (!sampled.length) return empty("No rollout has ended yet");
  return [
    figures(view, sampled),
    panel("Reward by weight version", rewardPlot(sampled.map((/** @type {any} */ each) => ({ version: each.version, ...each.reward })), "Mean reward of all rollouts, by the version that sampled them"), "Mean of all rollouts with a reward, with the 95 % interval."),
    view.sources.length > 1 && h("div", { class: "charts" }, view.sources.map((/** @type {any} */ source) => panel(source.name, rewardPlot(source.rewards, `Mean reward of the source ${source.name}`)))),
    h("div", { class: "charts" }, versionCharts(view.versions, sampled)),
    panel("Left out", leftOut(sampled)),
    panel("Tasks", tasks(view.tasks), "Mean reward with the 95 % interval: in the first ten weight versions, and in the last ten."),
  ];
}

/** @param {string} title @param {any} content @param {string} [note] */
function panel(title, content, note = "") {
  return h("section", { class: "panel", "aria-label": title }, h("h2", null, title), note && h("p", { class: "muted" }, note), content);
}

/** @param {string} title @param {string} value @param {string} note */
function card(title, value, note) {
  return h("div", { class: "card" }, h("h2", null, title), h("div", { class: "figure" }, value), h("p", { class: "muted", title: note }, note));
}

/** @param {any} view @param {any[]} sampled */
function figures(view, sampled) {
  const last = sampled[sampled.length - 1];
  const rollouts = sum(sampled.map((each) => each.rollouts));
  const dropped = sum(sampled.map((each) => sum(Object.values(each.left_out))));
  const oldest = Math.max(0, ...view.versions.map((/** @type {any} */ each) => each.staleness_max ?? 0));
  const rates = view.versions.filter((/** @type {any} */ each) => each.tokens_per_second !== null);
  const rate = rates.length ? rates[rates.length - 1].tokens_per_second : null;
  const units = view.units;
  return h(
    "section",
    { class: "figures", "aria-label": "Figures" },
    card("Weight version", count(view.version), `${count(units.acknowledged ?? 0)} units acknowledged`),
    card("Reward", rewardText(last.reward.mean), `${intervalText(last.reward)} at version ${last.version}`),
    card("Rollouts", count(rollouts), `${count(units.started ?? 0)} units run, ${count(units.ready ?? 0)} wait`),
    card("Left out", percent(rollouts ? dropped / rollouts : 0), `${count(dropped)} rollouts`),
    card("Staleness", `≤ ${oldest}`, "versions behind"),
    card("Tokens per second", rate === null ? "–" : count(Math.round(rate)), "trainable, last version"),
  );
}

/** @param {any[]} rewards @param {string} label */
function rewardPlot(rewards, label) {
  const data = rewards.map((each) => ({ x: each.version, y: each.mean, low: each.low ?? each.mean, high: each.high ?? each.mean }));
  return linePlot(data, { label, xText: versionText, yText: rewardText });
}

/** @param {any[]} versions @param {any[]} sampled */
function versionCharts(versions, sampled) {
  const reported = (/** @type {string} */ name) => versions.map((each) => ({ x: each.version, y: each.reported[name] ?? null }));
  const hasReported = (/** @type {string} */ name) => versions.some((each) => name in each.reported);
  const entropy = hasReported("entropy");
  const others = [...new Set(versions.flatMap((each) => Object.keys(each.reported)))].filter((name) => !OWN_CHARTS.includes(name));
  return [
    panel("Staleness", linePlot(versions.map((each) => ({ x: each.version, y: each.staleness_mean, low: 0, high: each.staleness_max ?? 0 })), { label: "Staleness of what the trainer took, by its version", yLow: 0, xText: versionText, yText: shortNumber }), "Mean and largest, by the trainer's version."),
    panel("Tokens per second", linePlot(versions.map((each) => ({ x: each.version, y: each.tokens_per_second })), { label: "Trainable tokens per second", yLow: 0, xText: versionText, yText: (y) => count(Math.round(y)) })),
    panel("Share left out", linePlot(sampled.map((each) => ({ x: each.version, y: sum(Object.values(each.left_out)) / each.rollouts })), { label: "Share of rollouts that were left out", yLow: 0, yHigh: 1, xText: versionText, yText: percent })),
    panel("Entropy", linePlot(entropy ? reported("entropy") : sampled.map((each) => ({ x: each.version, y: each.entropy })), { label: "Entropy for each token", xText: versionText, yText: shortNumber }), entropy ? "As the trainer reported it, in nats." : "Estimated from the logprobs of the sampled tokens, in nats."),
    hasReported("logprob_difference") ? panel("Logprob difference", linePlot(reported("logprob_difference"), { label: "Difference between captured logprobs and the trainer's", yLow: 0, xText: versionText, yText: shortNumber }), "Between captured logprobs and those that the trainer computed again.") : null,
    others.map((name) => panel(name.replaceAll("_", " "), linePlot(reported(name), { label: `${name}, as the trainer reported it`, xText: versionText, yText: shortNumber }))),
  ];
}

/** @param {any[]} sampled */
function leftOut(sampled) {
  /** @type {Record<string, number>} */
  const reasons = {};
  for (const each of sampled) for (const [reason, number] of Object.entries(each.left_out)) reasons[reason] = (reasons[reason] ?? 0) + Number(number);
  const rollouts = sum(sampled.map((each) => each.rollouts));
  const rows = Object.entries(reasons).sort((one, other) => other[1] - one[1]);
  if (!rows.length) return h("p", { class: "muted" }, "Nothing: every rollout was delivered.");
  return h("div", { class: "scroll-x" }, h("table", { class: "plain" }, head("reason", "rollouts", "share"), h("tbody", null, rows.map(([reason, number]) => h("tr", null, h("td", null, reason), h("td", { class: "number" }, count(number)), h("td", { class: "number" }, percent(number / rollouts)))))));
}

/** @param {any[]} rows */
function tasks(rows) {
  return h(
    "div",
    { class: "scroll-x" },
    h("table", { class: "plain" }, head("source", "task", "first", "last", "change"), h("tbody", null, rows.map((each) => {
      const change = each.first.mean === null || each.reward.mean === null ? null : each.reward.mean - each.first.mean;
      return h("tr", null, h("td", null, each.source), h("td", null, each.task_id), h("td", { class: "number" }, meanText(each.first)), h("td", { class: "number" }, meanText(each.reward)), h("td", { class: "number" }, change === null ? "–" : `${change >= 0 ? "+" : ""}${change.toFixed(2)}`));
    }))),
  );
}

/** @param {...string} names The first are texts; the others are numbers. */
function head(...names) {
  const texts = ["reason", "source", "task"];
  return h("thead", null, h("tr", null, names.map((name) => h("th", { scope: "col", class: texts.includes(name) ? null : "number" }, name))));
}

/** @param {any} reward */
function meanText(reward) {
  return reward.mean === null ? "–" : `${rewardText(reward.mean)} ${intervalText(reward)}`;
}

/** @param {any} reward */
function intervalText(reward) {
  return reward.low === null ? `(n = ${reward.count})` : `± ${((reward.high - reward.low) / 2).toFixed(2)}`;
}

/** @param {number} version */
function versionText(version) {
  return `version ${version}`;
}

/** @param {number} value */
function shortNumber(value) {
  return value === 0 ? "0" : Math.abs(value) < 0.001 || Math.abs(value) >= 10_000 ? value.toExponential(0) : String(Number(value.toPrecision(3)));
}

/** @param {any[]} values @returns {number} */
function sum(values) {
  return values.reduce((total, value) => total + Number(value), 0);
}
