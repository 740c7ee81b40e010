// The block map: each block is a cell on a canvas.
//
//     free    a pale cell            cached  a grey cell
//     one     the colour of its request      shared  amber, hatched, with its reference count if there is room
//
// Only changed cells are drawn again, except after a resize, a new theme or a new highlight. If cells would be too
// small, several blocks share a cell, whose colour is stronger the more of them are held. The cursor is an element over
// the canvas, so moving it redraws nothing: the mouse and the arrow keys move it.

import { markIn, partsOf, readColours } from "./colours.mjs";
import { cellAt, layoutOf, moved } from "./layout.mjs";
import { IS_CACHED, IS_FREE, IS_ONE, IS_SHARED } from "./state.mjs";

const MAX_HEIGHT = 340;
const COUNT_FROM = 15; // px of a cell that has room for its reference count
const HATCH_FROM = 6;
const DIMMED = 0.22;
const FAINTEST = 0.4; // of held blocks, however few

/** A map on a canvas in a focusable host. Calls `onPoint(firstBlock, numBlocks, byKey)` when the cursor moves. */
export class BlockMap {
    constructor(host, { onPoint }) {
        this.lookOf = () => null;
        this.host = host;
        this.canvas = host.querySelector("canvas");
        this.marker = host.querySelector(".cursor");
        this.context = this.canvas.getContext("2d");
        this.onPoint = onPoint;
        this.memory = null;
        this.layout = null;
        this.marked = null; // a set of blocks; null: no highlight
        this.changed = new Set(); // cells to draw in the next frame; all if `isStale`
        this.isStale = true;
        this.isAsked = false;
        this.cursor = -1;
        this.numDrawn = 0; // cells drawn in total
        this.listen();
    }

    listen() {
        new ResizeObserver(() => this.redraw()).observe(this.host);
        this.canvas.addEventListener("pointermove", (event) =>
            this.point(cellAt(this.layout, event.offsetX, event.offsetY), false),
        );
        this.canvas.addEventListener("pointerdown", (event) =>
            this.point(cellAt(this.layout, event.offsetX, event.offsetY), false),
        );
        this.host.addEventListener("pointerleave", () => this.host !== document.activeElement && this.point(-1, false));
        this.host.addEventListener("focus", () => this.memory && this.point(Math.max(this.cursor, 0), true));
        this.host.addEventListener("blur", () => this.point(-1, false));
        this.host.addEventListener("keydown", (event) => {
            if (!this.layout || event.ctrlKey || event.metaKey || event.altKey) return;
            const target = moved(this.layout, Math.max(this.cursor, 0), event.key);
            if (target === null) return;
            event.preventDefault();
            this.point(target, true);
        });
    }

    /** Show a memory from now on; `lookOf` returns the look of a request. Mutates. */
    show(memory, lookOf) {
        this.memory = memory;
        this.lookOf = lookOf;
        this.redraw();
    }

    /** Draw these blocks again in the next frame; null: all blocks. Mutates. */
    update(blocks) {
        if (blocks === null) this.isStale = true;
        else if (this.layout) for (const id of blocks) this.changed.add(Math.floor(id / this.layout.perCell));
        this.ask();
        if (
            this.cursor >= 0 &&
            (blocks === null || blocks.some((id) => Math.floor(id / this.layout.perCell) === this.cursor))
        ) {
            this.tell(false);
        }
    }

    /** Draw everything again. Mutates. */
    redraw() {
        this.isStale = true;
        this.ask();
    }

    /** Highlight these blocks; null: none. Mutates. */
    highlight(blocks) {
        if (blocks === this.marked) return;
        this.marked = blocks;
        this.redraw();
    }

    ask() {
        if (this.isAsked || !this.memory) return;
        this.isAsked = true;
        requestAnimationFrame(() => {
            this.isAsked = false;
            if (this.isStale) this.drawAll();
            else for (const cell of this.changed) this.draw(cell);
            this.changed.clear();
        });
    }

    drawAll() {
        const width = this.host.clientWidth;
        if (width === 0) return;
        this.isStale = false;
        this.colours = readColours();
        const before = this.layout;
        this.layout = layoutOf(this.memory.numBlocks, width, MAX_HEIGHT);
        const { layout, canvas } = this;
        this.scale = window.devicePixelRatio || 1;
        canvas.width = Math.round(layout.columns * layout.cell * this.scale);
        canvas.height = Math.round(layout.rows * layout.cell * this.scale);
        canvas.style.width = `${layout.columns * layout.cell}px`;
        canvas.style.height = `${layout.rows * layout.cell}px`;
        this.hatch = this.makeHatch();
        this.context.font = `600 ${Math.round(Math.min(layout.cell - 7, 13) * this.scale)}px system-ui, sans-serif`;
        this.context.textAlign = "center";
        this.context.textBaseline = "middle";
        for (let cell = 0; cell < layout.numCells; cell += 1) this.draw(cell);
        if (before && this.cursor >= 0) this.cursor = Math.min(this.cursor, layout.numCells - 1);
        this.placeMarker();
        canvas.dataset.perCell = layout.perCell;
    }

    makeHatch() {
        const size = Math.round(4 * this.scale);
        const tile = new OffscreenCanvas(size, size);
        const context = tile.getContext("2d");
        context.strokeStyle = this.colours["on-shared"];
        context.lineWidth = Math.max(1, this.scale * 0.9);
        context.beginPath();
        for (const shift of [-size, 0, size]) {
            context.moveTo(shift - 1, size + 1);
            context.lineTo(shift + size + 1, -1);
        }
        context.stroke();
        return this.context.createPattern(tile, "repeat");
    }

    draw(cell) {
        const { context, layout, scale } = this;
        this.numDrawn += 1;
        const side = (layout.cell - layout.gap) * scale;
        const x = (cell % layout.columns) * layout.cell * scale;
        const y = Math.floor(cell / layout.columns) * layout.cell * scale;
        context.clearRect(x, y, layout.cell * scale, layout.cell * scale);
        context.globalAlpha = this.marked === null || this.isMarked(cell) ? 1 : DIMMED;
        if (layout.perCell === 1) this.drawBlock(cell, x, y, side);
        else this.drawMixture(cell, x, y, side);
        context.globalAlpha = 1;
    }

    drawBlock(block, x, y, side) {
        const kind = this.memory.kind(block);
        this.context.fillStyle = this.colourOf(block, kind);
        this.context.fillRect(x, y, side, side);
        if (this.layout.cell < HATCH_FROM) return;
        if (kind === IS_SHARED) this.drawShared(block, x, y, side);
        if (kind === IS_ONE) this.drawMark(block, x, y, side);
    }

    drawMark(block, x, y, side) {
        const look = this.lookOf(this.memory.owners[block]);
        const place = look === null ? null : markIn(side, partsOf(look)[1]);
        if (place === null) return;
        this.context.fillStyle = this.colours.panel;
        this.context.fillRect(x + place[0], y + place[1], place[2], place[3]);
    }

    /** Draw a cell of several blocks: free or cached, whichever is more, and over it the held ones by their share. */
    drawMixture(cell, x, y, side) {
        const counts = [0, 0, 0, 0];
        const firsts = [-1, -1, -1, -1];
        for (const id of this.blocksIn(cell)) {
            const kind = this.memory.kind(id);
            counts[kind] += 1;
            if (firsts[kind] < 0) firsts[kind] = id;
        }
        const { context } = this;
        const base = counts[IS_CACHED] >= counts[IS_FREE] ? IS_CACHED : IS_FREE;
        const top = counts[IS_SHARED] >= counts[IS_ONE] ? IS_SHARED : IS_ONE;
        const share =
            (counts[IS_ONE] + counts[IS_SHARED]) /
            (counts[IS_ONE] + counts[IS_SHARED] + counts[IS_CACHED] + counts[IS_FREE]);
        context.fillStyle = this.colourOf(-1, base);
        context.fillRect(x, y, side, side);
        if (!counts[top]) return;
        context.globalAlpha *= Math.max(FAINTEST, share);
        context.fillStyle = this.colourOf(firsts[top], top);
        context.fillRect(x, y, side, side);
    }

    drawShared(block, x, y, side) {
        const { context, layout } = this;
        if (layout.cell < COUNT_FROM) {
            context.globalAlpha *= 0.55;
            context.fillStyle = this.hatch;
            context.fillRect(x, y, side, side);
            return;
        }
        const refs = this.memory.refs[block];
        context.fillStyle = this.colours["on-shared"];
        context.fillText(refs > 99 ? "99" : String(refs), x + side / 2, y + side / 2 + this.scale);
    }

    colourOf(block, kind) {
        const { colours } = this;
        if (kind === IS_FREE) return colours.free;
        if (kind === IS_CACHED) return colours.cached;
        if (kind === IS_SHARED) return colours.shared;
        const look = this.lookOf(this.memory.owners[block]);
        return look === null ? colours.unknown : colours.owners[partsOf(look)[0]];
    }

    *blocksIn(cell) {
        const { perCell } = this.layout;
        const end = Math.min((cell + 1) * perCell, this.memory.numBlocks);
        for (let id = cell * perCell; id < end; id += 1) yield id;
    }

    isMarked(cell) {
        for (const id of this.blocksIn(cell)) if (this.marked.has(id)) return true;
        return false;
    }

    /** Set the cursor on a cell; -1: no cell. Mutates. */
    point(cell, byKey) {
        this.cursor = cell;
        this.placeMarker();
        this.tell(byKey);
    }

    tell(byKey) {
        if (this.cursor < 0 || !this.layout) {
            this.onPoint(-1, 0, byKey);
            return;
        }
        const first = this.cursor * this.layout.perCell;
        this.onPoint(first, Math.min(this.layout.perCell, this.memory.numBlocks - first), byKey);
    }

    placeMarker() {
        const { marker, layout, cursor } = this;
        marker.hidden = cursor < 0 || !layout;
        if (marker.hidden) return;
        marker.style.left = `${(cursor % layout.columns) * layout.cell}px`;
        marker.style.top = `${Math.floor(cursor / layout.columns) * layout.cell}px`;
        marker.style.width = marker.style.height = `${layout.cell - layout.gap}px`;
    }
}
