/** One rollout: how it went, and a tab for each thing that is known of it. Live while it runs. */

import { address, get, isShared, live, post } from "./api.js";
import { announce, broken, copyable, empty, fill, h } from "./dom.js";
import { bytesText, count, dateTime, duration, modelName, outcomeText, rewardClass, rewardText } from "./format.js";
import { folded, message } from "./folded.js";
import { useKeys, walkKeys } from "./keys.js";
import { outcomeTag } from "./rollouts.js";
import { lastPlace, placeUrl } from "./router.js";
import { tagLink } from "./table.js";
import { openTagDialog } from "./ticked.js";
import { changesPanel } from "./changes.js";
import { graphPanel } from "./graph.js";
import { sandboxPanel } from "./sandbox.js";
import { stepPanel } from "./steps.js";
import { timelinePanel } from "./timeline.js";
import { tokensPanel } from "./tokens.js";
import { transcriptPanel } from "./transcript.js";
import { treePanel } from "./tree.js";

/**
 * What a tab is given.
 * @typedef {{id: string, rollout: any, calls: () => Promise<any[]>, place: import("./router.js").Place, signal: AbortSignal,
 *   onItems: (take: (items: any[]) => void) => void, onCalls: (take: (calls: any[]) => void) => void}} Scene
 */

const ANOTHER = "another";

/** What an outcome says of the rollout, in front of the reason. @type {Record<string, string>} */
const WHAT_BROKE = {
  task: "The task could not be run",
  agent: "The agent failed",
  model: "The model failed",
  sandbox: "The sandbox failed",
  environment: "The environment failed",
  verifier: "The verifier failed",
  timeout: "Out of time",
  budget: "The budget is used up",
  cancelled: "Stopped",
};

/** Tabs without keys of their own have `sections`: j and k go through them. @type {{name: string, title: string, sections?: string, draw: (scene: Scene) => Node | Promise<Node>}[]} */
const TABS = [
  { name: "transcript", title: "Transcript", draw: transcriptPanel },
  { name: "timeline", title: "Timeline", draw: timelinePanel },
  { name: "graph", title: "Calls", draw: graphPanel },
  { name: "tokens", title: "Tokens", draw: tokensPanel },
  { name: "tree", title: "Tree", draw: treePanel },
  { name: "verifier", title: "Verifier", sections: ".panel", draw: verifierPanel },
  { name: "files", title: "Files", sections: ".diff, .call-changes details", draw: changesPanel },
  { name: "sandbox", title: "Sandbox", sections: ".panel", draw: sandboxPanel },
  { name: "logs", title: "Logs", sections: ".panel", draw: logsPanel },
  { name: "config", title: "Configuration", sections: ".panel", draw: configPanel },
];

/** @param {import("./router.js").Place} place @param {AbortSignal} signal */
export async function rolloutView(place, signal) {
  const id = place.parts[1];
  const rollout = await get(`rollouts/${id}`, {}, signal);
  const activeTab = TABS.find((tab) => tab.name === place.parts[2]) ?? TABS[0];
  document.title = `${rollout.task_id} · Paddock`;
  const head = h("header", { class: "rollout-head" });
  const body = h("section", { class: "tab-body", "aria-label": activeTab.title }, h("p", { class: "muted" }, "Loading…"));

  /** @type {((items: any[]) => void)[]} */
  const itemTakers = [];
  /** @type {((calls: any[]) => void)[]} */
  const callTakers = [];
  /** @type {Promise<any[]> | null} */
  let calls = null;
  /** @type {Scene} */
  const scene = {
    id: rollout.rollout_id,
    rollout,
    place,
    signal,
    calls: () => (calls ??= get(`rollouts/${id}/calls`, {}, signal).then((result) => result.calls)),
    onItems: (take) => itemTakers.push(take),
    onCalls: (take) => callTakers.push(take),
  };
  function drawHead() {
    fill(head, headOf(rollout, drawTags));
  }
  async function drawTags() {
    rollout.tags = (await get(`rollouts/${id}`, {}, signal)).tags;
    drawHead();
  }
  drawHead();
  if (rollout.live) {
    live(
      `rollouts/${id}/live`,
      {
        items: (update) => itemTakers.forEach((take) => take(update.items)),
        calls: (update) => {
          calls = null;
          callTakers.forEach((take) => take(update.calls));
        },
        summary: (update) => {
          Object.assign(rollout, update);
          drawHead();
        },
        done: () => finish(),
      },
      signal,
    );
  }
  async function finish() {
    Object.assign(rollout, await get(`rollouts/${id}`, {}, signal), { live: false });
    drawHead();
    announce(`The rollout ended: ${outcomeText(rollout.outcome)}, reward ${rewardText(rollout.reward)}`);
  }
  /** @param {number} by */
  const tab = (by) => {
    const next = TABS[(TABS.indexOf(activeTab) + by + TABS.length) % TABS.length];
    location.hash = placeUrl(["rollouts", id, next.name]);
  };
  useKeys(
    [
      { keys: "l", does: "Next tab", run: () => tab(1) },
      { keys: "h", does: "Previous tab", run: () => tab(-1) },
      { keys: "u", does: "Back to all rollouts", run: () => (location.hash = lastPlace("rollouts")) },
    ],
    signal,
  );
  if (activeTab.sections) walkKeys(body, activeTab.sections, signal, { next: "j", previous: "k", what: activeTab.name === "files" ? "change" : "section" });
  Promise.resolve()
    .then(() => activeTab.draw(scene))
    .then((panel) => fill(body, panel))
    .catch((error) => signal.aborted || fill(body, broken(error)));
  const tabs = h("nav", { class: "tabs", "aria-label": "About this rollout" }, TABS.map((each) => h("a", { href: placeUrl(["rollouts", id, each.name]), "aria-current": each === activeTab ? "page" : null }, each.title)));
  requestAnimationFrame(() => showActive(tabs));
  return h("div", { class: "view rollout" }, head, tabs, body);
}

/** The active tab, where not all of them fit. @param {HTMLElement} tabs */
function showActive(tabs) {
  const active = /** @type {HTMLElement | null} */ (tabs.querySelector("[aria-current]"));
  if (active) tabs.scrollLeft = active.offsetLeft - tabs.offsetLeft - (tabs.clientWidth - active.offsetWidth) / 2;
}

/** @param {any} rollout @param {() => void} onTagged */
function headOf(rollout, onTagged) {
  const facts = [
    rollout.agent && `${rollout.agent}${rollout.driver && rollout.driver !== "run" ? ` (${rollout.driver})` : ""}`,
    modelName(rollout.model),
    rollout.image?.name ? `${rollout.sandbox} on ${rollout.image.name}` : rollout.sandbox,
    rollout.verifier?.mode && `${rollout.verifier.mode} verifier`,
    dateTime(rollout.started_at),
    duration(rollout.wall_s ?? Date.now() / 1000 - rollout.started_at),
    `${count(rollout.call_count ?? rollout.calls)} calls`,
    `${count((rollout.prompt_tokens ?? 0) + (rollout.completion_tokens ?? 0))} tokens`,
  ];
  const because = rollout.error ?? (rollout.reward === null && rollout.outcome ? rollout.reward_reason : null);
  const siblings = (rollout.siblings ?? []).filter((/** @type {any} */ each) => each.rollout_id !== rollout.rollout_id);
  const parts = Object.entries(rollout.reward_parts ?? {});
  const about = h("div", null,
    h("div", { class: "rollout-title" }, h("h1", null, rollout.task_id), outcomeTag(rollout), h("span", { class: `rollout-reward ${rewardClass(rollout.reward)}` }, `reward ${rewardText(rollout.reward)}`), rollout.live ? h("span", { class: "live-dot" }, "live") : null),
    h("p", { class: "muted" }, facts.filter(Boolean).join(" · ")),
    h("p", { class: "muted" }, h("span", { class: "mono" }, rollout.rollout_id), rollout.batch_id && !isShared ? [" · batch ", h("a", { href: placeUrl(["batches", rollout.batch_id]) }, rollout.batch_id)] : null, " ", isShared ? null : (rollout.tags ?? []).map(tagLink)),
    because ? h("p", null, h("strong", null, whatBroke(rollout)), h("span", { class: "error-text" }, because)) : null,
    parts.length ? h("p", { class: "reward-parts" }, parts.map(([name, value]) => h("span", null, h("span", { class: "muted" }, `${name} `), h("strong", { class: rewardClass(Number(value)) }, rewardText(Number(value)))))) : null,
  );
  return [
    about,
    isShared ? null : h("div", { class: "actions" }, rollout.live ? abortButton(rollout.rollout_id) : null, shareLink(rollout.rollout_id), h("button", { type: "button", onclick: () => openTagDialog([rollout.rollout_id], onTagged) }, "Tags…"), compareChoice(rollout.rollout_id, siblings)),
  ];
}

/** @param {any} rollout */
function whatBroke(rollout) {
  return rollout.outcome === "ok" ? "No reward: " : rollout.outcome ? `${WHAT_BROKE[rollout.outcome] ?? rollout.outcome}: ` : "";
}

/** @param {string} id */
function abortButton(id) {
  const button = h("button", { type: "button", class: "danger", onclick: abort }, "Abort");
  async function abort() {
    button.disabled = true;
    try {
      await post(`rollouts/${id}/abort`);
      button.textContent = "Aborting…";
    } catch (error) {
      button.disabled = false;
      button.after(broken(error));
    }
  }
  return button;
}

/** @param {string} id */
function shareLink(id) {
  return h("a", { class: "button", href: address(`rollouts/${id}/share`, {}), download: `${id}.html` }, "Save as one file");
}

/** @param {string} id @param {any[]} siblings */
function compareChoice(id, siblings) {
  const go = (/** @type {any} */ event) => event.target.value && (location.hash = placeUrl(["compare", id, ...(event.target.value === ANOTHER ? [] : [event.target.value])]));
  return h(
    "select",
    { "aria-label": "Compare with another rollout", onchange: go },
    h("option", { value: "" }, "Compare with…"),
    siblings.map((each) => h("option", { value: each.rollout_id }, `${each.rollout_id.slice(0, 24)} · ${each.outcome ? outcomeText(each.outcome) : each.stage} · ${rewardText(each.reward)}`)),
    h("option", { value: ANOTHER }, "another rollout…"),
  );
}

/** @param {Scene} scene */
function verifierPanel({ rollout }) {
  const { stdout = "", stderr = "", exit_code: code = null, mode = "", reason = "" } = rollout.verifier ?? {};
  const scores = (rollout.scores ?? []).map((/** @type {any} */ score) =>
    h("tr", null, h("td", null, dateTime(score.at)), h("td", { class: "number" }, rewardText(score.reward)), h("td", null, score.reason ?? ""), h("td", null, score.note ?? "")),
  );
  if (!stdout && !stderr && !rollout.outcome && !rollout.steps?.length) return empty("The verifier has not run yet", h("p", null, "It runs in a sandbox of its own once the agent is done."));
  if (!stdout && !stderr && code === null && !scores.length && !rollout.steps?.length) return empty("Not verified", h("p", null, rollout.reward_reason || "The rollout ended before its work could be scored."));
  return h(
    "div",
    { class: "stack" },
    stepPanel(rollout.steps ?? []),
    h("p", null, "Reward ", h("strong", { class: rewardClass(rollout.reward) }, rewardText(rollout.reward)), rollout.reward_reason ? ` (${rollout.reward_reason})` : "", code === null || code === undefined ? "" : `, the tests ended with ${code}`),
    mode ? h("p", { class: "muted" }, `Mode ${mode}${reason ? `: ${reason}` : ""}`) : null,
    logBlock("What it printed", stdout),
    stderr ? logBlock("Errors it printed", stderr) : null,
    scores.length ? h("div", { class: "panel" }, h("h2", null, "Verified again"), h("table", { class: "plain" }, h("thead", null, h("tr", null, ["When", "Reward", "Reason", "Note"].map((title) => h("th", { scope: "col" }, title)))), h("tbody", null, scores))) : null,
  );
}

/** @param {Scene} scene */
function logsPanel({ rollout }) {
  const logs = rollout.logs ?? {};
  const names = { agent: "The agent", proxy: "The capture proxy", install: "Installing" };
  const printed = Object.entries(names).filter(([name]) => logs[name]);
  if (!printed.length) return empty("No logs", h("p", null, rollout.live ? "They are kept when the rollout ends." : "Nothing was printed."));
  return h("div", { class: "stack" }, printed.map(([name, title]) => logBlock(title, logs[name])));
}

/** @param {string} title @param {string} text */
function logBlock(title, text) {
  return h("section", { class: "panel" }, h("h2", null, title, h("span", { class: "muted" }, `  ${bytesText(text.length)}`)), text ? folded(text) : h("p", { class: "muted" }, "(nothing)"));
}

/** @param {Scene} scene */
function configPanel({ rollout }) {
  return h(
    "div",
    { class: "stack" },
    h("section", { class: "panel" }, h("h2", null, "Run this again"), copyable(rollout.rerun ?? "")),
    h("section", { class: "panel" }, h("h2", null, "Instruction"), message(rollout.instruction ?? "")),
    h("section", { class: "panel" }, h("h2", null, "Configuration"), h("pre", { tabindex: 0 }, JSON.stringify(rollout.config, null, 2))),
    Object.keys(rollout.metadata ?? {}).length ? h("section", { class: "panel" }, h("h2", null, "Metadata"), h("pre", { tabindex: 0 }, JSON.stringify(rollout.metadata, null, 2))) : null,
  );
}
