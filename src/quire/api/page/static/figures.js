// Numbers as people read them, and counters as rates.

const grouped = new Intl.NumberFormat("en");

export const count = (value) => grouped.format(Math.round(value));

const oneDecimal = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

/** Tokens a second. */
export const rate = (value) => oneDecimal.format(value);

export const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "–");

/** As `core/figures.py` spells them in the terminal and the log. */
export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  for (; value >= 999.5 && unit < units.length - 1; unit += 1) value /= 1000;
  return `${value.toFixed(unit === 0 || value >= 99.95 ? 0 : 1)} ${units[unit]}`;
}

export function seconds(value) {
  if (value === null) return "–";
  if (value > 0 && value < 0.9995) return `${Math.max(1, Math.round(value * 1000))} ms`;
  if (value < 59.95) return `${Number.isInteger(value) ? value : value.toFixed(1)} s`;
  const whole = Math.round(value);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  if (hours) return minutes ? `${hours} h ${minutes} min` : `${hours} h`;
  return rest ? `${minutes} min ${rest} s` : `${minutes} min`;
}

/** How far the loading of a model has come. */
export const loaded = ({ stage, done, total }) => (stage === "weights" ? `${bytes(done)} of ${bytes(total)} read` : `warm-up, ${count(done)} of ${count(total)}`);
