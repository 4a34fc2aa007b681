/** What can be done with ticked rollouts: compare two, and give them tags. */

import { post } from "./api.js";
import { announce, broken, fill, h } from "./dom.js";
import { placeUrl } from "./router.js";

/**
 * @param {() => void} clear takes all ticks away
 * @param {() => void} onTagged called after tags were changed
 */
export function tickedBar(clear, onTagged) {
  const element = h("div", { class: "ticked-bar", hidden: true, "aria-live": "polite" });
  /** @type {string[]} */
  let ids = [];
  const compare = () => (location.hash = placeUrl(["compare", ...ids]));

  /** @param {string[]} now */
  function show(now) {
    ids = now;
    element.hidden = !ids.length;
    fill(
      element,
      h("strong", null, `${ids.length} ticked`),
      h("button", { type: "button", disabled: ids.length !== 2, title: ids.length === 2 ? null : "Tick two rollouts to compare them", onclick: compare }, "Compare two"),
      h("button", { type: "button", onclick: () => openTagDialog(ids, onTagged) }, "Tags…"),
      h("button", { type: "button", class: "quiet", onclick: clear }, "Clear ticks"),
    );
  }
  return { element, show, compare: () => ids.length === 2 && compare() };
}

/** @param {string[]} ids @param {() => void} onTagged */
export function openTagDialog(ids, onTagged) {
  const problem = h("div");
  const input = h("input", { name: "tags", autocomplete: "off", spellcheck: "false", placeholder: "look-again -done", "aria-label": "Tags", "aria-describedby": "tag-hint" });
  /** @param {Event} event */
  async function save(event) {
    event.preventDefault();
    const words = input.value.split(/[\s,]+/).filter(Boolean);
    const remove = words.filter((/** @type {string} */ word) => word.startsWith("-")).map((/** @type {string} */ word) => word.slice(1));
    const add = words.filter((/** @type {string} */ word) => !word.startsWith("-")).map((/** @type {string} */ word) => word.replace(/^\+/, ""));
    try {
      await post("tags", { rollouts: ids, add, remove });
      dialog.close();
      announce("The tags were changed.");
      onTagged();
    } catch (error) {
      fill(problem, broken(error));
    }
  }
  const dialog = h(
    "dialog",
    { class: "small-dialog", "aria-label": "Tags", onclose: () => dialog.remove() },
    h(
      "form",
      { onsubmit: save },
      h("h2", null, ids.length === 1 ? "Tags of 1 rollout" : `Tags of ${ids.length} rollouts`),
      input,
      h("p", { class: "muted", id: "tag-hint" }, "Words to add; with a minus sign, to remove."),
      problem,
      h("div", { class: "actions" }, h("button", { class: "primary" }, "Save"), h("button", { type: "button", onclick: () => dialog.close() }, "Cancel")),
    ),
  );
  document.body.appendChild(dialog);
  dialog.showModal();
  input.focus();
}
