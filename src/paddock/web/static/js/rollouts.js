/** The first page: filters, figures, how rewards develop, and the table of all rollouts. */

import { ApiError, get, live } from "./api.js";
import { card } from "./batches.js";
import { causeList } from "./causes.js";
import { broken, copyable, empty, fill, h } from "./dom.js";
import { openExportDialog } from "./download.js";
import { clearedFilters, filterForm, readFilters } from "./filters.js";
import { count, duration, outcomeText, percent, rewardText } from "./format.js";
import { useKeys } from "./keys.js";
import { learningPanel } from "./learning.js";
import { shareBar, sparkBars } from "./plot.js";
import { keepPlace, placeUrl } from "./router.js";
import { RolloutTable, follower, openRollout } from "./table.js";
import { tickedBar } from "./ticked.js";

export { outcomeTag } from "./table.js";

const INDEXING_MS = 2000;
/** Of the table of tasks; the others have numbers. */
const TEXT_COLUMNS = ["Task", "Latest rewards", "Outcomes", ""];

/** How far the table was scrolled when it was left, by its address. */
const left = { place: "", top: 0, page: 0 };

/** @param {import("./router.js").Place} place @param {AbortSignal} signal */
export function rolloutsView(place, signal) {
  const filters = readFilters(place.query);
  const chart = { by: place.query.get("by") ?? "", split: place.query.get("split") ?? "" };
  const figures = h("section", { class: "figures", "aria-label": "Figures" });
  const tasks = h("section", { class: "tasks", "aria-label": "Tasks" });
  const causes = h("section", { "aria-label": "What broke" });
  const causesTitle = h("summary", null, "What broke");
  const causesFold = h("details", { class: "fold" }, causesTitle, causes);
  const total = h("span", { class: "muted", "aria-live": "polite" });
  const notIndexed = h("span", { class: "muted" });
  const problem = h("div");
  const none = h("div", { hidden: true });
  const bar = tickedBar(() => table.clearTicks(), () => (table.refresh(), form.draw()));
  const table = new RolloutTable({ filters, signal, onSort: show, onTick: bar.show, onError: fail });
  table.sort = place.query.get("sort") ?? "started";
  table.order = place.query.get("order") ?? "desc";
  const form = filterForm(filters, choose, clearFilters, signal);
  const learning = learningPanel(filters, chart, chooseAndShow, remember, signal);
  const exportButton = h("button", { type: "button", class: "small", onclick: () => openExportDialog(filters, table.list.total) }, "Export…");
  /** What broke, if the whole view is without it. @type {unknown} */
  let failed = null;
  let checking = 0;
  let notIndexedBefore = 0;

  /** Show what broke. A store that cannot be read is reported once, in place of figures and a table. @param {any} error */
  function fail(error) {
    if (signal.aborted) return;
    fill(problem, broken(error, show));
    if (!isBroken(error) && table.list.total) return;
    failed = error;
    content.hidden = true;
  }

  /** @param {boolean} [isStep] */
  function remember(isStep = false) {
    const isSorted = table.sort !== "started" || table.order !== "desc";
    keepPlace(["rollouts"], { ...filters, ...chart, ...(isSorted ? { sort: table.sort, order: table.order } : {}) }, isStep);
  }

  async function show(isStep = false) {
    remember(isStep === true);
    fill(problem);
    failed = null;
    // The server answers one after the other: what is looked at first is asked for first.
    const shown = [table.show(), drawFigures(), learning.draw()];
    form.draw();
    await Promise.all(shown);
    content.hidden = failed !== null;
    if (failed) return;
    drawTotal();
    if (!table.list.total) fill(none, nothing(form.isFiltered(), clearFilters));
  }

  function drawTotal() {
    const number = table.list.total;
    total.textContent = number === 1 ? "1 rollout" : `${number.toLocaleString("en")} rollouts`;
    table.element.hidden = exportButton.hidden = number === 0;
    none.hidden = number !== 0;
    learning.element.hidden = figures.hidden = folds.hidden = number === 0;
    form.element.hidden = above.hidden = number === 0 && !form.isFiltered();
    notIndexed.textContent = table.notIndexed ? `${count(table.notIndexed)} transcripts are not searchable yet.` : "";
    clearTimeout(checking);
    // In a folder that cannot be written, the number stays as it is.
    const isIndexing = table.notIndexed > 0 && table.notIndexed !== notIndexedBefore;
    notIndexedBefore = table.notIndexed;
    if (isIndexing) checking = setTimeout(() => signal.aborted || refresh(true), INDEXING_MS);
  }

  async function drawFigures() {
    try {
      const stats = await get("stats", filters, signal);
      fill(figures, figureCards(stats));
      fill(tasks, taskTable(stats.tasks, (task) => choose("task", task)));
      await drawCauses(stats);
    } catch (error) {
      if (isBroken(error)) fail(error);
      else if (!signal.aborted) fill(figures, broken(error, drawFigures));
    }
  }

  /** Asked for only when they are unfolded. @param {any} stats */
  async function drawCauses(stats) {
    const number = stats.total - stats.running - (stats.outcomes.ok ?? 0);
    causesFold.hidden = !number;
    causesTitle.textContent = `What broke (${count(number)})`;
    if (causesFold.open) fill(causes, causeList(await get("causes", filters, signal), filters));
  }
  causesFold.addEventListener("toggle", () => causesFold.open && drawFigures());

  /** @param {string} name @param {string} value */
  function choose(name, value) {
    filters[name] = value;
    show(name !== "q");
  }

  /** The rollouts of a point of the chart. @param {Record<string, any>} changes */
  function chooseAndShow(changes) {
    Object.assign(filters, changes);
    show(true);
    above.scrollIntoView({ block: "start" });
  }

  function clearFilters() {
    Object.assign(filters, clearedFilters());
    show(true);
  }

  useKeys(
    [
      { keys: "j", does: "Next rollout", run: () => table.list.move(1) },
      { keys: "k", does: "Previous rollout", run: () => table.list.move(-1) },
      { keys: "Enter", does: "Open the selected rollout", run: () => openRollout(table.list.current()) },
      { keys: "t", does: "Tick the selected rollout, or take the tick away", run: () => table.tick(table.list.current()) },
      { keys: "c", does: "Compare the two ticked rollouts", run: bar.compare },
      { keys: "/", does: "Search", run: form.focus },
      { keys: "x", does: "Clear all filters", run: clearFilters },
    ],
    signal,
  );
  live("live", { rows: follower(table, (hasNew) => refresh(hasNew), signal) }, signal);
  /** @param {boolean} hasNew */
  async function refresh(hasNew) {
    if (hasNew) await (table.list.total || table.notIndexed ? table.refresh().then(drawTotal) : show());
    drawFigures();
    learning.draw();
  }
  signal.addEventListener("abort", () => Object.assign(left, { place: lastAddress, top: table.list.element.scrollTop, page: lastScroll }));
  let lastAddress = "";
  let lastScroll = 0;
  addEventListener("scroll", () => ([lastAddress, lastScroll] = [location.hash, scrollY]), { signal });
  table.list.element.addEventListener("scroll", () => (lastAddress = location.hash));

  const folds = h("div", null, h("details", { class: "fold" }, h("summary", null, "By task"), tasks), causesFold);
  const above = h("div", { class: "above-table" }, total, notIndexed, h("span", { class: "muted keys" }, "j k to move, t to tick, Enter to open, / to search"), exportButton);
  const content = h("div", { class: "content" }, form.element, figures, learning.element, folds, above, bar.element, table.element, none);
  requestAnimationFrame(async () => {
    await show();
    if (left.place && left.place === location.hash) {
      table.list.element.scrollTop = left.top;
      scrollTo(0, left.page);
    }
  });
  return h("div", { class: "view wide" }, h("h1", { class: "visually-hidden" }, "Rollouts"), problem, content);
}

/** Whether the server is there and cannot read the store. @param {any} error */
const isBroken = (error) => error instanceof ApiError && error.status >= 500;

/** @param {any} stats */
function figureCards(stats) {
  const kinds = Object.entries(stats.outcomes).map(([name, value]) => ({ name, value: Number(value) }));
  kinds.sort((one, other) => other.value - one.value);
  const description = kinds.map((kind) => `${count(kind.value)} ${outcomeText(kind.name)}`).join(", ");
  const ended = stats.total - stats.running;
  return [
    card("Mean reward", rewardText(stats.mean_reward), stats.ci ? `95 %: ${rewardText(stats.ci[0])} to ${rewardText(stats.ci[1])}` : `${count(stats.scored)} scored`),
    card("Success", stats.scored ? percent(stats.passed / stats.scored) : "–", `${count(stats.passed)} of ${count(stats.scored)} with a reward of 1`),
    card("Health", ended ? percent((stats.outcomes.ok ?? 0) / ended) : "–", description, shareBar(kinds, `Outcomes: ${description}`)),
    card("Tokens", count(stats.prompt_tokens + stats.completion_tokens), `${count(stats.completion_tokens)} sampled`),
    card("Time", duration(stats.wall.p50), `95 % under ${duration(stats.wall.p95)}`),
    card("Running", count(stats.running), `${count(stats.total)} in all`),
  ];
}

/** @param {any[]} tasks @param {(task: string) => void} choose */
function taskTable(tasks, choose) {
  const steps = ["1", "2", "4", "8"].filter((k) => tasks.some((task) => task.pass?.[k] !== undefined && task.pass[k] !== null));
  const head = ["Task", "Rollouts", "Mean reward", "95 %", ...steps.map((k) => `pass@${k}`), "Latest rewards", "Tokens", "Time", "Outcomes", ""];
  const rows = tasks.map((task) => {
    const kinds = Object.entries(task.outcomes).map(([name, value]) => ({ name, value: Number(value) }));
    return h(
      "tr",
      null,
      h("td", null, h("button", { type: "button", class: "link", onclick: () => choose(task.task_id) }, task.task_id)),
      h("td", { class: "number" }, count(task.count)),
      h("td", { class: "number" }, rewardText(task.mean)),
      h("td", { class: "number muted" }, task.ci ? `${rewardText(task.ci[0])}–${rewardText(task.ci[1])}` : "–"),
      steps.map((k) => h("td", { class: "number" }, task.pass?.[k] === undefined || task.pass[k] === null ? "–" : rewardText(task.pass[k]))),
      h("td", null, sparkBars(task.rewards, { label: `Latest rewards of ${task.task_id}` })),
      h("td", { class: "number" }, count(task.tokens)),
      h("td", { class: "number" }, duration(task.wall_mean)),
      h("td", { class: "shares-cell" }, shareBar(kinds, kinds.map((kind) => `${kind.value} ${outcomeText(kind.name)}`).join(", "))),
      h("td", null, h("a", { href: placeUrl(["groups"], { task: task.task_id }) }, "side by side")),
    );
  });
  return h("div", { class: "scroll-x" }, h("table", { class: "plain" }, h("thead", null, h("tr", null, head.map((title) => h("th", { scope: "col", class: TEXT_COLUMNS.includes(title) ? null : "number" }, title)))), h("tbody", null, rows)));
}

/** @param {boolean} filtered @param {() => void} reset */
function nothing(filtered, reset) {
  if (filtered) return empty("No rollout fits these filters", h("button", { type: "button", onclick: reset }, "Clear all filters"));
  return empty("No rollouts yet", h("p", null, "Run one, and watch it here as it happens:"), copyable("paddock rollout fix-test --model demo"));
}
