/** The server's answers: fetched, streamed, or read from the data that a shared page carries. */

/** An answer that is an error. */
export class ApiError extends Error {
  /** @param {string} message @param {string} hint @param {number} status */
  constructor(message, hint, status) {
    super(message);
    this.hint = hint;
    this.status = status;
  }
}

const embedded = readEmbedded();

/** @returns {{id: string, answers: Record<string, any>} | null} */
function readEmbedded() {
  const element = document.getElementById("paddock-data");
  return element ? JSON.parse(element.textContent ?? "null") : null;
}

/** Whether this page is one file without a server. */
export const isShared = embedded !== null;
export const sharedRollout = embedded ? embedded.id : "";

/**
 * @param {string} path below `api/`
 * @param {Record<string, any>} [parameters] null, undefined and "" are left out; a list repeats its name
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function get(path, parameters = {}, signal) {
  if (embedded) return fromEmbedded(path, parameters);
  return ask(address(path, parameters), { signal });
}

/** @param {string} path @param {any} [body] @returns {Promise<any>} */
export async function post(path, body) {
  const headers = { "content-type": "application/json" };
  return ask(address(path, {}), { method: "POST", headers, body: JSON.stringify(body ?? {}) });
}

/** @param {string} path @param {Record<string, any>} parameters */
export function address(path, parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") query.append(name, String(each));
    }
  }
  const text = query.toString();
  return `api/${path}${text ? `?${text}` : ""}`;
}

/** @param {string} url @param {RequestInit} options */
async function ask(url, options) {
  let answer;
  try {
    answer = await fetch(url, { ...options, credentials: "same-origin" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError("The server cannot be reached.", "Is paddock still running? This page reconnects when it is.", 0);
  }
  let document;
  try {
    document = await answer.json();
  } catch (error) {
    if (options.signal?.aborted) throw error;
    document = null;
  }
  if (answer.ok) return document;
  const problem = document?.error ?? {};
  throw new ApiError(problem.message ?? `The server answered ${answer.status}.`, problem.hint ?? "", answer.status);
}

/**
 * Follow what is live until the signal aborts. A lost connection is opened again by the browser.
 * @param {string} path
 * @param {Record<string, (data: any) => void>} handlers by the name of the event
 * @param {AbortSignal} signal
 * @param {(connected: boolean) => void} [onState]
 */
export function live(path, handlers, signal, onState = () => {}) {
  if (embedded || signal.aborted) return;
  const source = new EventSource(address(path, {}));
  source.onopen = () => onState(true);
  source.onerror = () => onState(false);
  for (const [name, handler] of Object.entries(handlers)) {
    source.addEventListener(name, (event) => handler(JSON.parse(/** @type {MessageEvent} */ (event).data)));
  }
  signal.addEventListener("abort", () => source.close());
}

/** @param {string} path @param {Record<string, any>} parameters */
function fromEmbedded(path, parameters) {
  const whole = embedded?.answers[parameters.part === undefined ? path : `${path}/${parameters.part}`];
  if (whole === undefined || parameters.path !== undefined) throw new ApiError("This file does not hold that.", "Open the rollout with paddock view.", 404);
  if (path.endsWith("/transcript")) {
    const items = whole.items.filter((/** @type {any} */ item) => item.seq >= (parameters.after ?? 0)).slice(0, parameters.limit ?? 500);
    return { items, next: (parameters.after ?? 0) + items.length, done: true };
  }
  return parameters.part === undefined ? whole : slicedColumns(whole, parameters.offset ?? 0, parameters.limit ?? 4000);
}

/** The part of a page of columns that lies in a window. @param {Record<string, any>} columns @param {number} offset @param {number} limit */
function slicedColumns(columns, offset, limit) {
  const from = Math.max(0, offset - columns.offset);
  const to = Math.max(from, offset + limit - columns.offset);
  const cut = Object.entries(columns).map(([name, value]) => [name, Array.isArray(value) ? value.slice(from, to) : value]);
  return { ...Object.fromEntries(cut), offset: columns.offset + from };
}
