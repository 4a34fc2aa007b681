/** The work folder as the agent left it: what changed, and every file. */

import { get } from "./api.js";
import { broken, empty, fill, h } from "./dom.js";
import { diffBlock } from "./diff.js";
import { bytesText } from "./format.js";

/** @param {import("./rollout.js").Scene} scene */
export async function changesPanel({ id, rollout, signal }) {
  const files = rollout.files ?? [];
  const shown = h("section", { class: "panel file-shown", "aria-live": "polite" }, h("p", { class: "muted" }, "Choose a file."));
  /** @param {string} path */
  async function show(path) {
    try {
      const file = await get(`rollouts/${id}/files`, { path }, signal);
      const text = file.text === null ? `(${bytesText(file.size)} that are no text)` : file.text;
      fill(shown, h("h2", null, h("code", null, path), h("span", { class: "muted" }, `  ${bytesText(file.size)}${file.truncated ? ", the beginning" : ""}`)), h("pre", { tabindex: 0 }, text));
    } catch (error) {
      fill(shown, broken(error, () => show(path)));
    }
  }
  let changes = [];
  try {
    changes = await get(`rollouts/${id}/changes`, {}, signal);
  } catch (error) {
    if (signal.aborted) throw error;
  }
  if (!files.length && !changes.length) return empty("No files", h("p", null, rollout.live ? "The work folder is kept when the agent is done." : "The agent left nothing behind."));
  return h(
    "div",
    { class: "stack" },
    changes.length ? changesOf(changes) : null,
    h(
      "div",
      { class: "files" },
      h("section", { class: "panel" }, h("h2", null, `${files.length} files`), h("ul", { class: "file-list" }, files.map((/** @type {any} */ file) => h("li", null, h("button", { type: "button", class: "link", onclick: () => show(file.path) }, file.path), file.size === null || file.size === undefined ? null : h("span", { class: "muted" }, ` ${bytesText(file.size)}`))))),
      shown,
    ),
  );
}

/** What the agent changed, if it can be told from what the task brought. @param {any[]} changes */
function changesOf(changes) {
  const told = changes.filter((change) => change.kind !== "present");
  if (told.length) return h("section", { class: "panel" }, h("h2", null, "Changed by the agent"), told.map(diffBlock));
  return h("section", { class: "panel" }, h("h2", null, "What changed is not known"), h("p", { class: "muted" }, "The store does not hold the files that the task brought, so they cannot be told from those that the agent made."));
}
