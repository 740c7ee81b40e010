// Colours for canvases, read from the style sheet, so that themes are defined in one place.
//
// Browsers resolve a custom property with light-dark(...) only where it is used, so a probe element uses it.

export const NUM_OWNERS = 8;

/** Return a look's colour index and its mark: 0 none, 1 a square in the middle, 2 a bar below the middle. */
export const partsOf = (look) => [look % NUM_OWNERS, Math.floor(look / NUM_OWNERS)];

/** Give a swatch a look; null, of an ended request or no request: leave it. Mutates the swatch. */
export function paint(swatch, look) {
    if (look === null) return;
    const [colour, mark] = partsOf(look);
    Object.assign(swatch.dataset, { owner: colour, mark });
}

/** Return the place of a mark in a square of this side: x, y, width, height; null if there is no mark. */
export function markIn(side, mark) {
    if (mark === 0) return null;
    const third = side / 3;
    return mark === 1 ? [third, third, third, third] : [0, 2 * third, side, third / 2];
}

/** Return the colours of the current theme. */
export function readColours(root = document.documentElement) {
    const probe = document.createElement("span");
    root.append(probe);
    const read = (name) => {
        probe.style.color = `var(--${name})`;
        return getComputedStyle(probe).color;
    };
    const owners = Array.from({ length: NUM_OWNERS }, (_, index) => read(`owner-${index}`));
    const names = [
        "ink",
        "faint",
        "line",
        "ground",
        "panel",
        "accent",
        "free",
        "cached",
        "shared",
        "on-shared",
        "warn",
        "unknown",
    ];
    const colours = { owners, ...Object.fromEntries(names.map((name) => [name, read(name)])) };
    probe.remove();
    return colours;
}

/** Apply a theme: "auto", "light" or "dark". Mutates the document. */
export function applyTheme(choice) {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
}
