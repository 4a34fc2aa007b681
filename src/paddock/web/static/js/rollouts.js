/** All rollouts: figures on top, filters, and a table that only holds what is seen. */

import { ApiError, get, live } from "./api.js";
import { broken, copyable, empty, fill, h } from "./dom.js";
import { ago, count, dateTime, duration, modelName, outcomeText, percent, rewardClass, rewardText, shorten } from "./format.js";
import { useKeys } from "./keys.js";
import { shareBar, spark, sparkBars } from "./plot.js";
import { keepPlace, placeUrl } from "./router.js";
import { VirtualList } from "./virtual.js";

const ROW_HEIGHT = 34;
const FILTERS = ["q", "task", "agent", "model", "outcome", "batch", "min_reward", "max_reward", "since", "until", "running"];
const TYPING_MS = 250;
const REFRESH_MS = 1000;
const DAY = 86400;

/** @type {{name: string, title: string, sort: string | null, class?: string}[]} */
const COLUMNS = [
  { name: "outcome", title: "Outcome", sort: "outcome" },
  { name: "reward", title: "Reward", sort: "reward", class: "number" },
  { name: "task", title: "Task", sort: "task" },
  { name: "agent", title: "Agent", sort: null },
  { name: "model", title: "Model", sort: null },
  { name: "calls", title: "Calls", sort: "calls", class: "number" },
  { name: "tokens", title: "Tokens", sort: "tokens", class: "number" },
  { name: "wall", title: "Time", sort: "wall", class: "number" },
  { name: "started", title: "Started", sort: "started" },
  { name: "id", title: "Rollout", sort: null },
];

/** A coloured word for how a rollout ended, or where it stands. @param {any} row */
export function outcomeTag(row) {
  const name = row.outcome ?? "running";
  const title = row.outcome === "ok" ? "Nothing broke. The reward says whether the work is right." : null;
  return h("span", { class: `tag outcome-${name}`, title }, row.outcome ? outcomeText(row.outcome) : (row.stage ?? "running"));
}

/** @param {import("./router.js").Place} place @param {AbortSignal} signal */
export function rolloutsView(place, signal) {
  /** @type {Record<string, any>} */
  const filters = Object.fromEntries(FILTERS.map((name) => [name, place.query.get(name) ?? ""]));
  let sort = place.query.get("sort") ?? "started";
  let order = place.query.get("order") ?? "desc";

  const figures = h("section", { class: "figures", "aria-label": "Figures" });
  const tasks = h("section", { class: "tasks", "aria-label": "Tasks" });
  const heading = h("div", { class: "row head", role: "row" });
  const total = h("span", { class: "muted", "aria-live": "polite" });
  const problem = h("div");
  /** What broke, if the whole view is without it. @type {unknown} */
  let failed = null;
  const list = new VirtualList({
    rowHeight: ROW_HEIGHT,
    label: "Rollouts",
    fetch: (offset, limit) => get("rollouts", { ...filters, sort, order, offset, limit }, signal),
    render: rowElement,
    onError: fail,
  });
  const table = h("div", { class: "grid rollouts", role: "table", "aria-label": "Rollouts" }, h("div", { role: "rowgroup" }, heading), list.element);
  const none = h("div", { hidden: true });

  /** Show what broke. A store that cannot be read is reported once, in place of figures and a table. @param {any} error */
  function fail(error) {
    if (signal.aborted) return;
    fill(problem, broken(error, show));
    if (!isBroken(error) && list.total) return;
    failed = error;
    content.hidden = true;
  }

  async function show() {
    keepPlace(["rollouts"], { ...filters, ...(sort === "started" && order === "desc" ? {} : { sort, order }) });
    drawHeading();
    fill(problem);
    failed = null;
    await Promise.all([list.reset(), drawFigures()]);
    content.hidden = failed !== null;
    if (failed) return;
    total.textContent = list.total === 1 ? "1 rollout" : `${list.total.toLocaleString("en")} rollouts`;
    table.hidden = list.total === 0;
    none.hidden = list.total !== 0;
    if (!list.total) fill(none, nothing(Object.values(filters).some(Boolean), clearFilters));
  }

  function drawHeading() {
    fill(
      heading,
      COLUMNS.map((column) => {
        const sorted = column.sort === sort;
        const direction = sorted ? (order === "desc" ? "descending" : "ascending") : null;
        const inside = column.sort
          ? h("button", { type: "button", onclick: () => sortBy(/** @type {string} */ (column.sort)) }, column.title, sorted ? (order === "desc" ? " ↓" : " ↑") : "")
          : column.title;
        return h("div", { class: `cell ${column.name} ${column.class ?? ""}`, role: "columnheader", "aria-sort": direction }, inside);
      }),
    );
  }

  /** @param {string} name */
  function sortBy(name) {
    order = name === sort && order === "desc" ? "asc" : "desc";
    sort = name;
    show();
  }

  async function drawFigures() {
    try {
      const stats = await get("stats", filters, signal);
      fill(figures, figureCards(stats));
      fill(tasks, taskTable(stats.tasks, (task) => choose("task", task)));
    } catch (error) {
      if (isBroken(error)) fail(error);
      else if (!signal.aborted) fill(figures, broken(error, drawFigures));
    }
  }

  /** @param {string} name @param {string} value */
  function choose(name, value) {
    filters[name] = value;
    const input = /** @type {HTMLInputElement | null} */ (form.elements.namedItem(name));
    if (input) input.value = value;
    show();
  }

  function clearFilters() {
    for (const name of FILTERS) filters[name] = "";
    form.reset();
    for (const input of form.querySelectorAll("input, select")) input.value = "";
    show();
  }

  const form = filterForm(filters, choose, clearFilters, signal);
  useKeys(
    [
      { keys: "j", does: "Next rollout", run: () => list.move(1) },
      { keys: "k", does: "Previous rollout", run: () => list.move(-1) },
      { keys: "Enter", does: "Open the selected rollout", run: () => open(list.current()) },
      { keys: "/", does: "Search", run: () => /** @type {HTMLElement} */ (form.elements.namedItem("q")).focus() },
      { keys: "x", does: "Clear all filters", run: clearFilters },
    ],
    signal,
  );
  follow(list, show, drawFigures, signal);
  const content = h(
    "div",
    { class: "content" },
    figures,
    form,
    h("details", { class: "fold" }, h("summary", null, "By task"), tasks),
    h("div", { class: "above-table" }, total, h("span", { class: "muted" }, "j k to move, Enter to open, / to search")),
    table,
    none,
  );
  requestAnimationFrame(show);
  return h("div", { class: "view wide" }, h("h1", { class: "visually-hidden" }, "Rollouts"), problem, content);
}

/** Whether the server is there and cannot read the store. @param {any} error */
const isBroken = (error) => error instanceof ApiError && error.status >= 500;

/** Keep what is seen up to date. @param {VirtualList<any>} list @param {() => Promise<void>} show @param {() => void} drawFigures @param {AbortSignal} signal */
function follow(list, show, drawFigures, signal) {
  let waiting = 0;
  /** @param {{rows: any[]}} update */
  function onRows({ rows }) {
    const newer = new Map(rows.map((row) => [row.rollout_id, row]));
    let replaced = 0;
    list.update((row) => {
      const newest = newer.get(row.rollout_id);
      if (newest) replaced++;
      return newest;
    });
    if (waiting || signal.aborted) return;
    waiting = setTimeout(async () => {
      waiting = 0;
      if (signal.aborted) return;
      if (replaced < newer.size) await (list.total ? list.refresh() : show());
      drawFigures();
    }, REFRESH_MS);
  }
  live("live", { rows: onRows }, signal);
}

/** @param {any} row */
function open(row) {
  if (row) location.hash = placeUrl(["rollouts", row.rollout_id]);
}

/** @param {any} row */
function rowElement(row) {
  /** @type {Record<string, any>} */
  const cells = {
    outcome: outcomeTag(row),
    reward: h("span", { class: rewardClass(row.reward) }, rewardText(row.reward)),
    task: row.task_id,
    agent: row.agent,
    model: modelName(row.model),
    calls: count(row.calls),
    tokens: count((row.prompt_tokens ?? 0) + (row.completion_tokens ?? 0)),
    wall: duration(row.wall_s),
    started: h("time", { title: dateTime(row.started_at) }, ago(row.started_at)),
    id: h("a", { href: placeUrl(["rollouts", row.rollout_id]) }, shorten(row.rollout_id, 18)),
  };
  return h(
    "div",
    { class: "row", role: "row", title: row.error ?? null, onclick: (/** @type {MouseEvent} */ event) => event.target instanceof HTMLAnchorElement || open(row) },
    COLUMNS.map((column) => h("div", { class: `cell ${column.name} ${column.class ?? ""}`, role: "cell", title: typeof cells[column.name] === "string" ? cells[column.name] : null }, cells[column.name])),
  );
}

/** @param {any} stats */
function figureCards(stats) {
  const kinds = Object.entries(stats.outcomes).map(([name, value]) => ({ name, value: Number(value) }));
  const description = kinds.map((kind) => `${kind.value} ${outcomeText(kind.name)}`).join(", ");
  const ended = stats.total - stats.running;
  const series = stats.series.map((/** @type {any} */ each) => each.mean);
  return [
    card("Mean reward", rewardText(stats.mean_reward), stats.ci ? `95 %: ${rewardText(stats.ci[0])} to ${rewardText(stats.ci[1])}` : `${count(stats.scored)} scored`, spark(series, { label: "Mean reward over time" })),
    card("Health", ended ? `${percent((stats.outcomes.ok ?? 0) / ended)} finished` : "–", description, shareBar(kinds, `Outcomes: ${description}`)),
    card("Tokens", count(stats.prompt_tokens + stats.completion_tokens), `${count(stats.completion_tokens)} sampled`),
    card("Time", duration(stats.wall.p50), `95 % under ${duration(stats.wall.p95)}`),
    card("Running", count(stats.running), `${count(stats.total)} in all`),
  ];
}

/** @param {string} title @param {string} figure @param {string} words @param {any} [picture] */
function card(title, figure, words, picture) {
  return h("div", { class: "card" }, h("h2", null, title), h("div", { class: "figure" }, figure), picture, h("p", { class: "muted", title: words }, words));
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
  return h("div", { class: "scroll-x" }, h("table", { class: "plain" }, h("thead", null, h("tr", null, head.map((title) => h("th", { scope: "col" }, title)))), h("tbody", null, rows)));
}

/** The choices of the selects come when the server has counted them. @param {Record<string, any>} filters @param {(name: string, value: string) => void} choose @param {() => void} reset @param {AbortSignal} signal */
function filterForm(filters, choose, reset, signal) {
  /** @param {string} name @param {string} title */
  const select = (name, title) =>
    h(
      "select",
      { name, "aria-label": title, onchange: (/** @type {any} */ event) => choose(name, event.target.value) },
      h("option", { value: "" }, title),
      filters[name] ? h("option", { value: filters[name], selected: true }, name === "outcome" ? outcomeText(filters[name]) : filters[name]) : null,
    );
  /** @type {Record<string, HTMLSelectElement>} */
  const selects = {
    tasks: select("task", "Any task"),
    agents: select("agent", "Any agent"),
    models: select("model", "Any model"),
    outcomes: select("outcome", "Any outcome"),
    batches: select("batch", "Any batch"),
  };
  get("facets", {}, signal)
    .then((facets) => {
      for (const [name, element] of Object.entries(selects)) {
        const chosen = element.value;
        const options = facets[name].map((/** @type {any} */ option) => h("option", { value: option.name, selected: option.name === chosen }, `${name === "outcomes" ? outcomeText(option.name) : modelName(option.name)} (${count(option.count)})`));
        element.replaceChildren(/** @type {Node} */ (element.firstChild), ...options);
        element.hidden = !options.length;
      }
    })
    .catch(() => {
      // Without choices the search still finds everything; the table tells what is wrong with the server.
    });
  /** @param {string} name @param {string} title */
  const number = (name, title) =>
    h("input", { name, type: "number", step: "any", placeholder: title, "aria-label": title, value: filters[name], onchange: (/** @type {any} */ event) => choose(name, event.target.value) });
  const times = [["", "Any time"], ["3600", "Last hour"], [String(DAY), "Last day"], [String(7 * DAY), "Last week"]];
  let typing = 0;
  const search = h("input", {
    name: "q",
    type: "search",
    placeholder: "Search id, task, model, error…",
    "aria-label": "Search",
    "aria-keyshortcuts": "/",
    value: filters.q,
    oninput: (/** @type {any} */ event) => {
      clearTimeout(typing);
      typing = setTimeout(() => choose("q", event.target.value), TYPING_MS);
    },
  });
  return h(
    "form",
    { class: "filters", role: "search", "aria-label": "Filters", onsubmit: (/** @type {Event} */ event) => event.preventDefault() },
    search,
    Object.values(selects),
    number("min_reward", "Reward from"),
    number("max_reward", "Reward to"),
    h(
      "select",
      { name: "since", "aria-label": "Time", onchange: (/** @type {any} */ event) => choose("since", event.target.value ? String(Math.floor(Date.now() / 1000 - Number(event.target.value))) : "") },
      times.map(([value, title]) => h("option", { value }, title)),
    ),
    h("button", { type: "button", class: "quiet", onclick: reset }, "Clear"),
  );
}

/** @param {boolean} filtered @param {() => void} reset */
function nothing(filtered, reset) {
  if (filtered) return empty("No rollout fits these filters", h("button", { type: "button", onclick: reset }, "Clear all filters"));
  return empty("No rollouts yet", h("p", null, "Run one, and watch it here as it happens:"), copyable("paddock rollout fix-test --model demo"));
}
