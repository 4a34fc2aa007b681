/** Where two texts differ, to the word: both texts in pieces, for showing them next to each other. */

import { alignPieces, diffLines } from "./diff.js";
import { h } from "./dom.js";
import { count } from "./format.js";

const MOST_CELLS = 1_000_000;
const WORD = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;
/** Texts with a smaller share of equal words are different texts: marking single words in them helps nobody. */
const LEAST_EQUAL = 0.25;
/** Equal lines before and after a difference. */
const CONTEXT = 4;

/** @typedef {{text: string, differs: boolean, lines?: number}} Piece `lines` of what is left out */

/** @param {string} before @param {string} after @returns {[Piece[], Piece[]]} */
export function diffWords(before, after) {
  /** @type {[Piece[], Piece[]]} */
  const sides = [[], []];
  /** @type {string[]} */
  let equal = [];
  /** @type {[string[], string[]]} */
  let changed = [[], []];
  let isFirst = true;
  const takeChanged = () => {
    if (!changed[0].length && !changed[1].length) return;
    const pieces = changedWords(changed[0].map(ended).join(""), changed[1].map(ended).join(""));
    sides.forEach((side, index) => side.push(...pieces[index]));
    changed = [[], []];
  };
  const takeEqual = (/** @type {boolean} */ isLast) => {
    const pieces = equalLines(equal, isFirst, isLast);
    sides.forEach((side) => side.push(...pieces));
    equal = [];
    isFirst = false;
  };
  for (const line of diffLines(before, after)) {
    if (line.kind === "same") {
      takeChanged();
      equal.push(line.text);
    } else {
      if (!changed[0].length && !changed[1].length) takeEqual(false);
      changed[line.kind === "gone" ? 0 : 1].push(line.text);
    }
  }
  takeChanged();
  takeEqual(true);
  return sides;
}

/** @param {string} line */
function ended(line) {
  return `${line}\n`;
}

/** Equal lines; of many only those near a difference. @param {string[]} lines @param {boolean} isFirst @param {boolean} isLast @returns {Piece[]} */
function equalLines(lines, isFirst, isLast) {
  const above = isFirst ? 0 : CONTEXT;
  const below = isLast ? 0 : CONTEXT;
  const hidden = lines.length - above - below;
  if (hidden < 4) return [{ text: lines.map(ended).join(""), differs: false }];
  return [
    { text: lines.slice(0, above).map(ended).join(""), differs: false },
    { text: "", differs: false, lines: hidden },
    { text: lines.slice(lines.length - below).map(ended).join(""), differs: false },
  ];
}

/** @param {string} before @param {string} after @returns {[Piece[], Piece[]]} */
function changedWords(before, after) {
  const old = before.match(WORD) ?? [];
  const now = after.match(WORD) ?? [];
  const whole = /** @type {[Piece[], Piece[]]} */ ([[{ text: before, differs: true }], [{ text: after, differs: true }]]);
  if (old.length * now.length > MOST_CELLS) return whole;
  const pieces = alignPieces(old, now);
  const isWord = (/** @type {{text: string}} */ piece) => /\S/.test(piece.text);
  const equal = pieces.filter((piece) => piece.kind === "same" && isWord(piece)).length;
  if (equal < LEAST_EQUAL * Math.max(old.filter((text) => /\S/.test(text)).length, now.filter((text) => /\S/.test(text)).length)) return whole;
  return [joined(pieces.filter((piece) => piece.kind !== "new")), joined(pieces.filter((piece) => piece.kind !== "gone"))];
}

/** @param {{kind: string, text: string}[]} pieces @returns {Piece[]} */
function joined(pieces) {
  /** @type {Piece[]} */
  const result = [];
  for (const { kind, text } of pieces) {
    const last = result.at(-1);
    if (last && last.differs === (kind !== "same")) last.text += text;
    else result.push({ text, differs: kind !== "same" });
  }
  return result;
}

/** One side as text with marks. @param {Piece[]} pieces @param {"gone" | "new"} kind */
export function markedText(pieces, kind) {
  return pieces.filter((piece) => piece.text || piece.lines).map((piece) => {
    if (piece.lines) return h("span", { class: "equal-lines" }, `… ${count(piece.lines)} equal lines …\n`);
    return piece.differs ? h("mark", { class: `word-${kind}` }, piece.text) : piece.text;
  });
}
