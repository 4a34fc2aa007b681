/** Long texts, folded: the beginning and the end of an output, the beginning of a message, and a button for the rest. */

import { fill, h } from "./dom.js";
import { count } from "./format.js";
import { markdown } from "./markdown.js";

/** Outputs of at most this many lines are shown whole. */
const MOST_LINES = 24;
const FIRST_LINES = 12;
const LAST_LINES = 6;
const LONGEST_LINE = 500;
const MOST_CHARACTERS = 4000;
const MESSAGE_LINES = 80;
const MESSAGE_CHARACTERS = 8000;

/** What a program printed: its first and last lines, since errors come last. @param {string} text @param {number} [length] of the whole text, where the server cut it */
export function folded(text, length) {
  const lines = text.replace(/\n$/, "").split("\n");
  const note = length && length > text.length ? h("p", { class: "muted" }, `The first ${count(text.length)} of ${count(length)} characters.`) : null;
  const isShort = lines.length <= MOST_LINES && text.length <= MOST_CHARACTERS;
  if (isShort) return h("div", null, h("pre", { tabindex: 0 }, text), note);
  const root = h("div", { class: "folded" });
  const short = () => fill(root, foldedLines(lines, whole), note);
  const whole = () => fill(root, h("pre", { tabindex: 0, class: "whole" }, text), foldButton("Show less", short), note);
  short();
  return root;
}

/** @param {string[]} lines @param {() => void} whole */
function foldedLines(lines, whole) {
  const isTall = lines.length > MOST_LINES;
  const head = isTall ? lines.slice(0, FIRST_LINES) : lines;
  const tail = isTall ? lines.slice(-LAST_LINES) : [];
  const hidden = lines.length - head.length - tail.length;
  const all = lines.length > 1 ? `Show all ${count(lines.length)} lines` : `Show all ${count(lines[0].length)} characters`;
  return [
    h("pre", { tabindex: 0 }, cut(head)),
    h("p", { class: "fold-line" }, hidden ? h("span", { class: "muted" }, `${count(hidden)} lines hidden  `) : null, foldButton(all, whole)),
    tail.length ? h("pre", { tabindex: 0 }, cut(tail)) : null,
  ];
}

/** @param {string[]} lines */
function cut(lines) {
  return lines.map((line) => (line.length > LONGEST_LINE ? `${line.slice(0, LONGEST_LINE)}…` : line)).join("\n");
}

/** @param {string} text @param {() => void} run */
function foldButton(text, run) {
  return h("button", { type: "button", class: "link fold-button", onclick: run }, text);
}

/** A message: Markdown, or its source. Of a long one the beginning. @param {string} text @param {boolean} [asSource] */
export function message(text, asSource = false) {
  const draw = (/** @type {string} */ part) => (asSource ? h("div", { class: "prose" }, part) : markdown(part));
  const lines = text.split("\n");
  if (lines.length <= MESSAGE_LINES && text.length <= MESSAGE_CHARACTERS) return draw(text);
  const root = h("div", { class: "folded" });
  const short = () => fill(root, draw(lines.slice(0, MESSAGE_LINES).join("\n").slice(0, MESSAGE_CHARACTERS)), foldButton(`Show all ${count(lines.length)} lines`, whole));
  const whole = () => fill(root, draw(text), foldButton("Show less", short));
  short();
  return root;
}
