/** The tree of a rollout: one row for each branch, its calls as a line, and its reward at the end. */

import { get, isShared } from "./api.js";
import { empty, h } from "./dom.js";
import { outcomeText, rewardClass, rewardText } from "./format.js";
import { outcomeTag } from "./rollouts.js";
import { placeUrl } from "./router.js";

const ROW = 44;
const RADIUS = 6;

/**
 * @typedef {{rollout_id: string, parent: string | null, at: number | null, replayed: number | null, edit: string[], is_pruned: boolean,
 *   outcome: string | null, stage: string | null, reward: number | null, calls: number | null, model: string | null}} Branch
 */

/** @param {import("./rollout.js").Scene} scene */
export async function treePanel({ id, signal }) {
  /** @type {{branches: Branch[]}} */
  const { branches } = await get(`rollouts/${id}/tree`, {}, signal);
  if (branches.length < 2) return empty("No forks", h("p", null, "Fork this rollout at one of its calls: ", h("code", null, `paddock rollout fork ${id} --at c1 -n 4`)));
  const compare = h("button", { type: "button", disabled: true, onclick: () => (location.hash = placeUrl(["compare", ...chosen])) }, "Compare two");
  /** @type {string[]} */
  const chosen = [];
  /** @param {string} name @param {boolean} on */
  const choose = (name, on) => {
    if (on) chosen.push(name);
    else chosen.splice(chosen.indexOf(name), 1);
    compare.disabled = chosen.length !== 2;
  };
  const scored = branches.filter((branch) => branch.reward !== null);
  const best = scored.length ? Math.max(...scored.map((branch) => Number(branch.reward))) : null;
  return h(
    "section",
    { class: "panel tree" },
    h("div", { class: "group-head" }, h("h2", null, `${branches.length} rollouts`), h("span", null, best === null ? "none is scored" : `best reward ${rewardText(best)}`), isShared ? null : compare),
    h("p", { class: "muted" }, "A line begins at the call where the branch leaves its parent. The dot at its end has the colour of the reward."),
    h(
      "div",
      { class: "scroll-x" },
      h(
        "table",
        { class: "branches" },
        h("thead", null, h("tr", null, isShared ? null : h("th", null, h("span", { class: "visually-hidden" }, "Compare")), h("th", null, "Rollout"), h("th", null, "Calls"), h("th", null, "Outcome"), h("th", { class: "number" }, "Reward"))),
        h("tbody", null, branches.map((branch, row) => branchRow(branch, branches, row, id, choose))),
      ),
    ),
  );
}

/** @param {Branch} branch @param {Branch[]} branches @param {number} row @param {string} current @param {(name: string, on: boolean) => void} choose */
function branchRow(branch, branches, row, current, choose) {
  const isCurrent = branch.rollout_id === current;
  const name = h("span", { class: "mono" }, branch.rollout_id);
  return h(
    "tr",
    { class: isCurrent ? "selected" : "", "aria-current": isCurrent ? "true" : null },
    isShared ? null : h("td", null, branch.is_pruned ? null : h("input", { type: "checkbox", "aria-label": `Compare ${branch.rollout_id}`, onchange: (/** @type {any} */ event) => choose(branch.rollout_id, event.target.checked) })),
    h("td", { class: "branch-name" }, branch.is_pruned || isShared || isCurrent ? name : h("a", { href: placeUrl(["rollouts", branch.rollout_id, "tree"]) }, name), h("div", { class: "muted" }, placeText(branch, isCurrent))),
    row === 0 ? h("td", { class: "track", rowspan: branches.length }, lines(branches)) : null,
    h("td", null, branch.is_pruned ? h("span", { class: "muted" }, "pruned") : outcomeTag(branch)),
    h("td", { class: `number ${rewardClass(branch.reward)}` }, rewardText(branch.reward)),
  );
}

/** @param {Branch} branch @param {boolean} isCurrent */
function placeText(branch, isCurrent) {
  const from = branch.parent === null ? "the first one" : branch.at === null ? "continues its parent" : `from c${branch.at}${branch.edit.length ? ", edited" : ""}`;
  return isCurrent ? `${from} · this one` : from;
}

/** Where a branch begins, as the number of calls before it. @param {Branch} branch */
function startOf(branch) {
  return branch.at ?? branch.replayed ?? 0;
}

/** All lines as one picture: of each branch from its first own call to its last, and from its parent down to it. @param {Branch[]} branches */
function lines(branches) {
  const most = Math.max(1, ...branches.map((branch) => Math.max(branch.calls ?? 0, startOf(branch) + 1)));
  /** @param {number} calls */
  const x = (calls) => `${8 + (84 * calls) / most}%`;
  const rows = new Map(branches.map((branch, row) => [branch.rollout_id, row]));
  const height = branches.length * ROW;
  return h(
    "svg",
    { width: "100%", height, role: "img", "aria-label": `The calls of ${branches.length} rollouts, from left to right` },
    branches.map((branch, row) => {
      const y = row * ROW + ROW / 2;
      const start = startOf(branch);
      const end = Math.max(branch.calls ?? start, start);
      const above = branch.parent === null ? undefined : rows.get(branch.parent);
      return h(
        "g",
        { class: `branch ${rewardClass(branch.reward)}` },
        above === undefined ? null : h("line", { class: "fork", x1: x(start), x2: x(start), y1: above * ROW + ROW / 2, y2: y }),
        h("line", { class: branch.is_pruned ? "fork" : "calls", x1: x(start), x2: x(end), y1: y, y2: y }),
        Array.from({ length: Math.min(end - start, 200) }, (_, number) => h("circle", { class: "call", cx: x(start + number), cy: y, r: 2 })),
        branch.is_pruned ? null : h("circle", { class: "leaf", cx: x(end), cy: y, r: RADIUS }, h("title", null, `${branch.rollout_id}: ${branch.outcome ? outcomeText(branch.outcome) : branch.stage}, reward ${rewardText(branch.reward)}`)),
      );
    }),
  );
}

