// Numbers and words in the page's format.

const counts = new Intl.NumberFormat("en-GB");

/** Return a count with separators. */
export const count = (number) => counts.format(number);

/** Return a count with its noun: "1 block", "2 blocks". */
export const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Return a share in percent, or "–" for no value. */
export const percent = (share) => (share === null || Number.isNaN(share) ? "–" : `${Math.round(100 * share)} %`);

/** Return milliseconds in a readable unit. */
export function milliseconds(ms) {
    if (ms === null) return "–";
    if (ms >= 10_000) return `${(ms / 1000).toFixed(0)} s`;
    if (ms >= 1000) return `${(ms / 1000).toFixed(1)} s`;
    return `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
}

/** Return a rate: whole numbers, except for slow ones. */
export const rate = (perSecond) =>
    perSecond === null ? "–" : count(perSecond < 10 ? Number(perSecond.toFixed(1)) : Math.round(perSecond));

/** Return an age in words. */
export function age(seconds) {
    if (seconds < 1) return "less than 1 s";
    if (seconds < 120) return `${Math.floor(seconds)} s`;
    if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
    return `${Math.floor(seconds / 3600)} h`;
}

/** Return bytes in binary units. */
export function bytes(number) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (number >= 1024 && unit < units.length - 1) {
        number /= 1024;
        unit += 1;
    }
    return `${unit && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

/** Return the name of a request: its short number. */
export const requestName = (id) => (id < 0 ? "an unknown request" : `#${id}`);
