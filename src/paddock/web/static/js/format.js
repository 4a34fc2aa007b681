/** Numbers, times and names as people read them. */

/** @param {number | null | undefined} value */
export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10_000) return value.toLocaleString("en");
  const units = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const [size, unit] = /** @type {[number, string]} */ (units.find(([least]) => value >= Number(least)));
  return `${(value / size).toFixed(value / size < 10 ? 1 : 0)}${unit}`;
}

/** @param {number | null | undefined} value */
export function rewardText(value) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? value.toFixed(1) : String(Math.round(value * 1000) / 1000);
}

/** The CSS class of a reward: high from two thirds on, low up to one third. @param {number | null | undefined} value */
export function rewardClass(value) {
  if (value === null || value === undefined) return "reward-unknown";
  return value >= 2 / 3 ? "reward-high" : value > 1 / 3 ? "reward-middle" : "reward-low";
}

/** How a rollout ended, in a word: `ok` says only that nothing broke, the reward says whether the work is right. @param {string} outcome */
export function outcomeText(outcome) {
  return outcome === "ok" ? "finished" : outcome;
}

/** @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${Number((seconds * 1000).toPrecision(3))} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const minutes = Math.round(seconds / 60);
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** @param {number} at seconds since the epoch */
export function clockTime(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

/** @param {number} at seconds since the epoch */
export function dateTime(at) {
  const date = new Date(at * 1000);
  const pad = (/** @type {number} */ number) => String(number).padStart(2, "0");
  return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${pad(date.getHours())}:${pad(date.getMinutes())}`;
}

/** @param {number} at @param {number} [now] */
export function ago(at, now = Date.now() / 1000) {
  const seconds = Math.max(0, now - at);
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return dateTime(at);
}

/** @param {number} bytes */
export function bytesText(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  if (bytes < 1024 * 1024) return `${(bytes / 1024).toFixed(1)} kB`;
  return `${(bytes / 1024 / 1024).toFixed(1)} MB`;
}

/** @param {number} share between 0 and 1 */
export function percent(share) {
  return `${(share * 100).toFixed(share === 1 || share === 0 ? 0 : 1)} %`;
}

/** A text of at most `most` characters. @param {string} text @param {number} most */
export function shorten(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

/** A model's name without the folders before a file. @param {string | null | undefined} model */
export function modelName(model) {
  return (model ?? "").replace(/^(replay|local):.*\//, "$1:");
}
