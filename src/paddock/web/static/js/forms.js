/** Forms made from a JSON Schema: one labelled field for each property, and errors beside the field they are about. */

import { fill, h } from "./dom.js";

/** @typedef {{element: HTMLElement, read: () => Record<string, any>, complain: (problems: {path: string[], message: string}[]) => void, focus: () => void}} Form */
/** @typedef {{element: HTMLElement, read: () => any, problem: HTMLElement, input: HTMLElement, inner?: Map<string, Field>}} Field */

const LEFT_OUT = Symbol("left out");

/** A value that cannot be read from its field. */
export class FieldError extends Error {
  /** @param {string[]} path @param {string} message */
  constructor(path, message) {
    super(message);
    this.path = path;
  }
}

/**
 * @param {any} schema of an object
 * @param {{hide?: string[]}} [options] names that get no field
 * @returns {Form}
 */
export function schemaForm(schema, { hide = [] } = {}) {
  const fields = fieldsOf(schema, schema, [], hide);
  const general = h("p", { class: "error-text", role: "alert", hidden: true });
  return {
    element: h("div", { class: "fields" }, [...fields.values()].map((field) => field.element), fields.size ? null : h("p", { class: "muted" }, "Takes no values."), general),
    read: () => readFields(fields),
    complain: (problems) => complain(fields, general, problems),
    focus: () => [...fields.values()][0]?.input.focus(),
  };
}

/** @param {any} schema @param {any} root @param {string[]} path @param {string[]} hide @returns {Map<string, Field>} */
function fieldsOf(schema, root, path, hide) {
  const required = new Set(schema.required ?? []);
  /** @type {Map<string, Field>} */
  const fields = new Map();
  for (const [name, each] of Object.entries(schema.properties ?? {})) {
    if (!hide.includes(name)) fields.set(name, fieldOf(name, resolved(each, root), root, required.has(name), [...path, name]));
  }
  return fields;
}

/** @param {any} schema @param {any} root @returns {any} */
function resolved(schema, root) {
  let result = schema;
  for (let depth = 0; result?.$ref && depth < 20; depth++) {
    const target = result.$ref.replace(/^#\//, "").split("/").reduce((/** @type {any} */ at, /** @type {string} */ key) => at?.[key], root);
    result = { ...target, ...Object.fromEntries(Object.entries(result).filter(([key]) => key !== "$ref")) };
  }
  const choices = result?.anyOf ?? result?.oneOf;
  if (choices) {
    const real = choices.filter((/** @type {any} */ each) => each.type !== "null");
    if (real.length === 1) return { ...resolved(real[0], root), ...withoutChoices(result), optional: choices.length > 1 };
  }
  return result ?? {};
}

/** @param {any} schema */
function withoutChoices(schema) {
  const { anyOf, oneOf, ...rest } = schema;
  return rest;
}

/** @param {string} name @param {any} schema @param {any} root @param {boolean} required @param {string[]} path @returns {Field} */
function fieldOf(name, schema, root, required, path) {
  const id = `field-${path.join("-")}-${Math.random().toString(36).slice(2, 8)}`;
  const problem = h("p", { class: "error-text field-problem", id: `${id}-problem`, role: "alert", hidden: true });
  if (schema.type === "object" && schema.properties && !schema.optional) {
    const inner = fieldsOf(schema, root, path, []);
    const element = h("fieldset", { class: "field" }, h("legend", null, schema.title ?? name), [...inner.values()].map((field) => field.element), problem);
    return { element, problem, inner, input: element, read: () => readFields(inner) };
  }
  const { input, read } = inputOf(schema, id, required, path);
  input.setAttribute("aria-describedby", `${id}-problem`);
  const kind = kindText(schema);
  const element = h("div", { class: "field" }, h("label", { for: id }, name, required ? h("span", { class: "required", title: "needed" }, " *") : "", h("span", { class: "muted" }, `  ${kind}`)), input, schema.description ? h("p", { class: "muted hint" }, schema.description) : null, problem);
  return { element, problem, input, read };
}

/** @param {any} schema @param {string} id @param {boolean} required @param {string[]} path */
function inputOf(schema, id, required, path) {
  const initial = schema.default === undefined || schema.default === null ? "" : schema.default;
  if (schema.const !== undefined) return { input: h("input", { id, value: JSON.stringify(schema.const), disabled: true }), read: () => schema.const };
  if (Array.isArray(schema.enum)) {
    const input = h("select", { id }, required ? null : h("option", { value: "" }, "(left out)"), schema.enum.map((/** @type {any} */ value) => h("option", { value: JSON.stringify(value), selected: value === initial }, String(value))));
    return { input, read: () => (input.value === "" ? LEFT_OUT : JSON.parse(input.value)) };
  }
  if (schema.type === "boolean") {
    const input = h("input", { id, type: "checkbox", checked: initial === true });
    return { input, read: () => input.checked };
  }
  if (schema.type === "integer" || schema.type === "number") {
    const input = h("input", { id, inputmode: schema.type === "integer" ? "numeric" : "decimal", autocomplete: "off", value: String(initial) });
    return { input, read: () => readNumber(input.value, required) };
  }
  if (schema.type === "string") {
    const input = h("textarea", { id, rows: 1, spellcheck: "false", value: String(initial), oninput: () => (input.rows = Math.min(12, input.value.split("\n").length)) });
    return { input, read: () => (input.value === "" && !required ? LEFT_OUT : input.value) };
  }
  if (schema.type === undefined && !schema.anyOf && !schema.oneOf) {
    const input = h("input", { id, autocomplete: "off", value: initial === "" ? "" : JSON.stringify(initial) });
    return { input, read: () => (input.value === "" && !required ? LEFT_OUT : readAnything(input.value)) };
  }
  const input = h("textarea", { id, rows: 2, class: "mono", spellcheck: "false", placeholder: schema.type === "array" ? "[ ]" : schema.type === "object" ? "{ }" : "JSON", value: initial === "" ? "" : JSON.stringify(initial) });
  return { input, read: () => readJson(input.value, required, path) };
}

/** @param {string} text @param {boolean} required */
function readNumber(text, required) {
  const trimmed = text.trim();
  if (trimmed === "" && !required) return LEFT_OUT;
  // What is no number goes as it is: the server says what is wrong with it.
  return trimmed === "" || Number.isNaN(Number(trimmed)) ? trimmed : Number(trimmed);
}

/** JSON if it is, else the text itself: for values of which the schema says nothing. @param {string} text */
function readAnything(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** @param {string} text @param {boolean} required @param {string[]} path */
function readJson(text, required, path) {
  if (text.trim() === "" && !required) return LEFT_OUT;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FieldError(path, `This must be JSON: ${/** @type {Error} */ (error).message}`);
  }
}

/** @param {Map<string, Field>} fields */
function readFields(fields) {
  /** @type {Record<string, any>} */
  const values = {};
  for (const [name, field] of fields) {
    const value = field.read();
    if (value !== LEFT_OUT) values[name] = value;
  }
  return values;
}

/** @param {Map<string, Field>} fields @param {HTMLElement} general @param {{path: string[], message: string}[]} problems */
function complain(fields, general, problems) {
  clearProblems(fields);
  fill(general);
  general.hidden = true;
  let first = true;
  for (const { path, message } of problems) {
    const field = findField(fields, path);
    const place = field?.problem ?? general;
    place.textContent = field ? message : [path.join("."), message].filter(Boolean).join(": ");
    place.hidden = false;
    field?.input.setAttribute("aria-invalid", "true");
    if (field && first) field.input.focus();
    first = false;
  }
}

/** @param {Map<string, Field>} fields */
function clearProblems(fields) {
  for (const field of fields.values()) {
    field.problem.hidden = true;
    field.input.removeAttribute("aria-invalid");
    if (field.inner) clearProblems(field.inner);
  }
}

/** @param {Map<string, Field>} fields @param {string[]} path @returns {Field | undefined} */
function findField(fields, path) {
  for (const [index, part] of path.entries()) {
    const field = fields.get(part);
    if (field) return field.inner && index + 1 < path.length ? findField(field.inner, path.slice(index + 1)) ?? field : field;
  }
  return undefined;
}

/** @param {any} schema */
function kindText(schema) {
  const limits = [
    schema.minimum !== undefined && `from ${schema.minimum}`,
    schema.exclusiveMinimum !== undefined && `above ${schema.exclusiveMinimum}`,
    schema.maximum !== undefined && `to ${schema.maximum}`,
    schema.maxLength !== undefined && `at most ${schema.maxLength} characters`,
    schema.optional && "may be empty",
  ];
  return [schema.type ?? (schema.enum ? "choice" : "any value"), ...limits.filter(Boolean)].join(", ");
}
