// Numbers as text: for axes, legends and tips.

const UNITS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];

/** Return a number with about `digits` digits; large ones with a unit, tiny ones with an exponent. */
export function short(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(Math.max(digits - 2, 1)).replace("e-", "e-");
  for (const [unit, name] of UNITS) if (size >= unit * 10) return `${trim((value / unit).toPrecision(digits))}${name}`;
  return trim(value.toPrecision(digits));
}

/** Return the texts of the ticks of an axis. */
export function ticks(values) {
  const largest = Math.max(...values.map(Math.abs));
  return values.map((value) => (value === null ? "" : largest < 1e-3 && value ? value.toExponential(1).replace(".0e", "e") : short(value)));
}

export const whole = (value) => Math.round(value).toLocaleString("en-US");

const trim = (text) => (text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text.includes("e") ? String(Number(text)) : text);

/** Return how long ago a time is (Unix seconds), in words. */
export function ago(seconds) {
  const past = Math.max(Date.now() / 1000 - seconds, 0);
  if (past < 5) return "just now";
  if (past < 90) return `${Math.round(past)} s ago`;
  if (past < 5400) return `${Math.round(past / 60)} min ago`;
  if (past < 129600) return `${Math.round(past / 3600)} h ago`;
  return `${Math.round(past / 86400)} days ago`;
}
