/** The work folder as the agent left it: what changed, and every file. And the artifacts that the task keeps. */

import { get } from "./api.js";
import { broken, empty, fill, h } from "./dom.js";
import { diffBlock } from "./diff.js";
import { bytesText } from "./format.js";
import { callChangesPanel } from "./snapshots.js";

/** @param {import("./rollout.js").Scene} scene */
export async function changesPanel(scene) {
  const { id, rollout, signal } = scene;
  const files = rollout.files ?? [];
  const artifacts = rollout.artifacts ?? [];
  const viewer = h("section", { class: "panel file-shown", "aria-live": "polite" }, h("p", { class: "muted" }, "Choose a file."));
  /** @param {string} path @param {string} archive */
  async function show(path, archive) {
    try {
      const file = await get(`rollouts/${id}/files`, { path, of: archive }, signal);
      const text = file.text === null ? `(${bytesText(file.size)} that are no text)` : file.text;
      fill(viewer, h("h2", null, h("code", null, path), h("span", { class: "muted" }, `  ${bytesText(file.size)}${file.truncated ? ", the beginning" : ""}`)), h("pre", { tabindex: 0 }, text));
    } catch (error) {
      fill(viewer, broken(error, () => show(path, archive)));
    }
  }
  let changes = [];
  try {
    changes = await get(`rollouts/${id}/changes`, {}, signal);
  } catch (error) {
    if (signal.aborted) throw error;
  }
  const byCall = await callChangesPanel(scene).catch((error) => broken(error));
  if (!files.length && !changes.length && !artifacts.length && !byCall) return empty("No files", h("p", null, rollout.live ? "The work folder is kept when the agent is done." : "The agent left nothing behind."));
  return h(
    "div",
    { class: "stack" },
    byCall,
    changes.length ? changesOf(changes) : rollout.has_workdir ? h("p", { class: "muted" }, "The agent changed none of the task's files, and added none.") : null,
    h(
      "div",
      { class: "files" },
      h(
        "div",
        { class: "stack" },
        fileList(`${files.length} files`, files, (path) => show(path, "workdir")),
        artifacts.length ? fileList(`${artifacts.length} artifacts`, artifacts, (path) => show(path, "artifacts")) : null,
      ),
      viewer,
    ),
  );
}

/** @param {string} title @param {any[]} files @param {(path: string) => void} show */
function fileList(title, files, show) {
  const rows = files.map((file) => h("li", null, h("button", { type: "button", class: "link", onclick: () => show(file.path) }, file.path), file.size === null || file.size === undefined ? null : h("span", { class: "muted" }, ` ${bytesText(file.size)}`)));
  return h("section", { class: "panel" }, h("h2", null, title), h("ul", { class: "file-list" }, rows));
}

/** Compiled code and caches, by name only. @param {any[]} changes */
function generatedFiles(changes) {
  if (!changes.length) return null;
  const title = changes.length === 1 ? "1 generated file" : `${changes.length} generated files`;
  return h("details", { class: "fold" }, h("summary", { class: "muted" }, title), h("ul", { class: "file-list" }, changes.map((change) => h("li", null, h("code", null, change.path), h("span", { class: "muted" }, ` ${change.kind}`)))));
}

/** What the agent changed, if it differs from what the task brought. @param {any[]} changes */
function changesOf(changes) {
  const changed = changes.filter((change) => change.kind !== "present");
  const own = changed.filter((change) => !change.generated);
  const generated = changed.filter((change) => change.generated);
  if (changed.length) return h("section", { class: "panel" }, h("h2", null, "Changed by the agent"), own.length ? own.map(diffBlock) : h("p", { class: "muted" }, "Nothing but generated files."), generatedFiles(generated));
  return h("section", { class: "panel" }, h("h2", null, "What changed is not known"), h("p", { class: "muted" }, "The store does not hold the files that the task brought, so they cannot be told from those that the agent made."));
}
