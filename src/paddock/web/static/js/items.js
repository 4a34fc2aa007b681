/** The entries of a transcript as elements. Text of an agent becomes text: Markdown is built from nodes, HTML is never parsed. */

import { diffBlock } from "./diff.js";
import { h } from "./dom.js";
import { folded, message } from "./folded.js";
import { clockTime, count, duration, outcomeText, shorten } from "./format.js";
import { codeBlock } from "./markdown.js";
import { placeUrl } from "./router.js";

const RASTER = ["image/png", "image/jpeg", "image/gif", "image/webp"];
const USUAL_ROLES = ["agent", "system", "user", "assistant", "tool"];
/** Longer thoughts are opened by a click. */
const SHORT_THOUGHT = 400;
/** Arguments that are a program for a shell, and those that only describe it. */
const COMMANDS = ["command", "cmd", "script"];

/**
 * One entry.
 * @param {any} item
 * @param {string} id of its rollout
 * @param {{asSource?: boolean, body?: Node | null}} [options] messages as they were sent, without Markdown; another body
 */
export function itemElement(item, id, { asSource = false, body: other = null } = {}) {
  const { title, body, kind } = described(item, asSource);
  const side = item.role && !USUAL_ROLES.includes(item.role) ? item.role : item.label && !["agent", "main"].includes(item.label) ? item.label : null;
  return h(
    "article",
    { class: `item ${kind}`, dataset: { call: item.call ?? "", ...(item.kind === "tool_call" ? { tool: item.id } : {}) }, tabindex: -1, "aria-label": title },
    h(
      "header",
      { class: "item-head" },
      h("span", { class: "item-title" }, title),
      side ? h("span", { class: "tag side" }, side) : null,
      item.edited ? h("span", { class: "tag side", title: "The agent sent it back otherwise than it was sampled." }, "edited") : null,
      item.call ? h("a", { class: "muted", href: placeUrl(["rollouts", id, "tokens", item.call]), title: `Tokens of ${item.call}` }, item.call) : null,
      item.seconds === undefined || item.seconds === null ? null : h("span", { class: "muted" }, duration(item.seconds)),
      item.at ? h("time", { class: "muted" }, clockTime(item.at)) : null,
    ),
    other ?? body,
  );
}

/** @param {any} item @param {boolean} asSource @returns {{title: string, kind: string, body: any}} */
function described(item, asSource) {
  switch (item.kind) {
    case "message":
      return { title: item.role === "assistant" || item.role === "agent" ? "Agent" : item.role === "system" ? "System" : "User", kind: `said-${item.role === "agent" ? "assistant" : item.role}`, body: item.role === "system" ? closed(item.text, "system prompt", asSource) : message(item.text, asSource) };
    case "thinking":
      return { title: "Thinking", kind: "thought", body: item.text.length < SHORT_THOUGHT ? message(item.text, asSource) : closed(item.text, "thought", asSource) };
    case "tool_call":
      return { title: `Tool ${item.name}`, kind: "tool", body: item.changes ? item.changes.map(diffBlock) : argumentsElement(item.arguments) };
    case "tool_result":
      return { title: item.error ? `Result of ${item.name || "tool"}: failed` : `Result of ${item.name || "tool"}`, kind: item.error ? "result failed" : "result", body: item.text ? folded(item.text, item.length) : h("p", { class: "muted" }, "(nothing)") };
    case "image":
      return { title: "Image", kind: "image", body: picture(item) };
    case "event":
      return { title: "Now", kind: "now", body: message(item.text ?? (item.tool ? `${item.tool} …` : JSON.stringify(item.data ?? {})), true) };
    default:
      return { title: "Note", kind: "note", body: note(item) };
  }
}

/** @param {any} item */
function note(item) {
  if (item.note === "warning") return h("p", { class: "error-text" }, `warning: ${item.text}`);
  if (item.note === "error") return h("p", { class: "error-text" }, item.text);
  return h("p", { class: "muted" }, noteText(item));
}

/** What a note says, with outcomes in the words of the page. @param {any} item */
export function noteText(item) {
  return item.note === "outcome" ? `outcome: ${outcomeText(String(item.text).replace(/^outcome: /, ""))}` : String(item.text ?? "");
}

/** Known raster types only, from data that is in the item: nothing is ever fetched for it. @param {any} item */
export function picture(item) {
  if (!RASTER.includes(item.mime) || !/^[A-Za-z0-9+/=\s]*$/.test(item.data ?? "")) return h("p", { class: "muted" }, `An image of type ${item.mime}, which is not shown.`);
  return h("img", { src: `data:${item.mime};base64,${item.data}`, alt: "Image in the conversation", loading: "lazy" });
}

/** The command of a tool as a program, what else it was given below it. @param {any} value */
function argumentsElement(value) {
  if (typeof value === "string") return /^\*\*\* Begin Patch/.test(value) ? codeBlock(value, "diff") : folded(value);
  const parts = Object.entries(value ?? {});
  const [name, command] = parts.find(([key, each]) => COMMANDS.includes(key) && typeof each === "string") ?? [];
  const rest = parts.filter(([key]) => key !== name);
  const facts = rest.map(([key, each]) => `${key}: ${typeof each === "string" ? each : JSON.stringify(each)}`);
  if (command !== undefined) return h("div", null, codeBlock(String(command), "sh"), facts.length ? h("p", { class: "muted arguments" }, shorten(facts.join(" · "), 300)) : null);
  if (facts.length && facts.every((fact) => fact.length < 200 && !fact.includes("\n"))) return h("p", { class: "arguments mono" }, facts.join(" · "));
  return parts.length ? folded(JSON.stringify(value, null, 2)) : h("p", { class: "muted" }, "without arguments");
}

/** A text that is opened by a click; its nodes are made then. @param {string} text @param {string} what @param {boolean} asSource */
function closed(text, what, asSource) {
  const fold = h(
    "details",
    { ontoggle: () => fold.open && fold.childElementCount === 1 && fold.append(message(text, asSource)) },
    h("summary", { class: "muted" }, `${what}, ${count(text.length)} characters: ${shorten(text.replace(/\s+/g, " ").trim(), 100)}`),
  );
  return fold;
}
