/** Places on the page: `#/name/part/part?filter=…`. One view is shown at a time; leaving it aborts its signal. */

import { broken, fill } from "./dom.js";

/** @typedef {{parts: string[], query: URLSearchParams}} Place */
/** @typedef {(place: Place, signal: AbortSignal) => Node | Promise<Node>} View */

/** @returns {Place} */
export function currentPlace() {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

/** @param {string[]} parts @param {Record<string, any>} [query] */
export function placeUrl(parts, query = {}) {
  const filters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const each of Array.isArray(value) ? value : [value]) if (each !== null && each !== undefined && each !== "") filters.append(name, each);
  }
  const text = filters.toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

/** The last address of each list, with its filters. @type {Map<string, string>} */
const lastPlaces = new Map();

/** Where a list was left, to come back to it. @param {string} name */
export function lastPlace(name) {
  return lastPlaces.get(name) ?? placeUrl([name]);
}

/**
 * Remember filters in the address without leaving the view.
 * @param {string[]} parts
 * @param {Record<string, any>} query
 * @param {boolean} [isStep] whether the browser's way back leads to the filters before
 */
export function keepPlace(parts, query, isStep = false) {
  const url = placeUrl(parts, query);
  if (parts.length === 1) lastPlaces.set(parts[0], url);
  if (isStep && url !== location.hash) history.pushState(null, "", url);
  else history.replaceState(null, "", url);
}

/**
 * Show the view that the address names, now and whenever it changes.
 * @param {Element} main
 * @param {Record<string, View>} views by the first part
 * @param {string} home
 * @param {(name: string) => void} onShow
 */
export function startRouter(main, views, home, onShow) {
  let leaving = new AbortController();
  async function show() {
    leaving.abort();
    leaving = new AbortController();
    const { signal } = leaving;
    const place = currentPlace();
    const name = place.parts[0] && views[place.parts[0]] ? place.parts[0] : home;
    onShow(name);
    main.setAttribute("aria-busy", "true");
    try {
      const node = await views[name](place, signal);
      if (!signal.aborted) fill(main, node);
    } catch (error) {
      if (!signal.aborted) fill(main, broken(error, show));
    }
    if (!signal.aborted) main.removeAttribute("aria-busy");
  }
  addEventListener("hashchange", () => {
    show();
    scrollTo(0, 0);
  });
  show();
}
