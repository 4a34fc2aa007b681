/** Markdown as elements: what agents write most, in one pass, and everything else as the text that it is. */

import { h } from "./dom.js";
import { colourCode } from "./highlight.js";

/** @typedef {import("./dom.js").Child} Child */

const DEEPEST = 8;
const LONGEST_LABEL = 1000;
const LONGEST_ADDRESS = 2000;

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const TASK = /^\[([ xX])\]\s+/;

/** The blocks of a text. @param {string} text @returns {HTMLElement} */
export function markdown(text) {
  return h("div", { class: "markdown" }, blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0));
}

/** @param {string[]} lines @param {number} depth @returns {Child[]} */
function blocks(lines, depth) {
  if (depth > DEEPEST) return [h("p", null, lines.join("\n"))];
  /** @type {Child[]} */
  const made = [];
  for (let at = 0; at < lines.length; ) {
    const [block, next] = blockAt(lines, at, depth);
    if (block) made.push(block);
    at = next;
  }
  return made;
}

/** The block that begins at a line, and the line after it. @param {string[]} lines @param {number} at @param {number} depth @returns {[Child, number]} */
function blockAt(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = line.match(FENCE);
  if (fence) return fencedCode(lines, at, fence[1], fence[2]);
  const heading = line.match(HEADING);
  if (heading) return [h(`h${Math.min(6, heading[1].length + 2)}`, { class: `level-${heading[1].length}` }, inline(heading[2])), at + 1];
  if (RULE.test(line)) return [h("hr", null), at + 1];
  if (QUOTE.test(line)) {
    const end = endOf(lines, at, (each) => QUOTE.test(each));
    return [h("blockquote", null, blocks(lines.slice(at, end).map((each) => each.replace(QUOTE, "")), depth + 1)), end];
  }
  if (ITEM.test(line)) return list(lines, at, depth);
  if (line.includes("|") && TABLE_LINE.test(lines[at + 1] ?? "") && cellsOf(line).length === cellsOf(lines[at + 1]).length) return table(lines, at);
  const end = endOf(lines, at, (each) => each.trim() !== "" && !beginsBlock(each));
  return [h("p", null, inline(lines.slice(at, end).join("\n").trim())), end];
}

/** The first line from `at + 1` on that no longer belongs. @param {string[]} lines @param {number} at @param {(line: string) => boolean} belongs */
function endOf(lines, at, belongs) {
  let end = at + 1;
  while (end < lines.length && belongs(lines[end])) end++;
  return end;
}

/** Whether a line ends a paragraph before it. @param {string} line */
function beginsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

/** @param {string[]} lines @param {number} at @param {string} fence @param {string} language @returns {[Child, number]} */
function fencedCode(lines, at, fence, language) {
  const closes = (/** @type {string} */ line) => line.trim().startsWith(fence) && /^(`+|~+)$/.test(line.trim());
  const end = endOf(lines, at, (line) => !closes(line));
  return [codeBlock(lines.slice(at + 1, end).join("\n"), language), end + 1];
}

/** Code in its colours. @param {string} code @param {string} language */
export function codeBlock(code, language) {
  return h("pre", { tabindex: 0, class: "code", dataset: language ? { language } : null }, h("code", null, colourCode(code, language)));
}

/** @param {string[]} lines @param {number} at @param {number} depth @returns {[Child, number]} */
function list(lines, at, depth) {
  const first = /** @type {RegExpMatchArray} */ (lines[at].match(ITEM));
  const indent = first[1].length;
  const ordered = /\d/.test(first[2]);
  const items = [];
  let next = at;
  while (next < lines.length) {
    const marker = lines[next].match(ITEM);
    if (!marker || marker[1].length < indent || marker[1].length > indent + 3 || /\d/.test(marker[2]) !== ordered || RULE.test(lines[next])) break;
    const inner = marker[0].length;
    const end = endOf(lines, next, (line) => belongsToItem(line, indent));
    const own = [lines[next].slice(inner), ...lines.slice(next + 1, end).map((line) => dedent(line, inner))];
    items.push(listItem(own, depth));
    next = end;
    while (next < lines.length && !lines[next].trim() && ITEM.test(lines[next + 1] ?? "")) next++;
  }
  return [h(ordered ? "ol" : "ul", ordered && parseInt(first[2]) !== 1 ? { start: parseInt(first[2]) } : null, items), Math.max(next, at + 1)];
}

/** Deeper lines belong to an item, and lines directly below it that begin nothing else. @param {string} line @param {number} indent */
function belongsToItem(line, indent) {
  if (!line.trim()) return false;
  return line.length - line.trimStart().length > indent + 1 || !beginsBlock(line);
}

/** @param {string} line @param {number} most */
function dedent(line, most) {
  return line.slice(Math.min(most, line.length - line.trimStart().length));
}

/** @param {string[]} lines @param {number} depth */
function listItem(lines, depth) {
  const task = lines[0].match(TASK);
  if (task) lines[0] = lines[0].replace(TASK, "");
  const inside = blocks(lines, depth + 1);
  // A paragraph alone is the text of the item: lists stay dense.
  const body = inside.map((each) => (each instanceof HTMLParagraphElement ? [...each.childNodes] : each));
  return h("li", task ? { class: "task" } : null, task ? (task[1] === " " ? "☐ " : "☑ ") : null, body);
}

/** @param {string} line */
function cellsOf(line) {
  const cells = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/);
  return cells.map((cell) => cell.trim().replace(/\\\|/g, "|"));
}

/** @param {string[]} lines @param {number} at @returns {[Child, number]} */
function table(lines, at) {
  const aligned = cellsOf(lines[at + 1]).map((cell) => (/-:$/.test(cell) ? (cell.startsWith(":") ? "center" : "right") : ""));
  const end = endOf(lines, at + 1, (line) => line.includes("|") && line.trim() !== "");
  /** @param {string} line @param {string} tag */
  const row = (line, tag) => h("tr", null, cellsOf(line).slice(0, aligned.length).map((cell, index) => h(tag, { class: aligned[index] ? `align-${aligned[index]}` : null }, inline(cell))));
  return [h("div", { class: "scroll-x" }, h("table", { class: "plain" }, h("thead", null, row(lines[at], "th")), h("tbody", null, lines.slice(at + 2, end).map((line) => row(line, "td"))))), end];
}

/** Marks inside a line: the sign that opens and closes, and the element. `__` is none: agents write of `__init__`. @type {[string, string][]} */
const MARKS = [["**", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const SPECIAL = /[\\`*_~[!h]/g;

/**
 * The text of a block with its marks. A sign without its partner is text; once no partner follows, none is searched again.
 * @param {string} text @param {number} [depth] @returns {Child[]}
 */
export function inline(text, depth = 0) {
  if (depth > DEEPEST) return [text];
  /** @type {Child[]} */
  const made = [];
  /** @type {Set<string>} */
  const unpaired = new Set();
  let plain = 0;
  let at = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const special = SPECIAL.exec(text);
    if (!special) break;
    at = special.index;
    const [node, end] = markAt(text, at, depth, unpaired);
    if (end === at) {
      at++;
      continue;
    }
    made.push(text.slice(plain, at), node);
    plain = at = end;
  }
  made.push(text.slice(plain));
  return made;
}

/** The marked piece at a place and where it ends; where nothing is marked, it ends where it begins. @param {string} text @param {number} at @param {number} depth @param {Set<string>} unpaired @returns {[Child, number]} */
function markAt(text, at, depth, unpaired) {
  const sign = text[at];
  if (sign === "\\") return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? [text[at + 1], at + 2] : [null, at];
  if (sign === "`") return codeSpan(text, at, unpaired);
  if (sign === "h") return bareAddress(text, at);
  if (sign === "[" || sign === "!") return link(text, at, depth);
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at) || unpaired.has(mark)) continue;
    const begin = at + mark.length;
    if (/\s/.test(text[begin] ?? " ") || text[begin] === sign || (mark.includes("_") && /\w/.test(text[at - 1] ?? ""))) continue;
    const end = closing(text, begin, mark);
    if (end < 0) unpaired.add(mark);
    else return [h(tag, null, inline(text.slice(begin, end), depth + 1)), end + mark.length];
  }
  // A run of signs that opened nothing is skipped as one.
  let end = at;
  while (text[end + 1] === sign) end++;
  return end > at ? [text.slice(at, end + 1), end + 1] : [null, at];
}

/** Where a mark closes; -1 if nowhere. @param {string} text @param {number} from @param {string} mark */
function closing(text, from, mark) {
  for (let end = text.indexOf(mark, from + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    const isInside = mark.includes("_") && /\w/.test(text[end + mark.length] ?? "");
    const isDouble = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
    if (!/\s/.test(text[end - 1]) && !isInside && !isDouble) return end;
  }
  return -1;
}

/** @param {string} text @param {number} at @param {Set<string>} unpaired @returns {[Child, number]} */
function codeSpan(text, at, unpaired) {
  let begin = at;
  while (text[begin] === "`") begin++;
  const mark = text.slice(at, begin);
  for (let end = unpaired.has(mark) ? -1 : text.indexOf(mark, begin); end >= 0; ) {
    let after = end;
    while (text[after] === "`") after++;
    if (after - end === mark.length) return [h("code", null, text.slice(begin, end).replace(/^ (.+) $/s, "$1")), after];
    end = text.indexOf(mark, after);
  }
  unpaired.add(mark);
  return [mark, begin];
}

/** `[label](address)`; an image is a link to it, because nothing is fetched for a text. @param {string} text @param {number} at @param {number} depth @returns {[Child, number]} */
function link(text, at, depth) {
  const open = text[at] === "!" ? at + 1 : at;
  if (text[open] !== "[") return [null, at];
  const middle = text.slice(open, open + LONGEST_LABEL).indexOf("](");
  if (middle < 0) return [null, at];
  const label = text.slice(open + 1, open + middle);
  const rest = text.slice(open + middle + 2, open + middle + 2 + LONGEST_ADDRESS);
  const address = rest.match(/^<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+"[^"\n]*")?\)/);
  if (!address || label.includes("\n\n")) return [null, at];
  const end = open + middle + 2 + address[0].length;
  return [webLink(address[1], inline(label || address[1], depth + 1)) ?? text.slice(at, end), end];
}

/** @param {string} text @param {number} at @returns {[Child, number]} */
function bareAddress(text, at) {
  if (/\w/.test(text[at - 1] ?? "") || !/^https?:\/\//.test(text.slice(at, at + 8))) return [null, at];
  const address = (text.slice(at, at + LONGEST_ADDRESS).match(/^https?:\/\/[^\s<>"'`|\\^{}]+/)?.[0] ?? "").replace(/[.,;:!?)\]*_]+$/, "");
  return [webLink(address, [address]), at + address.length];
}

/** A link to the web that opens beside the page and says where it leads; null for every other address. @param {string} address @param {Child[]} label */
function webLink(address, label) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (!["http:", "https:"].includes(url.protocol)) return null;
  const link = h("a", { href: url.href, rel: "noopener noreferrer nofollow", target: "_blank", title: url.href }, label);
  return link.textContent.includes(url.host) ? link : h("span", null, link, h("span", { class: "muted" }, ` (${url.host})`));
}
