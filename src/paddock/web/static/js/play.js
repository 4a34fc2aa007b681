/** Play: act in the served environment by hand, in a session of one's own. */

import { announce, broken, copyable, empty, fill, h } from "./dom.js";
import { clockTime, rewardText } from "./format.js";
import { FieldError, schemaForm } from "./forms.js";
import { useKeys } from "./keys.js";
import { linePlot } from "./plot.js";
import { episodeAsPython } from "./python.js";
import { EnvironmentSession, Refused } from "./session.js";
import { picture } from "./items.js";

const MOST_FRAMES = 500;
const FRAME_TEXT = 20_000;

/** @typedef {{kind: "reset" | "step", sent: any, data: any}} Turn */

/** @param {import("./router.js").Place} place @param {AbortSignal} signal */
export async function playView(place, signal) {
  const [schema, metadata] = await Promise.all([fetchJson("../schema", signal), fetchJson("../metadata", signal)]);
  const isTools = schema.action?.properties?.tool_name !== undefined;
  /** @type {Turn[]} */
  const turns = [];
  /** @type {import("./session.js").Frame[]} */
  const frames = [];
  const state = h("span", { class: "muted", role: "status" }, "no session yet");
  const history = h("ol", { class: "turns", "aria-label": "Episode" });
  const rewards = h("div");
  const wire = h("div", { class: "wire", tabindex: 0, "aria-label": "Messages on the wire" });
  const python = h("div");
  const problem = h("div");
  const session = new EnvironmentSession(
    (frame) => {
      frames.push(frame);
      if (frames.length > MOST_FRAMES) wire.firstChild?.remove();
      wire.appendChild(frameElement(frame));
      wire.scrollTop = wire.scrollHeight;
    },
    (now) => (state.textContent = now === "connected" ? "your own session is open" : now),
  );
  signal.addEventListener("abort", () => session.close());

  const resetForm = schemaForm(schema.reset ?? {});
  const actions = h("div", { class: "actions-area" });

  /** @param {Turn} turn */
  function record(turn) {
    if (turn.kind === "reset") {
      turns.length = 0;
      fill(history);
    }
    turns.push(turn);
    history.appendChild(turnElement(turn, turns.filter((each) => each.kind === "step").length));
    history.lastElementChild?.scrollIntoView({ block: "nearest" });
    fill(rewards, rewardPlot(turns));
    fill(python, copyable(episodeAsPython(location.origin + new URL("..", location.href).pathname.replace(/\/$/, ""), turns, isTools), "Copy"));
    announce(`${turn.kind} done, reward ${rewardText(turn.data.reward)}${turn.data.done ? ", the episode is over" : ""}`);
  }

  /** @param {import("./forms.js").Form} form @param {() => Promise<void>} work */
  async function attempt(form, work) {
    fill(problem);
    form.complain([]);
    try {
      await work();
    } catch (error) {
      if (error instanceof FieldError) form.complain([{ path: error.path, message: error.message }]);
      else if (error instanceof Refused && error.problems.length) form.complain(error.problems);
      else fill(problem, broken(error));
    }
  }

  async function reset() {
    await attempt(resetForm, async () => {
      const sent = resetForm.read();
      record({ kind: "reset", sent, data: await session.ask("reset", sent) });
      if (isTools && !actions.firstChild) await drawTools();
    });
  }

  /** @param {any} action */
  async function step(action) {
    record({ kind: "step", sent: action, data: await session.ask("step", action) });
  }

  async function drawTools() {
    const listed = await session.ask("mcp", { jsonrpc: "2.0", id: 1, method: "tools/list", params: {} });
    const tools = listed.result?.tools ?? [];
    fill(actions, tools.length ? tools.map(toolForm) : empty("This environment offers no tools"));
  }

  /** @param {any} tool */
  function toolForm(tool) {
    const form = schemaForm(tool.inputSchema ?? tool.input_schema ?? {});
    const run = () =>
      attempt(form, async () => {
        const data = { type: "call_tool", tool_name: tool.name, arguments: form.read() };
        await step(data);
        const failure = turns[turns.length - 1].data.observation?.error;
        if (failure?.error_type === "invalid_args") form.complain([{ path: fieldIn(failure.message, tool), message: failure.message }]);
      });
    return h("form", { class: "panel", onsubmit: (/** @type {Event} */ event) => (event.preventDefault(), run()) }, h("h3", null, tool.name), tool.description ? h("p", { class: "muted" }, tool.description) : null, form.element, h("button", { class: "primary" }, "Call"));
  }

  if (!isTools) {
    const form = schemaForm(schema.action ?? {}, { hide: ["metadata"] });
    const act = () => attempt(form, async () => step(form.read()));
    actions.appendChild(h("form", { class: "panel", onsubmit: (/** @type {Event} */ event) => (event.preventDefault(), act()) }, h("h3", null, schema.action?.title ?? "Action"), schema.action?.description ? h("p", { class: "muted" }, schema.action.description) : null, form.element, h("button", { class: "primary" }, "Step")));
  } else drawTools().catch((error) => fill(problem, broken(error)));

  useKeys([{ keys: "r", does: "Reset the episode", run: reset }], signal);
  return h(
    "div",
    { class: "view wide" },
    h("div", { class: "play-head" }, h("h1", null, metadata.name ?? "Environment"), metadata.version ? h("span", { class: "muted" }, metadata.version) : null, state),
    metadata.description ? h("p", { class: "muted" }, metadata.description) : null,
    problem,
    h(
      "div",
      { class: "play-layout" },
      h("div", { class: "stack" }, h("form", { class: "panel", onsubmit: (/** @type {Event} */ event) => (event.preventDefault(), reset()) }, h("h3", null, "Reset"), resetForm.element, h("button", { class: "primary" }, "Reset")), actions, h("button", { type: "button", onclick: () => showState(session, problem) }, "Look at the state")),
      h("div", { class: "stack" }, h("section", { class: "panel", "aria-label": "Rewards" }, h("h2", null, "Sum of rewards"), rewards), h("section", { class: "panel", "aria-label": "Episode" }, h("h2", null, "Episode"), turnsHint(history)), h("section", { class: "panel" }, h("h2", null, "The same episode in Python"), python)),
      h("section", { class: "panel", "aria-label": "Wire" }, h("h2", null, "On the wire"), wire),
    ),
  );
}

/** @param {HTMLElement} history */
function turnsHint(history) {
  return [h("p", { class: "muted turns-empty" }, "Reset begins an episode."), history];
}

/** @param {string} path @param {AbortSignal} signal */
async function fetchJson(path, signal) {
  const answer = await fetch(path, { signal, credentials: "same-origin" });
  if (!answer.ok) throw new Error(`${path} answered ${answer.status}`);
  return answer.json();
}

/** @param {EnvironmentSession} session @param {Element} place */
async function showState(session, place) {
  try {
    const state = await session.ask("state");
    fill(place, h("section", { class: "panel" }, h("h2", null, "State"), h("pre", { tabindex: 0 }, JSON.stringify(state, null, 2))));
  } catch (error) {
    fill(place, broken(error));
  }
}

/** The argument that a message is about, if it names one. @param {string} message @param {any} tool */
function fieldIn(message, tool) {
  const names = Object.keys((tool.inputSchema ?? tool.input_schema)?.properties ?? {});
  const match = names.find((name) => new RegExp(`(^|[^\\w])${name.replace(/[^\w]/g, ".")}([^\\w]|$)`).test(message));
  return match ? [match] : [];
}

/** @param {Turn[]} turns */
function rewardPlot(turns) {
  const steps = turns.filter((turn) => turn.kind === "step");
  if (!steps.some((turn) => typeof turn.data.reward === "number")) return h("p", { class: "muted" }, "No reward yet.");
  let sum = 0;
  const data = steps.map((turn, index) => ({ x: index + 1, y: (sum += Number(turn.data.reward ?? 0)) }));
  return linePlot(data, { label: "Sum of rewards over the steps", height: 120, yLow: Math.min(0, ...data.map((each) => each.y)), xText: (x) => `step ${x}` });
}

/** @param {Turn} turn @param {number} index */
function turnElement(turn, index) {
  const { observation, reward, done } = turn.data;
  return h(
    "li",
    { class: "turn" },
    h("div", { class: "item-head" }, h("span", { class: "item-title" }, turn.kind === "reset" ? "Reset" : `Step ${index}`), h("span", { class: "muted" }, `reward ${rewardText(typeof reward === "number" ? reward : null)}`), done ? h("span", { class: "tag outcome-ok" }, "done") : null),
    turn.kind === "step" ? h("pre", { tabindex: 0 }, JSON.stringify(turn.sent)) : null,
    pictures(observation),
    h("pre", { tabindex: 0 }, JSON.stringify(withoutPictures(observation), null, 2)),
  );
}

/** Images anywhere in an observation: `{"mimeType": …, "data": …}`, or a data: address. @param {any} value @returns {any[]} */
function pictures(value) {
  if (typeof value === "string") {
    const match = /^data:(image\/[a-z]+);base64,(.*)$/s.exec(value);
    return match ? [picture({ mime: match[1], data: match[2] })] : [];
  }
  if (!value || typeof value !== "object") return [];
  const mime = value.mimeType ?? value.mime_type ?? value.mime;
  if (typeof mime === "string" && mime.startsWith("image/") && typeof value.data === "string") return [picture({ mime, data: value.data })];
  return Object.values(value).flatMap(pictures);
}

/** @param {any} value @returns {any} */
function withoutPictures(value) {
  if (typeof value === "string") return /^data:image\//.test(value) ? "(image above)" : value;
  if (Array.isArray(value)) return value.map(withoutPictures);
  if (!value || typeof value !== "object") return value;
  const mime = value.mimeType ?? value.mime_type ?? value.mime;
  const isPicture = typeof mime === "string" && mime.startsWith("image/");
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, isPicture && name === "data" ? "(image above)" : withoutPictures(each)]));
}

/** @param {import("./session.js").Frame} frame */
function frameElement(frame) {
  const long = frame.text.length > FRAME_TEXT;
  return h("div", { class: frame.sent ? "frame sent" : "frame came" }, h("span", { class: "muted" }, `${frame.sent ? "→" : "←"} ${clockTime(frame.at)} `), h("code", null, long ? `${frame.text.slice(0, FRAME_TEXT)}… (${frame.text.length} characters)` : frame.text));
}
