// Numbers as people read them, and counters as rates.

const grouped = new Intl.NumberFormat("en");

export const count = (value) => grouped.format(Math.round(value));

export const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "–");

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit += 1) value /= 1000;
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function seconds(value) {
  if (value === null) return "–";
  if (value < 1) return `${Math.max(1, Math.round(value * 1000))} ms`;
  if (value < 59.95) return `${Number.isInteger(value) ? value : value.toFixed(1)} s`;
  const whole = Math.round(value);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

/** How far the loading of a model has come. */
export const loaded = ({ stage, done, total }) => (stage === "weights" ? `${bytes(done)} of ${bytes(total)} read` : `warm-up, ${count(done)} of ${count(total)}`);
