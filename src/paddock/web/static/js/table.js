/** The table of rollouts: columns as wide as what is in them, as many as fit, rows that are ticked to compare or to tag. */

import { get } from "./api.js";
import { h } from "./dom.js";
import { ago, count, dateTime, duration, modelName, outcomeText, rewardClass, rewardText, shorten } from "./format.js";
import { placeUrl } from "./router.js";
import { VirtualList } from "./virtual.js";

const ROW_HEIGHT = 34;
const ROW_HEIGHT_WITH_MATCH = 58;
const TICK_WIDTH = 34;
const CELL_PADDING = 18;
/** For the border of a tag, and for the scroll bar. */
const EXTRA_WIDTH = 16;
const ID_CHARACTERS = 14;
const MEASURED_ROWS = 200;
const REFRESH_MS = 1000;

/**
 * `keep` says which columns stay where the screen is narrow: those with the lowest number go first.
 * @typedef {{name: string, title: string, keep: number, most: number, text: (row: any) => string, cell?: (row: any) => any, sort?: string, class?: string, grows?: boolean, optional?: boolean}} Column
 */

/** @type {Column[]} */
const COLUMNS = [
  { name: "outcome", title: "Outcome", keep: 99, most: 130, sort: "outcome", text: outcomeWord, cell: outcomeTag },
  { name: "reward", title: "Reward", keep: 98, most: 90, sort: "reward", class: "number", text: (row) => rewardText(row.reward), cell: (row) => h("span", { class: rewardClass(row.reward) }, rewardText(row.reward)) },
  { name: "task", title: "Task", keep: 97, most: 260, sort: "task", grows: true, text: (row) => row.task_id },
  { name: "tags", title: "Tags", keep: 8, most: 200, optional: true, text: (row) => (row.tags ?? []).map((/** @type {string} */ tag) => `${tag}     `).join(""), cell: (row) => (row.tags ?? []).map(tagLink) },
  { name: "agent", title: "Agent", keep: 6, most: 160, text: (row) => row.agent },
  { name: "model", title: "Model", keep: 7, most: 190, grows: true, text: (row) => modelName(row.model) },
  { name: "batch", title: "Batch", keep: 5, most: 190, optional: true, text: (row) => row.batch_id ?? "", cell: (row) => row.batch_id && h("a", { href: placeUrl(["batches", row.batch_id]) }, row.batch_id) },
  { name: "weights", title: "Weights", keep: 2, most: 90, optional: true, class: "number", text: (row) => row.weight_version ?? "" },
  { name: "calls", title: "Calls", keep: 3, most: 80, sort: "calls", class: "number", text: (row) => count(row.calls) },
  { name: "tokens", title: "Tokens", keep: 1, most: 90, sort: "tokens", class: "number", text: (row) => count((row.prompt_tokens ?? 0) + (row.completion_tokens ?? 0)) },
  { name: "wall", title: "Time", keep: 9, most: 110, sort: "wall", class: "number", text: (row) => duration(row.wall_s) },
  { name: "started", title: "Started", keep: 4, most: 150, sort: "started", text: (row) => ago(row.started_at), cell: (row) => h("time", { title: dateTime(row.started_at) }, ago(row.started_at)) },
  { name: "id", title: "Rollout", keep: 10, most: 190, text: (row) => shorten(row.rollout_id, ID_CHARACTERS), cell: (row) => h("a", { href: placeUrl(["rollouts", row.rollout_id]), title: row.rollout_id }, shorten(row.rollout_id, ID_CHARACTERS)) },
];

/** How a rollout ended, or the stage that goes on. @param {any} row */
function outcomeWord(row) {
  return row.outcome ? outcomeText(row.outcome) : `${row.stage ?? "running"}…`;
}

/** A coloured word for how a rollout ended, or where it stands. @param {any} row */
export function outcomeTag(row) {
  const name = row.outcome ?? "running";
  const title = row.outcome === "ok" ? "Nothing broke. The reward says whether the work is right." : row.outcome ? null : "It is running, in this stage.";
  return h("span", { class: `tag outcome-${name}`, title }, outcomeWord(row));
}

/** @param {string} tag */
export function tagLink(tag) {
  return h("a", { class: "chip", href: placeUrl(["rollouts"], { tag }), title: `All rollouts with the tag ${tag}` }, tag);
}

/** @param {any} row */
export function openRollout(row) {
  if (row) location.hash = placeUrl(["rollouts", row.rollout_id]);
}

export class RolloutTable {
  /**
   * @param {{
   *   filters: Record<string, any>,
   *   signal: AbortSignal,
   *   onSort: () => void,
   *   onTick: (ids: string[]) => void,
   *   onError: (error: unknown) => void,
   *   hidden?: string[],
   * }} options `hidden` names columns that say nothing here
   */
  constructor(options) {
    this.options = options;
    this.sort = "started";
    this.order = "desc";
    /** @type {Set<string>} */
    this.ticked = new Set();
    /** How many rollouts a search of transcripts does not cover yet. */
    this.notIndexed = 0;
    /** @type {Column[]} */
    this.columns = COLUMNS.filter((column) => !options.hidden?.includes(column.name));
    this.shown = this.columns;
    this.heading = h("div", { class: "row head", role: "row" });
    this.list = new VirtualList({
      rowHeight: ROW_HEIGHT,
      label: "Rollouts",
      fetch: (offset, limit) => this.fetch(offset, limit),
      render: (row) => this.rowElement(row),
      onError: options.onError,
    });
    this.element = h("div", { class: "grid rollouts", role: "table", "aria-label": "Rollouts" }, h("div", { role: "rowgroup" }, this.heading), this.list.element);
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(this.element);
  }

  /** @param {number} offset @param {number} limit */
  async fetch(offset, limit) {
    const { filters, signal } = this.options;
    const page = await get("rollouts", { ...filters, sort: this.sort, order: this.order, offset, limit }, signal);
    this.notIndexed = page.not_indexed;
    return page;
  }

  /** Show the rollouts that fit the filters, from the beginning. */
  async show() {
    const hasMatches = Boolean(this.options.filters.q);
    this.list.options.rowHeight = hasMatches ? ROW_HEIGHT_WITH_MATCH : ROW_HEIGHT;
    this.element.classList.toggle("with-matches", hasMatches);
    await this.list.reset();
    this.fit();
  }

  /** Fetch again what is seen. */
  async refresh() {
    await this.list.refresh();
    this.fit();
  }

  /** Choose the columns that fit, and their widths, by what is in the first rows. */
  fit() {
    const available = this.element.clientWidth - EXTRA_WIDTH;
    const pen = document.createElement("canvas").getContext("2d");
    if (available <= 0 || !pen) return;
    const style = getComputedStyle(this.element);
    /** @param {string} text @param {number} [weight] */
    const measure = (text, weight = 400) => {
      pen.font = `${weight} ${style.fontSize} ${style.fontFamily}`;
      return pen.measureText(text).width;
    };
    const rows = [...this.list.rows.values()].slice(0, MEASURED_ROWS);
    /** @type {Map<Column, number>} */
    const widths = new Map();
    for (const column of this.columns) {
      const texts = rows.map(column.text);
      if (column.optional && !texts.some(Boolean)) continue;
      // The heading has smaller letters, and an arrow where it is sorted by.
      const heading = measure(`${column.title} ↓`, 600) * 0.8;
      const widest = Math.max(heading, ...new Set(texts.map((text) => measure(text))));
      widths.set(column, Math.ceil(Math.min(column.most, widest + CELL_PADDING + (column.name === "outcome" ? EXTRA_WIDTH : 0))));
    }
    const sum = () => [...widths.values()].reduce((total, width) => total + width, TICK_WIDTH);
    const byImportance = [...widths.keys()].sort((one, other) => one.keep - other.keep);
    while (sum() > available && byImportance[0].keep < 90) widths.delete(/** @type {Column} */ (byImportance.shift()));
    this.shown = this.columns.filter((column) => widths.has(column));
    const tracks = this.shown.map((column) => (column.grows ? `minmax(0, ${widths.get(column)}fr)` : `${widths.get(column)}px`));
    this.element.style.setProperty("--columns", [`${TICK_WIDTH}px`, ...tracks].join(" "));
    this.drawHeading();
    this.list.draw();
  }

  drawHeading() {
    const cells = this.shown.map((column) => {
      const isSorted = column.sort === this.sort;
      const arrow = isSorted ? (this.order === "desc" ? " ↓" : " ↑") : "";
      const title = column.sort ? h("button", { type: "button", onclick: () => this.sortBy(/** @type {string} */ (column.sort)) }, column.title, arrow) : column.title;
      return h("div", { class: `cell ${column.name} ${column.class ?? ""}`, role: "columnheader", "aria-sort": isSorted ? (this.order === "desc" ? "descending" : "ascending") : null }, title);
    });
    this.heading.replaceChildren(h("div", { class: "cell tick", role: "columnheader", "aria-label": "Ticked" }), ...cells);
  }

  /** @param {string} name */
  sortBy(name) {
    this.order = name === this.sort && this.order === "desc" ? "asc" : "desc";
    this.sort = name;
    this.options.onSort();
  }

  /** @param {any} row */
  rowElement(row) {
    const box = h("input", { type: "checkbox", checked: this.ticked.has(row.rollout_id), "aria-label": `Tick ${row.rollout_id}`, onchange: () => this.tick(row) });
    const cells = this.shown.map((column) => {
      const text = column.text(row);
      return h("div", { class: `cell ${column.name} ${column.class ?? ""}`, role: "cell", title: column.cell ? null : text }, column.cell ? column.cell(row) : text);
    });
    return h(
      "div",
      { class: "row", role: "row", title: row.error ?? null, onclick: (/** @type {MouseEvent} */ event) => isControl(event.target) || openRollout(row) },
      h("label", { class: "cell tick", role: "cell" }, box),
      cells,
      row.match ? h("div", { class: "match", role: "cell" }, marked(row.match, this.options.filters.q)) : null,
    );
  }

  /** Tick a rollout, or take the tick away. @param {any} row */
  tick(row) {
    if (!row) return;
    if (!this.ticked.delete(row.rollout_id)) this.ticked.add(row.rollout_id);
    this.list.draw();
    this.options.onTick([...this.ticked]);
  }

  clearTicks() {
    this.ticked.clear();
    this.list.draw();
    this.options.onTick([]);
  }

  /** Take newer versions of the rows that are there. Returns whether others than those have changed. @param {any[]} rows */
  update(rows) {
    const newer = new Map(rows.map((row) => [row.rollout_id, row]));
    let replaced = 0;
    this.list.update((row) => {
      const newest = newer.get(row.rollout_id);
      if (newest) replaced++;
      return newest && { ...newest, match: row.match };
    });
    return replaced < newer.size;
  }
}

/** Call `refresh` at most once a second while rollouts change. @param {RolloutTable | null} table @param {(hasNew: boolean) => void} refresh @param {AbortSignal} signal */
export function follower(table, refresh, signal) {
  let waiting = 0;
  let hasNew = false;
  return (/** @type {{rows: any[]}} */ { rows }) => {
    hasNew = (table ? table.update(rows) : true) || hasNew;
    if (waiting || signal.aborted) return;
    waiting = setTimeout(() => {
      waiting = 0;
      if (!signal.aborted) refresh(hasNew);
      hasNew = false;
    }, REFRESH_MS);
  };
}

/** @param {EventTarget | null} target */
function isControl(target) {
  return target instanceof Element && target.closest("a, label, button") !== null;
}

/** A text in which the words of a search are marked. @param {string} text @param {string} query */
function marked(text, query) {
  const words = query.split(/[\s"]+/).filter(Boolean).map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  if (!words.length) return text;
  return text.split(new RegExp(`(?<![\\p{L}\\p{N}])(${words.join("|")})`, "iu")).map((part, index) => (index % 2 ? h("mark", null, part) : part));
}
