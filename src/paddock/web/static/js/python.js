/** An episode as a Python program that plays it again. */

/** @param {any} value @returns {string} */
export function pythonLiteral(value) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "number") return String(value);
  if (typeof value === "string") return pythonString(value);
  if (Array.isArray(value)) return `[${value.map(pythonLiteral).join(", ")}]`;
  return `{${Object.entries(value).map(([name, each]) => `${pythonString(name)}: ${pythonLiteral(each)}`).join(", ")}}`;
}

/** @param {string} text */
function pythonString(text) {
  // JSON's escapes are Python's, but for characters beyond the basic plane, which JSON leaves as they are.
  return JSON.stringify(text).replace(/[\u007f-\uffff]/g, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`).replace(/\\ud([89ab][0-9a-f]{2})\\ud([c-f][0-9a-f]{2})/g, (_, high, low) => `\\U${(0x10000 + ((parseInt(`d${high}`, 16) - 0xd800) << 10) + parseInt(`d${low}`, 16) - 0xdc00).toString(16).padStart(8, "0")}`);
}

/**
 * @param {string} url
 * @param {import("./play.js").Turn[]} turns
 * @param {boolean} isTools
 */
export function episodeAsPython(url, turns, isTools) {
  const lines = ["from paddock import SyncClient", "", `with SyncClient(${pythonLiteral(url)}) as env:`];
  for (const turn of turns) {
    if (turn.kind === "reset") {
      const parameters = Object.entries(turn.sent).map(([name, value]) => `${name}=${pythonLiteral(value)}`).join(", ");
      lines.push(`    result = env.reset(${parameters})`);
    } else if (isTools) {
      lines.push(`    result = env.step(${pythonLiteral(turn.sent)})`);
    } else lines.push(`    result = env.step(${pythonLiteral(turn.sent)})`);
    lines.push("    print(result.observation, result.reward, result.done)");
  }
  return lines.join("\n");
}
