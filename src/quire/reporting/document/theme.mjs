// Colours for canvases, read from the style sheet, so that themes are defined in one place.

const NAMES = ["ink", "faint", "line", "ground", "accent", "good", "warn", "free", "cached", "shared", "unknown"];
export const NUM_OWNERS = 8;

/** Return the colours of the current theme, by name. */
export function readColours() {
    const probe = document.createElement("span"); // light-dark(...) is only resolved in an element that uses it
    document.documentElement.append(probe);
    const owners = Array.from({ length: NUM_OWNERS }, (_, index) => `owner-${index}`);
    const found = {};
    for (const name of [...NAMES, ...owners]) {
        probe.style.color = `var(--${name})`;
        found[name] = getComputedStyle(probe).color;
    }
    probe.remove();
    return found;
}

/** Call a function when the theme of the system changes. */
export function onTheme(changed) {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}
