/** A list of any length with rows of one height: only what is seen is in the document, and only that is fetched. */

import { h } from "./dom.js";

const PAGE = 100;
const OVERSCAN = 8;
/** Browsers stop laying out elements beyond some millions of pixels; longer lists are scrolled in proportion. */
const TALLEST = 8_000_000;

/**
 * @template Row
 */
export class VirtualList {
  /**
   * @param {{
   *   rowHeight: number,
   *   fetch: (offset: number, limit: number) => Promise<{total: number, rows: Row[]}>,
   *   render: (row: Row, index: number) => HTMLElement,
   *   onError?: (error: unknown) => void,
   *   label: string,
   * }} options
   */
  constructor(options) {
    this.options = options;
    this.total = 0;
    this.selected = -1;
    /** @type {Map<number, Row>} */
    this.rows = new Map();
    /** @type {Map<number, Promise<void>>} */
    this.pages = new Map();
    this.generation = 0;
    this.inner = h("div", { class: "virtual-inner" });
    this.element = h("div", { class: "virtual", role: "rowgroup", tabindex: 0, "aria-label": options.label, onscroll: () => this.schedule() }, this.inner);
    this.frame = 0;
    this.observer = new ResizeObserver(() => this.schedule());
    this.observer.observe(this.element);
  }

  /** Forget everything and begin at the top. Resolves when the first page is there. */
  async reset() {
    this.generation++;
    this.rows.clear();
    this.pages.clear();
    this.element.scrollTop = 0;
    this.selected = -1;
    await this.load(0);
    this.draw();
  }

  /** Take newer versions of rows that are shown. @param {(row: Row) => Row | undefined} change */
  update(change) {
    for (const [index, row] of this.rows) {
      const newer = change(row);
      if (newer) this.rows.set(index, newer);
    }
    this.draw();
  }

  /** Fetch the pages that are shown again, without forgetting what is there. */
  async refresh() {
    const [first, last] = this.visible();
    const generation = ++this.generation;
    this.pages.clear();
    const pages = new Set([Math.floor(first / PAGE), Math.floor(Math.max(first, last - 1) / PAGE)]);
    await Promise.all([...pages].map((page) => this.load(page)));
    if (generation === this.generation) this.draw();
  }

  schedule() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  /** @returns {[number, number]} */
  visible() {
    const { rowHeight } = this.options;
    const height = this.element.clientHeight || 600;
    const full = this.total * rowHeight;
    const first =
      full <= TALLEST
        ? Math.floor(this.element.scrollTop / rowHeight)
        : Math.round((this.element.scrollTop / Math.max(1, TALLEST - height)) * Math.max(0, this.total - height / rowHeight));
    return [Math.max(0, first), Math.min(this.total, first + Math.ceil(height / rowHeight) + 1)];
  }

  draw() {
    const { rowHeight, render } = this.options;
    const full = this.total * rowHeight;
    this.inner.style.height = `${Math.min(full, TALLEST)}px`;
    const [seen, last] = this.visible();
    const first = Math.max(0, seen - OVERSCAN);
    const shift = full <= TALLEST ? 0 : this.element.scrollTop - seen * rowHeight;
    const children = [];
    for (let index = first; index < Math.min(this.total, last + OVERSCAN); index++) {
      const row = this.rows.get(index);
      const element = row === undefined ? h("div", { class: "row loading", role: "row", "aria-busy": "true" }) : render(row, index);
      element.style.transform = `translateY(${index * rowHeight + shift}px)`;
      element.style.height = `${rowHeight}px`;
      element.setAttribute("aria-rowindex", String(index + 1));
      if (index === this.selected) element.classList.add("selected");
      if (row === undefined) this.load(Math.floor(index / PAGE)).then(() => this.schedule());
      children.push(element);
    }
    this.inner.replaceChildren(...children);
  }

  /** @param {number} page */
  load(page) {
    const cached = this.pages.get(page);
    if (cached) return cached;
    const generation = this.generation;
    const loading = this.options.fetch(page * PAGE, PAGE).then(
      ({ total, rows }) => {
        if (generation !== this.generation) return;
        this.total = total;
        rows.forEach((row, index) => this.rows.set(page * PAGE + index, row));
      },
      (error) => {
        if (generation === this.generation) this.options.onError?.(error);
      },
    );
    this.pages.set(page, loading);
    return loading;
  }

  /** Move the selection, and keep it in sight. @param {number} by */
  move(by) {
    if (!this.total) return;
    this.selected = Math.max(0, Math.min(this.total - 1, this.selected + by));
    const { rowHeight } = this.options;
    const [first, last] = this.visible();
    if (this.total * rowHeight <= TALLEST) {
      const top = this.selected * rowHeight;
      const height = this.element.clientHeight;
      if (top < this.element.scrollTop) this.element.scrollTop = top;
      else if (top + rowHeight > this.element.scrollTop + height) this.element.scrollTop = top + rowHeight - height;
    } else if (this.selected < first || this.selected >= last - 1) {
      this.element.scrollTop = (this.selected / this.total) * TALLEST;
    }
    this.draw();
  }

  /** @returns {Row | undefined} */
  current() {
    return this.rows.get(this.selected);
  }
}
