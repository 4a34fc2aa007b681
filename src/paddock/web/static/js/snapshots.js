/** What each call changed in the work folder, where the rollout has snapshots of it, and how a fork's files compare. */

import { get } from "./api.js";
import { broken, fill, h } from "./dom.js";
import { diffBlock } from "./diff.js";
import { shorten } from "./format.js";
import { placeUrl } from "./router.js";

const NAMED = 6;

/** @typedef {{path: string, kind: string, before: string | null, after: string | null, binary: boolean, note: string, added: number, removed: number}} Change */

/** @param {import("./rollout.js").Scene} scene */
export async function callChangesPanel({ id, rollout, signal }) {
  if (!rollout.has_snapshots) return null;
  const { rows, gone, left_out: leftOut } = await get(`rollouts/${id}/snapshots`, {}, signal);
  if (gone) return panel(h("p", { class: "muted" }, "The snapshots are no longer in the store."));
  const quiet = rows.filter((/** @type {any} */ row) => !row.changes.length && !row.unknown && !row.problem);
  const shown = rows.filter((/** @type {any} */ row) => !quiet.includes(row));
  const paths = Object.entries(leftOut);
  return panel(
    forkFiles(rollout.fork?.fidelity?.files),
    shown.map((/** @type {any} */ row) => callRow(id, row, signal)),
    quiet.length ? h("p", { class: "muted" }, `No changes: ${quiet.map((/** @type {any} */ row) => row.call).join(", ")}`) : null,
    paths.length ? h("details", null, h("summary", { class: "muted" }, `${paths.length} ${paths.length === 1 ? "path was" : "paths were"} not saved`), h("ul", null, paths.map(([path, reason]) => h("li", null, h("code", null, path), ` ${reason}`)))) : null,
  );
}

/** @param {...import("./dom.js").Child} inside */
function panel(...inside) {
  return h("section", { class: "panel call-changes" }, h("h2", null, "Changed by each call"), ...inside);
}

/** One call: what it changed in a line, and the differences once it is opened. @param {string} id @param {any} row @param {AbortSignal} signal */
function callRow(id, row, signal) {
  const name = h("a", { href: placeUrl(["rollouts", id, "tokens", row.call]) }, row.call);
  if (row.problem || row.unknown) return h("p", { class: "muted" }, name, row.problem ? ` no snapshot: ${row.problem}; its changes are with those before` : " not known: no snapshot follows");
  const body = h("div", { class: "stack" });
  let isLoaded = false;
  async function load() {
    isLoaded = true;
    fill(body, h("p", { class: "muted" }, "Loading…"));
    try {
      fill(body, (await get(`rollouts/${id}/calls/${row.call}/changes`, {}, signal)).map(changeBlock));
    } catch (error) {
      if (!signal.aborted) fill(body, broken(error, load));
    }
  }
  const details = h("details", { ontoggle: () => details.open && !isLoaded && load() }, h("summary", null, name, " ", h("span", { class: "muted" }, shorten(row.gist, 60)), " ", row.changes.slice(0, NAMED).map(changeMark), row.changes.length > NAMED ? h("span", { class: "muted" }, ` and ${row.changes.length - NAMED} more`) : null), body);
  return details;
}

/** @param {Change} change */
function changeMark(change) {
  const isText = change.added || change.removed;
  return h(
    "span",
    { class: "change-mark" },
    h("code", null, change.path),
    " ",
    isText ? [h("span", { class: "diff-count-new" }, `+${change.added}`), " ", h("span", { class: "diff-count-gone" }, `−${change.removed}`)] : h("span", { class: "muted" }, change.note || change.kind),
  );
}

/** @param {Change} change */
function changeBlock(change) {
  if (!change.binary && (change.added || change.removed)) return h("div", null, diffBlock(change), change.note ? h("p", { class: "muted" }, change.note) : null);
  const words = [change.kind, change.binary ? "no text" : "", change.note].filter(Boolean);
  return h("p", null, h("code", null, change.path), h("span", { class: "muted" }, ` ${words.join(", ")}`));
}

/** Whether a fork has the files of the recorded rollout. @param {any} files */
function forkFiles(files) {
  if (!files) return null;
  if (files.state === null) return h("p", { class: "muted" }, `The files were not compared with the recorded rollout: ${files.reason}`);
  const calls = `${files.equal_calls} of ${files.compared_calls} calls`;
  if (files.state !== "different") return h("p", null, `The files equal those of the recorded rollout at ${calls}`, files.state === "volatile" ? `, but for times and ids in ${files.volatile.join(", ")}.` : ".");
  return h(
    "details",
    { open: true },
    h("summary", { class: "error-text" }, `${files.different_paths} ${files.different_paths === 1 ? "file differs" : "files differ"} from the recorded rollout; all files are equal at ${calls}`),
    files.paths.map((/** @type {any} */ each) => h("div", null, h("p", null, h("code", null, each.path), ` ${each.kind}, from ${each.call} on`), each.difference ? h("pre", { tabindex: 0 }, each.difference) : null)),
  );
}
