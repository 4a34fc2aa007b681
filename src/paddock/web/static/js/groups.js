/** Groups: the rollouts of one task in one batch, side by side. */

import { get } from "./api.js";
import { broken, empty, fill, h } from "./dom.js";
import { count, dateTime, duration, rewardClass, rewardText } from "./format.js";
import { useKeys } from "./keys.js";
import { sparkBars } from "./plot.js";
import { outcomeTag } from "./rollouts.js";
import { placeUrl } from "./router.js";

const GROUPS_A_PAGE = 20;

/** @param {import("./router.js").Place} place @param {AbortSignal} signal */
export async function groupsView(place, signal) {
  const filters = { task: place.query.get("task") ?? "", batch: place.query.get("batch") ?? "" };
  const list = h("div", { class: "group-list" });
  const more = h("button", { type: "button", onclick: load }, "Show more groups");
  const problem = h("div");
  let offset = 0;
  async function load() {
    fill(problem);
    try {
      const page = await get("groups", { ...filters, offset, limit: GROUPS_A_PAGE }, signal);
      list.append(...page.groups.map(groupPanel));
      offset += page.groups.length;
      more.hidden = offset >= page.total;
      if (!page.total) fill(list, empty("No groups yet", h("p", null, "Rollouts of the same task in one batch form a group: run a task several times with -n 4.")));
    } catch (error) {
      if (signal.aborted) return;
      fill(problem, broken(error, load));
      more.hidden = true;
    }
  }
  await load();
  useKeys([{ keys: "m", does: "Show more groups", run: () => more.hidden || load() }], signal);
  const narrowed = Object.entries(filters).filter(([, value]) => value);
  return h(
    "div",
    { class: "view" },
    h("h1", null, "Groups"),
    narrowed.length ? h("p", { class: "muted" }, `Only ${narrowed.map(([name, value]) => `${name} ${value}`).join(", ")}. `, h("a", { href: "#/groups" }, "Show all")) : null,
    list,
    problem,
    more,
  );
}

/** @param {any} group */
function groupPanel(group) {
  /** @type {string[]} */
  const chosen = [];
  const compare = h("button", { type: "button", class: "small", disabled: true, onclick: () => (location.hash = placeUrl(["compare", ...chosen])) }, "Compare two");
  /** @param {string} id @param {boolean} on */
  function choose(id, on) {
    if (on) chosen.push(id);
    else chosen.splice(chosen.indexOf(id), 1);
    compare.disabled = chosen.length !== 2;
  }
  return h(
    "section",
    { class: "panel group", "aria-label": `Group ${group.task_id}` },
    h(
      "div",
      { class: "group-head" },
      h("h2", null, group.task_id),
      h("span", { class: "muted" }, "batch ", h("a", { href: placeUrl(["batches", group.batch_id]) }, group.batch_id)),
      h("span", null, `mean ${rewardText(group.mean)} of ${count(group.scored)} scored`),
      sparkBars(group.members.map((/** @type {any} */ member) => member.reward), { label: "Rewards of the group" }),
      compare,
    ),
    h("div", { class: "members" }, group.members.map((/** @type {any} */ member) => memberCard(member, choose))),
  );
}

/** @param {any} member @param {(id: string, on: boolean) => void} choose */
function memberCard(member, choose) {
  return h(
    "div",
    { class: "card member" },
    h(
      "div",
      { class: "member-head" },
      h("input", { type: "checkbox", "aria-label": `Choose ${member.rollout_id} to compare`, onchange: (/** @type {any} */ event) => choose(member.rollout_id, event.target.checked) }),
      outcomeTag(member),
      h("span", { class: `figure ${rewardClass(member.reward)}` }, rewardText(member.reward)),
    ),
    h("a", { href: placeUrl(["rollouts", member.rollout_id]) }, member.rollout_id),
    h("p", { class: "muted" }, `${member.agent} · ${count(member.calls)} calls · ${count((member.prompt_tokens ?? 0) + (member.completion_tokens ?? 0))} tokens · ${duration(member.wall_s)}`),
    h("p", { class: "muted" }, dateTime(member.started_at)),
    member.error ? h("p", { class: "error-text" }, member.error) : null,
  );
}
