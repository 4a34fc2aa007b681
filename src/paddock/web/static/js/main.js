/** The page: what the server offers, the way around, and the view that is shown. */

import { get, isShared, sharedRollout } from "./api.js";
import { broken, fill, h } from "./dom.js";
import { startKeys, showHelp, useKeys } from "./keys.js";
import { currentPlace, lastPlace, startRouter } from "./router.js";
import { rolloutsView } from "./rollouts.js";
import { batchesView, batchView } from "./batches.js";
import { groupsView } from "./groups.js";
import { rolloutView } from "./rollout.js";
import { compareView } from "./compare.js";
import { playView } from "./play.js";
import { serverView } from "./server.js";
import { fleetView } from "./fleet.js";
import { trainingView } from "./training.js";

/** @typedef {{name: string, title: string, part: string, key: string}} Section */

/** @type {Section[]} */
const SECTIONS = [
  { name: "rollouts", title: "Rollouts", part: "rollouts", key: "r" },
  { name: "batches", title: "Batches", part: "rollouts", key: "b" },
  { name: "groups", title: "Groups", part: "rollouts", key: "g" },
  { name: "training", title: "Training", part: "training", key: "t" },
  { name: "play", title: "Play", part: "play", key: "p" },
  { name: "server", title: "Server", part: "server", key: "s" },
  { name: "fleet", title: "Fleet", part: "fleet", key: "f" },
];

/** @type {Record<string, import("./router.js").View>} */
const VIEWS = {
  rollouts: (place, signal) => (place.parts[1] ? rolloutView(place, signal) : rolloutsView(place, signal)),
  batches: (place, signal) => (place.parts[1] ? batchView(place, signal) : batchesView(place, signal)),
  groups: groupsView,
  compare: compareView,
  training: trainingView,
  play: playView,
  server: serverView,
  fleet: fleetView,
};

/** @param {Section[]} sections @param {string} active */
function drawNavigation(sections, active) {
  const links = sections.map((section) =>
    h("a", { href: `#/${section.name}`, "aria-current": section.name === active ? "page" : null, "aria-keyshortcuts": `g ${section.key}`, onclick: (/** @type {Event} */ event) => goBack(event, section.name) }, section.title),
  );
  fill(/** @type {Element} */ (document.getElementById("nav")), links);
}

/** From elsewhere, a link to a list leads to where it was left; in the list itself, to all of it. @param {Event} event @param {string} name */
function goBack(event, name) {
  const { parts } = currentPlace();
  if (parts.length === 1 && parts[0] === name) return;
  event.preventDefault();
  location.hash = lastPlace(name);
}

function startTheme() {
  const root = document.documentElement;
  const button = /** @type {HTMLButtonElement} */ (document.getElementById("theme"));
  const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const show = () => (button.textContent = isDark() ? "☀" : "☾");
  try {
    const stored = localStorage.getItem("paddock-theme");
    if (stored) root.dataset.theme = stored;
  } catch {
    // A page from a file may not remember anything.
  }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("paddock-theme", root.dataset.theme);
    } catch {
      // As above.
    }
    show();
  });
  show();
}

async function startPage() {
  startTheme();
  startKeys();
  document.getElementById("help")?.addEventListener("click", showHelp);
  const main = /** @type {Element} */ (document.getElementById("main"));
  let about;
  try {
    about = await get("about");
  } catch (error) {
    fill(main, broken(error, () => location.reload()));
    return;
  }
  if (about.environment) document.title = `${about.environment} · Paddock`;
  const sections = isShared ? [] : SECTIONS.filter((section) => about.parts[section.part]);
  useKeys(sections.map((section) => ({ keys: `g ${section.key}`, does: `Go to ${section.title}`, run: () => (location.hash = lastPlace(section.name)) })));
  // A server is opened to play with its environment, a plane to look at its instances.
  const home = ["play", "fleet"].find((part) => about.parts[part]) ?? sections[0]?.name ?? "rollouts";
  if (isShared && !location.hash.startsWith("#/rollouts/")) history.replaceState(null, "", `#/rollouts/${sharedRollout}`);
  startRouter(main, VIEWS, home, (name) => drawNavigation(sections, name));
}

startPage();
