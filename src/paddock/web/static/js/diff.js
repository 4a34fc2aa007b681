/** The difference of two texts, line by line. */

import { h } from "./dom.js";

const MOST_CELLS = 4_000_000;
const CONTEXT = 3;

/** @typedef {{kind: "same" | "gone" | "new", text: string}} Line */

/**
 * The lines of both texts, compared. Where both are too long to compare, all of the first is gone and all of the second new.
 * @param {string} before
 * @param {string} after
 * @returns {Line[]}
 */
export function diffLines(before, after) {
  const old = linesOf(before);
  const now = linesOf(after);
  let start = 0;
  while (start < old.length && start < now.length && old[start] === now[start]) start++;
  let end = 0;
  while (end < old.length - start && end < now.length - start && old[old.length - 1 - end] === now[now.length - 1 - end]) end++;
  /** @param {Line["kind"]} kind @returns {(text: string) => Line} */
  const as = (kind) => (text) => ({ kind, text });
  const middle = diffMiddle(old.slice(start, old.length - end), now.slice(start, now.length - end), as);
  return [...old.slice(0, start).map(as("same")), ...middle, ...old.slice(old.length - end).map(as("same"))];
}

/** The lines of a text; the end of the last one begins no other. @param {string} text */
function linesOf(text) {
  const lines = text.split("\n");
  if (lines[lines.length - 1] === "") lines.pop();
  return lines;
}

/** @param {string[]} old @param {string[]} now @param {(kind: Line["kind"]) => (text: string) => Line} as @returns {Line[]} */
function diffMiddle(old, now, as) {
  if (!old.length || !now.length || old.length * now.length > MOST_CELLS) return [...old.map(as("gone")), ...now.map(as("new"))];
  return alignPieces(old, now);
}

/** The pieces of two sequences, with as many of them equal as possible; takes the product of both lengths. @param {string[]} old @param {string[]} now @returns {Line[]} */
export function alignPieces(old, now) {
  const wide = now.length + 1;
  const longest = new Uint32Array((old.length + 1) * wide);
  for (let i = old.length - 1; i >= 0; i--) {
    for (let j = now.length - 1; j >= 0; j--) {
      longest[i * wide + j] = old[i] === now[j] ? longest[(i + 1) * wide + j + 1] + 1 : Math.max(longest[(i + 1) * wide + j], longest[i * wide + j + 1]);
    }
  }
  /** @type {Line[]} */
  const lines = [];
  let i = 0;
  let j = 0;
  while (i < old.length && j < now.length) {
    if (old[i] === now[j]) {
      lines.push({ kind: "same", text: old[i] });
      i++;
      j++;
    } else if (longest[(i + 1) * wide + j] >= longest[i * wide + j + 1]) lines.push({ kind: "gone", text: old[i++] });
    else lines.push({ kind: "new", text: now[j++] });
  }
  while (i < old.length) lines.push({ kind: "gone", text: old[i++] });
  while (j < now.length) lines.push({ kind: "new", text: now[j++] });
  return lines;
}

/** A change of a file, with a few lines around what changed. @param {{path: string, before: string | null, after: string | null, binary?: boolean}} change */
export function diffBlock(change) {
  const lines = diffLines(change.before ?? "", change.after ?? "");
  const near = new Set();
  lines.forEach((line, index) => {
    if (line.kind !== "same") for (let at = index - CONTEXT; at <= index + CONTEXT; at++) near.add(at);
  });
  const marks = { same: " ", gone: "−", new: "+" };
  const words = { same: "", gone: "removed ", new: "added " };
  const rows = [];
  let skipped = 0;
  lines.forEach((line, index) => {
    if (!near.has(index)) skipped++;
    else {
      if (skipped) rows.push(h("div", { class: "diff-skip" }, `… ${skipped} lines …`));
      skipped = 0;
      rows.push(h("div", { class: `diff-${line.kind}` }, h("span", { class: "diff-mark", "aria-hidden": "true" }, marks[line.kind]), h("span", { class: "visually-hidden" }, words[line.kind]), line.text || " "));
    }
  });
  if (skipped && rows.length) rows.push(h("div", { class: "diff-skip" }, `… ${skipped} lines …`));
  const added = lines.filter((line) => line.kind === "new").length;
  const gone = lines.filter((line) => line.kind === "gone").length;
  if (change.binary) return h("figure", { class: "diff" }, h("figcaption", null, h("code", null, change.path), h("span", { class: "muted" }, " binary, changed")));
  return h(
    "figure",
    { class: "diff" },
    h("figcaption", null, h("code", null, change.path), " ", h("span", { class: "diff-count-new" }, `+${added}`), " ", h("span", { class: "diff-count-gone" }, `−${gone}`)),
    rows.length ? h("div", { class: "diff-body", tabindex: 0 }, rows) : h("p", { class: "muted" }, "Nothing changed."),
  );
}
