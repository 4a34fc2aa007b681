/** Making elements. Text is only ever set as text: nothing here, or anywhere else, parses HTML. */

/** @typedef {Node | string | number | null | undefined | false | any[]} Child */

const SVG = new Set(["svg", "g", "path", "rect", "circle", "line", "polyline", "polygon", "text", "title", "desc"]);

/**
 * An element with properties and children.
 * `on…` takes a listener, `class` and `aria-…` become attributes, `dataset` an object; false and null leave out.
 * @param {string} tag
 * @param {Record<string, any> | null} [properties]
 * @param {...Child} children
 * @returns {any}
 */
export function h(tag, properties, ...children) {
  const element = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(/** @type {HTMLElement} */ (element).dataset, value);
    else if (name === "value" || name === "checked" || name === "disabled") /** @type {any} */ (element)[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

/** @param {Node} parent @param {Child[]} children */
export function append(parent, children) {
  for (const child of children) {
    if (Array.isArray(child)) append(parent, child);
    else if (child instanceof Node) parent.appendChild(child);
    else if (child !== null && child !== undefined && child !== false) parent.appendChild(document.createTextNode(String(child)));
  }
}

/** Put other children in place of those that are there. @param {Element} parent @param {...Child} children */
export function fill(parent, ...children) {
  parent.replaceChildren();
  append(parent, children);
}

/** Say something to screen readers, without moving the focus. @param {string} text */
export function announce(text) {
  const status = document.getElementById("status");
  if (status) status.textContent = text;
}

/** A text with a button that copies it. @param {string} text @param {string} [label] */
export function copyable(text, label = "Copy") {
  const button = h("button", { type: "button", class: "small", onclick: copy }, label);
  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection()?.removeAllRanges();
      getSelection()?.addRange(range);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = label), 1500);
  }
  const code = h("code", null, text);
  return h("div", { class: "copyable" }, h("pre", { tabindex: 0 }, code), button);
}

/** What to show where there is nothing: a sentence, and what to do next. @param {string} title @param {...Child} children */
export function empty(title, ...children) {
  return h("div", { class: "empty" }, h("h2", null, title), ...children);
}

/** What broke, and a way to try again. @param {unknown} error @param {(() => void) | null} [again] */
export function broken(error, again = null) {
  const { message = String(error), hint = "" } = /** @type {any} */ (error) ?? {};
  return h(
    "div",
    { class: "broken", role: "alert" },
    h("strong", null, message),
    hint && h("p", null, hint),
    again && h("button", { type: "button", onclick: again }, "Try again"),
  );
}
