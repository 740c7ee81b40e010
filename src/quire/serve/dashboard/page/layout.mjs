// The layout of blocks on a map: pure arithmetic, so that tests can use a million blocks.

const LARGEST_CELL = 28; // with its gap
const SMALLEST_CELL = 3;
const NO_GAP_BELOW = 5;

/**
 * Return the layout of blocks on a map of a width and a maximum height: with the largest cells that fit,
 * and with several blocks per cell if even the smallest cells do not fit.
 */
export function layoutOf(numBlocks, width, maxHeight) {
    for (let cell = LARGEST_CELL; cell >= SMALLEST_CELL; cell -= 1) {
        const columns = Math.max(1, Math.floor(width / cell));
        const rows = Math.ceil(numBlocks / columns);
        if (rows * cell <= maxHeight) return laidOut(numBlocks, cell, columns, 1);
    }
    const columns = Math.max(1, Math.floor(width / SMALLEST_CELL));
    const rows = Math.max(1, Math.floor(maxHeight / SMALLEST_CELL));
    return laidOut(numBlocks, SMALLEST_CELL, columns, Math.ceil(numBlocks / (columns * rows)));
}

function laidOut(numBlocks, cell, columns, perCell) {
    const numCells = Math.ceil(numBlocks / perCell);
    const rows = Math.ceil(numCells / columns);
    return { cell, gap: cell >= NO_GAP_BELOW ? 1 : 0, columns, rows, perCell, numCells };
}

/** Return the cell at a place on the map; -1 if there is none. */
export function cellAt(layout, x, y) {
    const column = Math.floor(x / layout.cell);
    const row = Math.floor(y / layout.cell);
    if (column < 0 || row < 0 || column >= layout.columns) return -1;
    const cell = row * layout.columns + column;
    return cell < layout.numCells ? cell : -1;
}

/** Return where a key moves the cursor; null if the key does not move it. */
export function moved(layout, cell, key) {
    const inRow = cell % layout.columns;
    const steps = {
        ArrowLeft: -1,
        ArrowRight: 1,
        ArrowUp: -layout.columns,
        ArrowDown: layout.columns,
        PageUp: -10 * layout.columns,
        PageDown: 10 * layout.columns,
        Home: -inRow,
        End: layout.columns - 1 - inRow,
    };
    if (!(key in steps)) return null;
    const target = cell + steps[key];
    if (key === "End") return Math.min(target, layout.numCells - 1);
    return target >= 0 && target < layout.numCells ? target : cell;
}
