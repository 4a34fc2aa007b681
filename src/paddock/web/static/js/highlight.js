/** Light colours for code: comments, strings, numbers and keywords; lines of a difference by their sign. */

import { h } from "./dom.js";

const LONGEST = 50_000;
const WORDS =
  "and as async await break case catch class const continue def default del do elif else enum except export extends extern false False finally fn for from func function global if impl import in interface is lambda let match mod mut new nil None nonlocal not null or package pass pub raise return self static struct super switch this throw trait true True try type undefined union unsafe use using var void while with yield" +
  " echo fi then done esac local set export unset sudo cd" +
  " SELECT FROM WHERE INSERT INTO UPDATE DELETE CREATE TABLE JOIN ON GROUP ORDER BY LIMIT VALUES";
const KEYWORDS = new Set(WORDS.split(" "));
/** Comments that begin with `#`, or with `//` or `--`; languages that are not named have neither. */
const HASH = new Set(["python", "py", "bash", "sh", "shell", "console", "zsh", "ruby", "rb", "toml", "yaml", "yml", "dockerfile", "make", "makefile", "r", "perl", "ini", "conf"]);
const SLASH = new Set(["javascript", "js", "jsx", "typescript", "ts", "tsx", "java", "c", "cpp", "c++", "cs", "csharp", "go", "rust", "rs", "swift", "kotlin", "php", "scala", "json", "jsonc", "css", "proto"]);
const DASH = new Set(["sql", "lua", "haskell"]);
const STRING = /"""[\s\S]*?"""|'''[\s\S]*?'''|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`/.source;
const WORD = /[A-Za-z_]\w*/.source;
const NUMBER = /\b\d[\w.]*\b/.source;

/** @param {string} code @param {string} language as written behind the fence @returns {import("./dom.js").Child[]} */
export function colourCode(code, language) {
  const name = language.toLowerCase();
  if (code.length > LONGEST) return [code];
  if (name === "diff" || name === "patch") return colourDiff(code);
  const comment = HASH.has(name) ? /(?<![\w$&{])#.*/.source : SLASH.has(name) ? /\/\/.*|\/\*[\s\S]*?\*\//.source : DASH.has(name) ? /--.*/.source : "";
  if (!comment) return [code];
  const pattern = new RegExp(`(${comment})|(${STRING})|(${NUMBER})|(${WORD})`, "g");
  /** @type {import("./dom.js").Child[]} */
  const pieces = [];
  let plain = 0;
  for (const match of code.matchAll(pattern)) {
    const kind = match[1] ? "comment" : match[2] ? "string" : match[3] ? "number" : KEYWORDS.has(match[4]) ? "keyword" : "";
    if (!kind) continue;
    pieces.push(code.slice(plain, match.index), h("span", { class: `code-${kind}` }, match[0]));
    plain = match.index + match[0].length;
  }
  pieces.push(code.slice(plain));
  return pieces;
}

/** @param {string} code */
function colourDiff(code) {
  const kinds = { "+": "diff-new", "-": "diff-gone", "@": "diff-skip" };
  return code.split("\n").map((line) => h("span", { class: `diff-line ${kinds[/** @type {"+" | "-" | "@"} */ (line[0])] ?? ""}` }, `${line}\n`));
}
