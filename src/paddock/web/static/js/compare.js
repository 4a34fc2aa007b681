/** Two rollouts of a group next to each other, and the place where they first differ. */

import { get } from "./api.js";
import { empty, h } from "./dom.js";
import { count, duration, rewardText } from "./format.js";
import { outcomeTag } from "./rollouts.js";
import { placeUrl } from "./router.js";

/** @param {import("./router.js").Place} place @param {AbortSignal} signal */
export async function compareView(place, signal) {
  const [, a, b] = place.parts;
  if (!a || !b) return empty("Choose two rollouts", h("p", null, "Open a rollout and choose another of its group, or tick two under Groups."), h("a", { href: "#/groups" }, "Groups"));
  const comparison = await get("compare", { a, b }, signal);
  return h(
    "div",
    { class: "view" },
    h("h1", null, "Where two rollouts part"),
    h("p", { class: "muted" }, comparison.first ? `Both went the same way for ${count(comparison.same_prompt_tokens)} tokens, then differ in ${comparison.first.where === "prompt" ? "what they were given" : "what was sampled"} (${comparison.first.call_a} and ${comparison.first.call_b}, token ${comparison.first.offset}).` : "Token for token the same."),
    h("div", { class: "side-by-side" }, comparedSide(comparison.a, comparison.first?.call_a, comparison.first?.a, comparison.messages?.a), comparedSide(comparison.b, comparison.first?.call_b, comparison.first?.b, comparison.messages?.b)),
  );
}

/** @param {any} rollout @param {string | undefined} call @param {any} tokens @param {any} message */
function comparedSide(rollout, call, tokens, message) {
  return h(
    "section",
    { class: "panel", "aria-label": rollout.rollout_id },
    h("div", { class: "member-head" }, outcomeTag(rollout), h("strong", null, `reward ${rewardText(rollout.reward)}`)),
    h("p", null, h("a", { class: "mono", href: placeUrl(["rollouts", rollout.rollout_id]) }, rollout.rollout_id)),
    h("p", { class: "muted" }, `${rollout.agent} · ${rollout.model} · ${count(rollout.calls)} calls · ${duration(rollout.wall_s)}`),
    tokens ? [h("h2", null, "Tokens where they part"), h("p", { class: "pieces" }, (tokens.before ?? []).map((/** @type {string | null} */ piece) => h("span", { class: "token" }, piece ?? "⟨?⟩")), h("span", { class: "token parted" }, tokens.piece ?? "(ends here)")), call ? h("a", { href: placeUrl(["rollouts", rollout.rollout_id, "tokens", call]) }, `tokens of ${call}`) : null] : null,
    message ? [h("h2", null, "What was different first"), h("p", { class: "muted" }, message.kind === "tool_call" ? `Tool ${message.name}` : message.kind), h("pre", { tabindex: 0 }, message.text ?? JSON.stringify(message.arguments ?? message, null, 2))] : null,
  );
}
