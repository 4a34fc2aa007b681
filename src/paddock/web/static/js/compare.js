/** Two rollouts of a group next to each other, and the place where they first differ. */

import { get } from "./api.js";
import { empty, h } from "./dom.js";
import { count, duration, rewardClass, rewardText } from "./format.js";
import { outcomeTag } from "./rollouts.js";
import { placeUrl } from "./router.js";
import { itemElement } from "./items.js";

/** @param {import("./router.js").Place} place @param {AbortSignal} signal */
export async function compareView(place, signal) {
  const [, a, b] = place.parts;
  if (!a || !b) return empty("Choose two rollouts", h("p", null, "Open a rollout and choose another of its group, or tick two under Groups."), h("a", { href: "#/groups" }, "Groups"));
  const comparison = await get("compare", { a, b }, signal);
  return h(
    "div",
    { class: "view" },
    h("h1", null, "Where two rollouts part"),
    h("p", { class: "muted" }, comparison.first ? `Both went the same way for ${count(comparison.first.shared_tokens)} tokens, then differ in ${comparison.first.where === "prompt" ? "what they were given" : "what was sampled"} (${comparison.first.call_a} and ${comparison.first.call_b}, token ${comparison.first.offset}).` : "Token for token the same."),
    h("div", { class: "side-by-side" }, comparedSide(comparison, "a"), comparedSide(comparison, "b")),
  );
}

/** @param {any} comparison @param {"a" | "b"} side */
function comparedSide(comparison, side) {
  const rollout = comparison[side];
  const tokens = comparison.first?.[side];
  const call = comparison.first?.[`call_${side}`];
  const following = comparison.messages?.after[side] ?? [];
  const left = comparison.messages?.left[side] ?? 0;
  return h(
    "section",
    { class: "panel", "aria-label": rollout.rollout_id },
    h("div", { class: "member-head" }, outcomeTag(rollout), h("strong", { class: rewardClass(rollout.reward) }, `reward ${rewardText(rollout.reward)}`)),
    h("p", null, h("a", { class: "mono", href: placeUrl(["rollouts", rollout.rollout_id]) }, rollout.rollout_id)),
    h("p", { class: "muted" }, `${rollout.agent} · ${rollout.model} · ${count(rollout.calls)} calls · ${duration(rollout.wall_s)}`),
    tokens ? [h("h2", null, "Tokens where they part"), h("p", { class: "pieces" }, (tokens.before ?? []).map((/** @type {Piece} */ piece) => h("span", { class: "token" }, pieceText(piece))), h("span", { class: "token parted" }, tokens.piece ? pieceText(tokens.piece) : "(ends here)")), call ? h("a", { href: placeUrl(["rollouts", rollout.rollout_id, "tokens", call]) }, `tokens of ${call}`) : null] : null,
    comparison.messages ? [h("h2", null, "From where they differ"), following.length ? following.map((/** @type {any} */ item) => itemElement(item, rollout.rollout_id)) : h("p", { class: "muted" }, "It ends here."), left ? h("p", { class: "muted" }, `${count(left)} more in its transcript.`) : null] : null,
  );
}

/** @typedef {{id: number, text: string | null}} Piece */

/** The text of a token, or its id where the text is unknown. @param {Piece} piece */
function pieceText(piece) {
  return piece.text ?? `⟨${piece.id}⟩`;
}
