// Colours for canvases, read from the style sheet, so that themes are said in one place.
//
// A custom property that says light-dark(...) is only resolved where it is used: a probe uses it.

export const NUM_OWNERS = 8;

/** Return the index of the colour of a request. Numbers are given in order, so neighbours in time differ. */
export const ownerIndex = (owner) => owner % NUM_OWNERS;

/** Return the colours of the theme that is in force. */
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

/** Put the choice of a theme into force: "auto", "light" or "dark". Mutates the document. */
export function applyTheme(choice) {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
}
