/** Batches: how far each is and how it went; one batch with the causes of what broke, and its rollouts. */

import { get, live } from "./api.js";
import { broken, copyable, empty, fill, h } from "./dom.js";
import { causeList } from "./causes.js";
import { count, dateTime, duration, modelName, percent, rewardText } from "./format.js";
import { useKeys } from "./keys.js";
import { keepPlace, placeUrl } from "./router.js";
import { RolloutTable, follower, openRollout } from "./table.js";
import { tickedBar } from "./ticked.js";

const BATCHES_A_PAGE = 50;
/** Titles and classes; `extra` ones are left out on a narrow screen. */
const COLUMNS = [
  ["Batch", ""], ["Began", "extra"], ["Progress", ""], ["Done", "number extra"], ["Reward", "number"], ["95 %", "number extra"], ["Success", "number"],
  ["Health", "number extra"], ["Tasks", "number extra"], ["Agent", "extra"], ["Model", "extra"], ["Tokens", "number extra"],
];

/** @param {import("./router.js").Place} place @param {AbortSignal} signal */
export async function batchesView(place, signal) {
  const body = h("tbody");
  const table = h("div", { class: "scroll-x" }, h("table", { class: "plain batches" }, h("thead", null, h("tr", null, COLUMNS.map(([title, kind]) => h("th", { scope: "col", class: kind }, title)))), body));
  const more = h("button", { type: "button", onclick: () => load(shown + BATCHES_A_PAGE) }, "Show more batches");
  const total = h("p", { class: "muted" });
  const none = h("div");
  const problem = h("div");
  let shown = BATCHES_A_PAGE;

  /** @param {number} limit */
  async function load(limit) {
    shown = limit;
    fill(problem);
    try {
      const page = await get("batches", { limit }, signal);
      fill(body, page.batches.map(batchRow));
      total.textContent = page.total === 1 ? "1 batch" : `${page.total.toLocaleString("en")} batches`;
      more.hidden = page.batches.length >= page.total;
      table.hidden = total.hidden = !page.total;
      if (page.total) fill(none);
      else fill(none, empty("No batches yet", h("p", null, "Rollouts that are started together form a batch:"), copyable("paddock rollout fix-test --model demo -n 4")));
    } catch (error) {
      if (signal.aborted) return;
      fill(problem, broken(error, () => load(limit)));
      more.hidden = table.hidden = true;
    }
  }
  keepPlace(["batches"], {});
  await load(shown);
  live("live", { rows: follower(null, () => load(shown), signal) }, signal);
  return h("div", { class: "view wide" }, h("h1", null, "Batches"), total, table, none, problem, more);
}

/** @param {any} batch */
function batchRow(batch) {
  const ended = batch.count - batch.running;
  const cells = [
    h("a", { href: placeUrl(["batches", batch.batch_id]) }, batch.batch_id),
    h("time", null, dateTime(batch.began)),
    progressBar(batch),
    batch.size === null ? count(batch.done) : `${count(batch.done)} of ${count(batch.size)}`,
    rewardText(batch.mean),
    batch.ci ? `${rewardText(batch.ci[0])}–${rewardText(batch.ci[1])}` : "–",
    batch.scored ? percent(batch.passed / batch.scored) : "–",
    ended ? percent(batch.finished / ended) : "–",
    count(batch.tasks),
    batch.agents.join(", "),
    batch.models.map(modelName).join(", "),
    count(batch.tokens),
  ];
  return h("tr", null, cells.map((cell, index) => h("td", { class: COLUMNS[index][1], title: typeof cell === "string" ? cell : null }, cell)));
}

/** Solved, finished without success, broken, running and left, as shares of one bar. @param {any} batch */
function progressBar(batch) {
  // What was cancelled is left to do.
  const failed = batch.count - batch.running - batch.finished - batch.cancelled;
  const parts = [
    { name: "solved", title: "solved", value: Math.min(batch.passed, batch.finished) },
    { name: "unsolved", title: "finished, not solved", value: Math.max(0, batch.finished - batch.passed) },
    { name: "broken", title: "broken", value: failed },
    { name: "running", title: "running", value: batch.running },
    { name: "left", title: "left", value: leftOf(batch) ?? 0 },
  ].filter((part) => part.value > 0);
  const total = parts.reduce((sum, part) => sum + part.value, 0) || 1;
  const label = parts.map((part) => `${count(part.value)} ${part.title}`).join(", ");
  let at = 0;
  const pieces = parts.map((part) => {
    const wide = (part.value / total) * 100;
    const piece = h("rect", { x: at, y: 0, width: wide, height: 10, class: `progress-${part.name}` }, h("title", null, `${count(part.value)} ${part.title}`));
    at += wide;
    return piece;
  });
  return h("svg", { class: "chart shares", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": label }, h("title", null, label), pieces);
}

/** How many members have not begun, or null where it is not known. @param {any} batch */
function leftOf(batch) {
  return batch.size === null ? null : Math.max(0, batch.size - batch.done - batch.running);
}

/** @param {import("./router.js").Place} place @param {AbortSignal} signal */
export async function batchView(place, signal) {
  const id = place.parts[1];
  const filters = { batch: id };
  const head = h("div", { class: "stack" });
  const causes = h("section", { class: "panel", "aria-label": "What broke" });
  const problem = h("div");
  const bar = tickedBar(() => table.clearTicks(), () => table.refresh());
  const table = new RolloutTable({ filters, signal, hidden: ["batch"], onSort: () => table.show(), onTick: bar.show, onError: (error) => signal.aborted || fill(problem, broken(error)) });

  async function draw() {
    const [page, stats, found] = await Promise.all([get("batches", filters, signal), get("stats", filters, signal), get("causes", filters, signal)]);
    const [batch] = page.batches;
    causes.hidden = !found.total;
    fill(causes, h("h2", null, found.total === 1 ? "1 rollout broke" : `${count(found.total)} rollouts broke`), causeList(found, filters));
    fill(head, batch ? batchHead(batch, stats) : empty(`There is no batch ${id}`, h("a", { href: "#/batches" }, "All batches")));
    table.element.hidden = !batch;
  }
  await draw();
  useKeys(
    [
      { keys: "j", does: "Next rollout", run: () => table.list.move(1) },
      { keys: "k", does: "Previous rollout", run: () => table.list.move(-1) },
      { keys: "t", does: "Tick the selected rollout, or take the tick away", run: () => table.tick(table.list.current()) },
      { keys: "c", does: "Compare the two ticked rollouts", run: bar.compare },
      { keys: "Enter", does: "Open the selected rollout", run: () => openRollout(table.list.current()) },
      { keys: "u", does: "Back to all batches", run: () => (location.hash = "#/batches") },
    ],
    signal,
  );
  const again = () => draw().catch((error) => signal.aborted || fill(problem, broken(error, again)));
  live("live", { rows: follower(table, (hasNew) => (hasNew && table.refresh(), again()), signal) }, signal);
  requestAnimationFrame(() => table.show());
  return h("div", { class: "view wide" }, head, problem, causes, bar.element, table.element);
}

/** @param {any} batch @param {any} stats */
function batchHead(batch, stats) {
  const left = leftOf(batch);
  const ended = batch.count - batch.running;
  const progress = [`${count(batch.done)} done`, `${count(batch.running)} running`, left === null ? null : `${count(left)} left`].filter(Boolean).join(", ");
  const isStopped = left !== null && left > 0 && !batch.running;
  return [
    h("div", { class: "rollout-title" }, h("h1", null, `Batch ${batch.batch_id}`), h("a", { class: "button", href: placeUrl(["rollouts"], { batch: batch.batch_id }) }, "Show among all rollouts"), h("a", { class: "button", href: placeUrl(["groups"], { batch: batch.batch_id }) }, "Groups")),
    h("p", { class: "muted" }, `${batch.agents.join(", ")} · ${batch.models.map(modelName).join(", ")} · ${count(batch.tasks)} ${batch.tasks === 1 ? "task" : "tasks"} · began ${dateTime(batch.began)} · ${duration(batch.last - batch.began)}`),
    h("div", { class: "batch-progress" }, progressBar(batch), h("p", null, progress)),
    isStopped ? h("div", { class: "notice" }, h("p", null, "This batch has stopped. The command that started it continues it with:"), copyable(`--resume ${batch.batch_id}`)) : null,
    h(
      "section",
      { class: "figures", "aria-label": "Figures" },
      card("Mean reward", rewardText(batch.mean), batch.ci ? `95 %: ${rewardText(batch.ci[0])} to ${rewardText(batch.ci[1])}` : `${count(batch.scored)} scored`),
      card("Success", batch.scored ? percent(batch.passed / batch.scored) : "–", `${count(batch.passed)} of ${count(batch.scored)} with a reward of 1`),
      card("Health", ended ? percent(batch.finished / ended) : "–", `${count(batch.finished)} of ${count(ended)} finished`),
      card("Tokens", count(batch.tokens), `${count(stats.completion_tokens)} sampled`),
      card("Time", duration(stats.wall.p50), `95 % under ${duration(stats.wall.p95)}`),
    ),
  ];
}

/** @param {string} title @param {string} figure @param {string} words @param {any} [picture] */
export function card(title, figure, words, picture) {
  return h("div", { class: "card" }, h("h2", null, title), h("div", { class: "figure" }, figure), picture, h("p", { class: "muted", title: words }, words));
}
