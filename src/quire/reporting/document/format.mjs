// The format of numbers: the rule of `axis.py`, so that a live plot shows the same as the still picture.

const counts = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });

/** Return a number with at most three digits, or as an integer from a thousand on, with its unit. */
export function showNumber(value, unit = "") {
    if (value === null || value === undefined) return "–";
    if (unit === "s" && value !== 0 && Math.abs(value) < 0.9995) [value, unit] = [1000 * value, "ms"];
    const text = Math.abs(value) >= 999.5 ? counts.format(value) : String(Number(value.toPrecision(3)));
    return unit ? `${text} ${unit}` : text;
}
