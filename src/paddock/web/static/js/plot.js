/** Small charts as SVG, each with words for those who do not see it. */

import { h } from "./dom.js";
import { outcomeText } from "./format.js";

/** Room for the name of a place below a chart. */
const TICK_WIDTH = 100;
const WHISKER_DISTANCE = 2.5;

/** @param {string} label @param {number} width @param {number} height @param {any[]} children @param {string} [kind] */
function chart(label, width, height, children, kind = "") {
  return h("svg", { class: `chart ${kind}`, viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, h("title", null, label), children);
}

/** @param {number[]} values @param {number} low @param {number} high @param {number} width @param {number} height */
function points(values, low, high, width, height) {
  const step = values.length > 1 ? width / (values.length - 1) : 0;
  const scale = high > low ? (height - 3) / (high - low) : 0;
  return values.map((value, index) => `${(index * step).toFixed(1)},${(height - 1.5 - (value - low) * scale).toFixed(1)}`).join(" ");
}

/**
 * A line without axes. Values that are null are left out.
 * @param {(number | null)[]} values
 * @param {{width?: number, height?: number, low?: number, high?: number, label?: string}} [options]
 */
export function spark(values, { width = 120, height = 24, low, high, label = "" } = {}) {
  const present = /** @type {number[]} */ (values.filter((value) => value !== null && value !== undefined));
  if (!present.length) return h("span", { class: "muted" }, "–");
  const least = low ?? Math.min(...present);
  const most = high ?? Math.max(...present);
  const description = label || `${present.length} values, from ${present[0].toPrecision(3)} to ${present[present.length - 1].toPrecision(3)}`;
  if (present.length === 1) return chart(description, width, height, [h("circle", { cx: width / 2, cy: height / 2, r: 2.5, class: "dot" })], "spark");
  return chart(description, width, height, [h("polyline", { points: points(present, least, most, width, height), class: "line" })], "spark");
}

/** One bar for each value, as for rewards of single rollouts. @param {(number | null)[]} values @param {{width?: number, height?: number, low?: number, high?: number, label?: string}} [options] */
export function sparkBars(values, { width = 120, height = 24, low = 0, high = 1, label = "" } = {}) {
  if (!values.length) return h("span", { class: "muted" }, "–");
  const step = Math.min(8, width / values.length);
  const bars = values.map((value, index) => {
    if (value === null) return h("rect", { x: index * step, y: height - 2, width: Math.max(1, step - 1), height: 2, class: "unknown" });
    const share = high > low ? Math.max(0, Math.min(1, (value - low) / (high - low))) : 0;
    const tall = Math.max(1.5, share * (height - 2));
    return h("rect", { x: index * step, y: height - tall, width: Math.max(1, step - 1), height: tall, class: share >= 1 ? "bar full" : "bar" });
  });
  return chart(label || `${values.length} values`, width, height, bars, "spark");
}

/** A chart that is drawn again when its width changes, so that its letters keep their size. @param {(width: number) => Node} draw */
export function responsive(draw) {
  const box = h("div", { class: "chart-box" });
  let drawn = 0;
  new ResizeObserver(() => {
    const width = Math.max(200, Math.floor(box.clientWidth));
    if (Math.abs(width - drawn) < 2) return;
    drawn = width;
    box.replaceChildren(draw(width));
  }).observe(box);
  return box;
}

/**
 * A line over time or steps, with a band where `low` and `high` are given.
 * @param {{x: number, y: number | null, low?: number, high?: number}[]} data
 * @param {{height?: number, label: string, yLow?: number, yHigh?: number, xText?: (x: number) => string, yText?: (y: number) => string}} options
 */
export function linePlot(data, options) {
  return responsive((width) => lineChart(data, { ...options, width }));
}

/** @param {{x: number, y: number | null, low?: number, high?: number}[]} data @param {any} options */
function lineChart(data, { width, height = 160, label, yLow, yHigh, xText = String, yText = (/** @type {number} */ y) => y.toPrecision(3) }) {
  const present = data.filter((each) => each.y !== null);
  if (!present.length) return h("p", { class: "muted" }, "Nothing to plot yet.");
  const pad = { left: 44, right: 8, top: 8, bottom: 20 };
  const xs = present.map((each) => each.x);
  const ys = present.flatMap((each) => [each.low ?? each.y, each.high ?? each.y]).map(Number);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  const [y0, y1] = [yLow ?? Math.min(...ys), yHigh ?? Math.max(...ys)];
  const px = (/** @type {number} */ x) => pad.left + (x1 > x0 ? ((x - x0) / (x1 - x0)) * (width - pad.left - pad.right) : (width - pad.left - pad.right) / 2);
  const py = (/** @type {number} */ y) => height - pad.bottom - (y1 > y0 ? ((y - y0) / (y1 - y0)) * (height - pad.top - pad.bottom) : (height - pad.top - pad.bottom) / 2);
  const parts = [
    h("line", { x1: pad.left, x2: width - pad.right, y1: py(y0), y2: py(y0), class: "axis" }),
    h("text", { x: pad.left - 6, y: py(y0) + 4, class: "tick end" }, yText(y0)),
    h("text", { x: pad.left - 6, y: py(y1) + 4, class: "tick end" }, y1 > y0 ? yText(y1) : ""),
    h("text", { x: pad.left, y: height - 5, class: "tick" }, xText(x0)),
    h("text", { x: width - pad.right, y: height - 5, class: "tick end" }, x1 > x0 ? xText(x1) : ""),
  ];
  if (present.some((each) => each.low !== undefined)) {
    const above = present.map((each) => `${px(each.x).toFixed(1)},${py(Number(each.high ?? each.y)).toFixed(1)}`);
    const below = present.map((each) => `${px(each.x).toFixed(1)},${py(Number(each.low ?? each.y)).toFixed(1)}`).reverse();
    parts.push(h("polygon", { points: [...above, ...below].join(" "), class: "band" }));
  }
  parts.push(h("polyline", { points: present.map((each) => `${px(each.x).toFixed(1)},${py(Number(each.y)).toFixed(1)}`).join(" "), class: "line" }));
  if (present.length <= 60) for (const each of present) parts.push(h("circle", { cx: px(each.x), cy: py(Number(each.y)), r: 2.2, class: "dot" }, h("title", null, `${xText(each.x)}: ${yText(Number(each.y))}`)));
  return chart(label, width, height, parts, "wide");
}

/**
 * @typedef {{place: number, y: number, low?: number, high?: number, title: string, isChosen?: boolean, pick: () => void}} PlacedPoint
 * @typedef {{name: string, points: PlacedPoint[]}} PlacedLine
 */

/**
 * Lines over places in a row, with an interval at each point. A point is a button.
 * @param {{label: string, places: string[], lines: PlacedLine[], height?: number}} options
 */
export function seriesPlot(options) {
  const { lines } = options;
  const legend = lines.length > 1 ? h("p", { class: "series-legend" }, lines.map((line, index) => h("span", null, h("span", { class: `swatch line-${index}` }), ` ${line.name}`))) : null;
  return h("div", null, responsive((width) => seriesChart(options, width)), legend);
}

/** @param {{label: string, places: string[], lines: PlacedLine[], height?: number}} options @param {number} width */
function seriesChart({ label, places, lines, height = 180 }, width) {
  const pad = { left: 36, right: 14, top: 10, bottom: 22 };
  const all = lines.flatMap((line) => line.points);
  const ys = all.flatMap((point) => [point.low ?? point.y, point.high ?? point.y]);
  const isShare = Math.min(...ys) >= 0 && Math.max(...ys) <= 1;
  const [y0, y1] = isShare ? [0, 1] : spread(Math.min(...ys), Math.max(...ys));
  const first = Math.min(...all.map((point) => point.place));
  const last = Math.max(...all.map((point) => point.place));
  const inner = width - pad.left - pad.right;
  const px = (/** @type {number} */ place) => pad.left + (last > first ? ((place - first) / (last - first)) * inner : inner / 2);
  const py = (/** @type {number} */ y) => height - pad.bottom - ((y - y0) / (y1 - y0)) * (height - pad.top - pad.bottom);
  const grid = [0, 0.5, 1].map((share) => y0 + share * (y1 - y0)).flatMap((y) => [
    h("line", { x1: pad.left, x2: width - pad.right, y1: py(y), y2: py(y), class: "axis" }),
    h("text", { x: pad.left - 6, y: py(y) + 4, class: "tick end" }, String(Number(y.toPrecision(3)))),
  ]);
  const drawn = lines.map((line, index) => {
    const shape = `line-${index}`;
    // Beside each other, not on top of each other.
    const x = (/** @type {PlacedPoint} */ point) => px(point.place) + (index - (lines.length - 1) / 2) * WHISKER_DISTANCE;
    const whiskers = line.points.filter((point) => point.low !== undefined).map((point) => h("line", { x1: x(point), x2: x(point), y1: py(Number(point.low)), y2: py(Number(point.high)), class: `whisker ${shape}` }));
    const path = h("polyline", { points: line.points.map((point) => `${px(point.place).toFixed(1)},${py(point.y).toFixed(1)}`).join(" "), class: `line ${shape}` });
    return [whiskers, path];
  });
  const dots = lines.map((line, index) =>
    line.points.map((point) =>
      h(
        "g",
        { class: `point line-${index}${point.isChosen ? " chosen" : ""}`, role: "button", tabindex: 0, "aria-label": point.title, onclick: point.pick, onkeydown: (/** @type {KeyboardEvent} */ event) => event.key === "Enter" && (event.stopPropagation(), point.pick()) },
        h("title", null, point.title),
        h("circle", { cx: px(point.place), cy: py(point.y), r: 9, class: "target" }),
        h("circle", { cx: px(point.place), cy: py(point.y), r: point.isChosen ? 5.5 : 3.2, class: "dot" }),
      ),
    ),
  );
  return h("svg", { class: "chart wide series", viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": label }, grid, placeTicks(places, first, last, px, width, height), drawn, dots);
}

/** As many names of places as fit without touching. @param {string[]} places @param {number} first @param {number} last @param {(place: number) => number} px @param {number} width @param {number} height */
function placeTicks(places, first, last, px, width, height) {
  const most = Math.max(2, Math.floor(width / TICK_WIDTH));
  const step = Math.max(1, Math.ceil((last - first + 1) / most));
  const ticks = [];
  let end = -Infinity;
  for (let place = first; place <= last; place += step) {
    const isFirst = place === first && last > first;
    const isLast = px(place) > width - TICK_WIDTH / 2 && last > first;
    const start = isFirst ? 0 : isLast ? width - TICK_WIDTH : px(place) - TICK_WIDTH / 2;
    if (start < end) continue;
    end = start + TICK_WIDTH;
    ticks.push(h("text", { x: isFirst ? 2 : Math.min(px(place), width - 2), y: height - 5, class: `tick ${isFirst ? "" : isLast ? "end" : "middle"}` }, places[place]));
  }
  return ticks;
}

/** Ends of an axis around values that may all be the same. @param {number} low @param {number} high */
function spread(low, high) {
  const margin = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  return [low - margin, high + margin];
}

/** A stack of shares in one bar. @param {{name: string, value: number}[]} parts @param {string} label */
export function shareBar(parts, label) {
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  if (!total) return h("span", { class: "muted" }, "–");
  let at = 0;
  const pieces = parts.filter((part) => part.value).map((part) => {
    const wide = (part.value / total) * 100;
    const piece = h("rect", { x: at, y: 0, width: Math.max(0.4, wide - 0.3), height: 10, class: `outcome-${part.name}` }, h("title", null, `${outcomeText(part.name)}: ${part.value}`));
    at += wide;
    return piece;
  });
  return h("svg", { class: "chart shares", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": label }, h("title", null, label), pieces);
}

/** Bars that count values in buckets. @param {{from: number, to: number, count: number}[]} buckets @param {{height?: number, label: string, text?: (value: number) => string}} options */
export function histogram(buckets, options) {
  return responsive((width) => histogramChart(buckets, { ...options, width }));
}

/** @param {{from: number, to: number, count: number}[]} buckets @param {any} options */
function histogramChart(buckets, { width, height = 110, label, text = String }) {
  const most = Math.max(1, ...buckets.map((bucket) => bucket.count));
  const step = width / Math.max(1, buckets.length);
  const bars = buckets.map((bucket, index) => {
    const tall = (bucket.count / most) * (height - 22);
    const description = `${text(bucket.from)} to ${text(bucket.to)}: ${bucket.count}`;
    return h("rect", { x: index * step + 0.5, y: height - 16 - tall, width: Math.max(1, step - 1), height: Math.max(bucket.count ? 1 : 0, tall), class: "bar" }, h("title", null, description));
  });
  const ends = buckets.length
    ? [h("text", { x: 0, y: height - 3, class: "tick" }, text(buckets[0].from)), h("text", { x: width, y: height - 3, class: "tick end" }, text(buckets[buckets.length - 1].to))]
    : [];
  return chart(label, width, height, [...bars, ...ends], "wide");
}
