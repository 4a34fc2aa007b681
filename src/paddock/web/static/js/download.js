/** Saving the filtered rollouts as a file, in the forms of `paddock trace export`. */

import { ApiError, address, get } from "./api.js";
import { broken, fill, h } from "./dom.js";
import { count } from "./format.js";

/** @param {Record<string, any>} filters @param {number} total */
export async function openExportDialog(filters, total) {
  const problem = h("div");
  const summary = h("p", { class: "muted" });
  const select = h("select", { "aria-label": "Form", onchange: describe });
  const unscored = h("input", { type: "checkbox", name: "unscored" });
  const button = h("button", { class: "primary", disabled: true }, "Save as a file");
  /** @type {{name: string, summary: string}[]} */
  let forms = [];
  function describe() {
    summary.textContent = forms.find((form) => form.name === select.value)?.summary ?? "";
  }
  /** @param {Event} event */
  async function save(event) {
    event.preventDefault();
    button.disabled = true;
    button.textContent = "Exporting…";
    try {
      await download(address("export", { ...filters, form: select.value, unscored: unscored.checked ? 1 : null }));
      dialog.close();
    } catch (error) {
      fill(problem, broken(error));
    }
    button.disabled = false;
    button.textContent = "Save as a file";
  }
  const dialog = h(
    "dialog",
    { class: "small-dialog", "aria-label": "Export", onclose: () => dialog.remove() },
    h(
      "form",
      { onsubmit: save },
      h("h2", null, `Export ${count(total)} rollouts`),
      select,
      summary,
      h("label", null, unscored, " also those without a reward"),
      h("p", { class: "muted" }, "Running rollouts are left out. The same on the command line: paddock trace export --help"),
      problem,
      h("div", { class: "actions" }, button, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel")),
    ),
  );
  document.body.appendChild(dialog);
  dialog.showModal();
  try {
    forms = (await get("forms")).forms;
    fill(select, forms.map((form) => h("option", { value: form.name, selected: form.name === "jsonl" }, form.name)));
    button.disabled = false;
    describe();
  } catch (error) {
    fill(problem, broken(error));
  }
}

/** Fetched, not linked to: an error is shown in the dialog, and the page stays. @param {string} url */
async function download(url) {
  const answer = await fetch(url, { credentials: "same-origin" });
  if (!answer.ok) {
    const { error } = await answer.json();
    throw new ApiError(error.message, error.hint ?? "", answer.status);
  }
  const name = /filename="([^"]+)"/.exec(answer.headers.get("content-disposition") ?? "")?.[1] ?? "rollouts.jsonl";
  const link = h("a", { href: URL.createObjectURL(await answer.blob()), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
