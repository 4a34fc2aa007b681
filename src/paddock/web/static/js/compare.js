/** Two rollouts next to each other: what differs in figures, tokens, messages and files. */

import { get } from "./api.js";
import { diffBlock } from "./diff.js";
import { broken, empty, fill, h } from "./dom.js";
import { count, duration, modelName, outcomeText, rewardClass, rewardText, shorten } from "./format.js";
import { itemElement } from "./items.js";
import { walkKeys } from "./keys.js";
import { outcomeTag } from "./rollouts.js";
import { placeUrl } from "./router.js";
import { diffWords, markedText } from "./words.js";

const SUGGESTED = 100;
const TABS = [["messages", "Messages"], ["files", "Files"]];

/** @typedef {{kind: "same" | "shared" | "differs", a: any, b: any, from: number, to: number, count: number}} Row */

/** @param {import("./router.js").Place} place @param {AbortSignal} signal */
export async function compareView(place, signal) {
  const [, a = place.query.get("a"), b = place.query.get("b"), tab = "messages"] = place.parts;
  if (!a || !b) return chooser(a ?? "", signal);
  const comparison = await get("compare", { a, b }, signal);
  const ids = [comparison.a.rollout_id, comparison.b.rollout_id];
  const body = h("section", { class: "stack compared-rows", "aria-label": tab === "files" ? "Files" : "Messages" }, h("p", { class: "muted" }, "Loading…"));
  if (tab === "files") filesPanel(ids, signal).then((panel) => fill(body, panel)).catch((error) => signal.aborted || fill(body, broken(error)));
  else fill(body, messagesPanel(comparison, signal));
  walkKeys(body, ".differs", signal, { next: "j", previous: "k", what: "difference" });
  document.title = `${comparison.a.task_id} compared · Paddock`;
  return h(
    "div",
    { class: "view compare" },
    h("h1", null, "Where two rollouts part"),
    figures(comparison),
    tokensPanel(comparison),
    h("nav", { class: "tabs", "aria-label": "What is compared" }, TABS.map(([name, title]) => h("a", { href: placeUrl(["compare", ...ids, name]), "aria-current": name === tab ? "page" : null }, title))),
    body,
  );
}

/** Asks for two rollouts. @param {string} first @param {AbortSignal} signal */
function chooser(first, signal) {
  const known = h("datalist", { id: "known-rollouts" });
  get("rollouts", { limit: SUGGESTED }, signal)
    .then(({ rows }) => fill(known, rows.map((/** @type {any} */ row) => h("option", { value: row.rollout_id }, `${row.task_id} · ${row.agent} · reward ${rewardText(row.reward)}`))))
    .catch(() => {});
  const fields = ["a", "b"].map((name) => h("input", { name, list: "known-rollouts", required: true, class: "mono", autocomplete: "off", spellcheck: "false", "aria-label": `Rollout ${name.toUpperCase()}`, placeholder: `id of rollout ${name.toUpperCase()}`, value: name === "a" ? first : "" }));
  const go = (/** @type {Event} */ event) => {
    event.preventDefault();
    location.hash = placeUrl(["compare", ...fields.map((field) => field.value.trim())]);
  };
  return empty("Compare two rollouts", h("form", { class: "chooser", onsubmit: go }, fields, known, h("button", { class: "primary" }, "Compare")), h("p", null, "The beginning of an id is enough. Rollouts can be ticked in the table, under ", h("a", { href: "#/groups" }, "Groups"), " and in a tree."));
}

/** @param {any} comparison */
function figures({ a, b }) {
  const parts = [...new Set([...Object.keys(a.reward_parts ?? {}), ...Object.keys(b.reward_parts ?? {})])];
  const reward = (/** @type {any} */ value) => h("strong", { class: rewardClass(value) }, rewardText(value));
  /** @type {[string, (rollout: any) => any, ((rollout: any) => import("./dom.js").Child)?][]} */
  const facts = [
    ["Outcome", (rollout) => outcomeText(rollout.outcome ?? rollout.stage), outcomeTag],
    ["Reward", (rollout) => rollout.reward, (rollout) => reward(rollout.reward)],
    ...parts.map((name) => /** @type {any} */ ([name, (/** @type {any} */ rollout) => rollout.reward_parts?.[name] ?? null, (/** @type {any} */ rollout) => reward(rollout.reward_parts?.[name] ?? null)])),
    ["Error", (rollout) => rollout.error && shorten(rollout.error, 200)],
    ["Task", (rollout) => rollout.task_id],
    ["Agent", (rollout) => rollout.agent],
    ["Model", (rollout) => modelName(rollout.model)],
    ["Calls", (rollout) => count(rollout.calls)],
    ["Tokens", (rollout) => count((rollout.prompt_tokens ?? 0) + (rollout.completion_tokens ?? 0))],
    ["Time", (rollout) => duration(rollout.wall_s)],
  ];
  const known = facts.filter(([, value]) => [a, b].some((rollout) => ![null, undefined, ""].includes(value(rollout))));
  const isEqual = (/** @type {typeof facts[0]} */ [, value]) => value(a) === value(b);
  const shown = known.filter((fact) => !isEqual(fact) || ["Outcome", "Reward"].includes(fact[0]));
  const equal = known.filter((fact) => !shown.includes(fact)).map(([name, value]) => `${name.toLowerCase()} ${typeof value(a) === "number" ? rewardText(value(a)) : value(a)}`);
  const link = (/** @type {any} */ rollout) => h("a", { class: "mono", href: placeUrl(["rollouts", rollout.rollout_id]) }, rollout.rollout_id);
  return h(
    "section",
    { class: "panel", "aria-label": "Figures" },
    h(
      "table",
      { class: "plain compared" },
      h("thead", null, h("tr", null, h("td", null), h("th", { scope: "col" }, "A ", link(a)), h("th", { scope: "col" }, "B ", link(b)))),
      h("tbody", null, shown.map(([name, value, draw]) => h("tr", null, h("th", { scope: "row" }, name), [a, b].map((rollout) => h("td", null, draw ? draw(rollout) : value(rollout) || "–"))))),
    ),
    equal.length ? h("p", { class: "muted" }, `The same: ${equal.join(" · ")}`) : null,
  );
}

/** @param {any} comparison */
function tokensPanel({ a, b, first }) {
  if (!first) return h("p", { class: "muted" }, "Token for token the same.");
  const same = `Both went the same way for ${count(first.shared_tokens)} tokens, then differ in ${first.where === "prompt" ? "what they were given" : "what was sampled"}`;
  const calls = [...new Set([first.call_a, first.call_b].filter(Boolean))].join(" and ");
  return h(
    "section",
    { "aria-label": "Tokens" },
    h("p", { class: "muted" }, `${same} (${calls}, token ${first.offset}).`),
    h("div", { class: "side-by-side" }, comparedTokens("A", a, first.a, first.call_a), comparedTokens("B", b, first.b, first.call_b)),
  );
}

/** @param {string} side @param {any} rollout @param {any} tokens @param {string | null} call */
function comparedTokens(side, rollout, tokens, call) {
  return h(
    "section",
    { class: "panel", "aria-label": `Tokens of ${side}` },
    h("p", { class: "pieces" }, (tokens.before ?? []).map((/** @type {Token} */ piece) => h("span", { class: "token" }, pieceText(piece))), h("span", { class: "token parted" }, tokens.piece ? pieceText(tokens.piece) : "(ends here)")),
    call ? h("a", { href: placeUrl(["rollouts", rollout.rollout_id, "tokens", call]) }, `${side}: tokens of ${call}`) : null,
  );
}

/** @typedef {{id: number, text: string | null}} Token */

/** The text of a token, or its id where the text is unknown. @param {Token} piece */
function pieceText(piece) {
  return piece.text ?? `⟨${piece.id}⟩`;
}

/** @param {any} comparison @param {AbortSignal} signal */
function messagesPanel({ a, b, messages }, signal) {
  if (!messages) return empty("The same messages", h("p", null, "Both transcripts have the same texts, tool calls and results."));
  const ids = [a.rollout_id, b.rollout_id];
  return [
    h("div", { class: "compared-row compared-head", "aria-hidden": "true" }, h("div", null, "A"), h("div", null, "B")),
    messages.rows.map((/** @type {Row} */ row) => rowElement(row, ids, signal)),
    messages.left ? h("p", { class: "muted" }, `${count(messages.left)} more differences are not shown.`) : null,
  ];
}

/** @param {Row} row @param {string[]} ids @param {AbortSignal} signal */
function rowElement(row, ids, signal) {
  if (row.kind === "same") return sameRow(row, ids[0], signal);
  if (row.kind === "shared") return h("div", { class: "shared-row" }, itemElement(row.a, ids[0]));
  const sides = row.a && row.b ? pairedItems(row, ids) : [row.a, row.b].map((item, index) => (item ? itemElement(item, ids[index]) : h("p", { class: "muted nothing" }, `nothing in ${"AB"[index]}`)));
  return h("div", { class: "compared-row differs", tabindex: -1 }, sides.map((side, index) => h("div", { class: row.a && row.b ? "" : index ? "only-new" : "only-gone", "aria-label": `Rollout ${"AB"[index]}` }, side)));
}

/** Items that both have, by their number; shown on demand. @param {Row} row @param {string} id @param {AbortSignal} signal */
function sameRow(row, id, signal) {
  const text = `${count(row.count)} ${row.count === 1 ? "entry is" : "entries are"} the same`;
  const button = h("button", { type: "button", class: "link", onclick: show }, text);
  const root = h("div", { class: "same-rows" }, button);
  async function show() {
    try {
      const { items } = await get(`rollouts/${id}/transcript`, { after: row.from, limit: row.to - row.from + 1 }, signal);
      fill(root, items.filter((/** @type {any} */ item) => item.kind !== "note").map((/** @type {any} */ item) => itemElement(item, id)));
    } catch (error) {
      if (!signal.aborted) fill(root, broken(error, show));
    }
  }
  return root;
}

/** Two items of one kind, with the words that differ. @param {Row} row @param {string[]} ids */
function pairedItems(row, ids) {
  const texts = [row.a, row.b].map((item) => item.text ?? argumentsText(item));
  const pieces = diffWords(texts[0], texts[1]);
  // Texts without a word in common are read more easily without marks.
  if (!pieces[0].some((piece) => !piece.differs && (piece.lines || /\S/.test(piece.text)))) return [row.a, row.b].map((item, index) => itemElement(item, ids[index]));
  return [row.a, row.b].map((item, index) => {
    const isProse = item.kind === "message" || item.kind === "thinking";
    return itemElement(item, ids[index], { body: h(isProse ? "div" : "pre", { class: "prose" }, markedText(pieces[index], index ? "new" : "gone")) });
  });
}

/** Arguments with their line breaks: a line for each, longer texts below their name. @param {any} item */
function argumentsText(item) {
  if (typeof item.arguments === "string") return item.arguments;
  return Object.entries(item.arguments ?? {}).map(([name, value]) => (typeof value === "string" ? (value.includes("\n") ? `${name}:\n${value}` : `${name}: ${value}`) : `${name}: ${JSON.stringify(value, null, 2)}`)).join("\n");
}

/** @param {string[]} ids @param {AbortSignal} signal */
async function filesPanel([a, b], signal) {
  const { changes, same, missing } = await get("compare/files", { a, b }, signal);
  if (!changes) return empty("No files to compare", h("p", null, `The work folder of ${missing.join(" and of ")} was not stored.`));
  const own = changes.filter((/** @type {any} */ change) => !change.generated);
  const generated = changes.length - own.length;
  const facts = [`${count(same)} ${same === 1 ? "file is" : "files are"} the same`, generated && `${count(generated)} generated differ`].filter(Boolean).join(", ");
  return [
    h("p", { class: "muted" }, own.length ? `From A to B: ${count(own.length)} ${own.length === 1 ? "file differs" : "files differ"}, ${facts}.` : `No file differs, ${facts}.`),
    own.map((/** @type {any} */ change) => h("div", { class: "differs" }, change.kind === "changed" ? null : h("p", { class: "muted" }, change.kind === "added" ? "only in B" : "only in A"), diffBlock(change))),
  ];
}
