// The block map over time: a slider over moments, and a canvas with a cell for each block, or for a few blocks.
//
//     free    a pale cell        cached  a grey one       one   the colour of its request       shared   amber
//
// A cell of several blocks is stronger if more of them are held. Colours repeat after eight requests; the text next to
// the slider and under the pointer has the numbers.

import { NUM_OWNERS, onTheme, readColours } from "./theme.mjs";

const [NOBODY, SHARED, FIRST_OWNER] = [0, 1, 2]; // as in holders.py
const BYTES_PER_CELL = 6;
const LARGEST_CELL = 22;
const MAX_HEIGHT = 320;
const FAINTEST = 0.4; // the opacity of the smallest held share
const FULL = 255;
const PACE_MS = 120;

/** Return the size of cells, and the number of columns. */
export function layoutOf(numCells, width) {
    for (let cell = LARGEST_CELL; cell > 2; cell -= 1) {
        const columns = Math.max(1, Math.floor(width / cell));
        if (Math.ceil(numCells / columns) * cell <= MAX_HEIGHT) return { cell, columns };
    }
    return { cell: 2, columns: Math.max(1, Math.floor(width / 2)) };
}

/** Return the pictures of a film: three planes each. */
export async function unpack(film) {
    const packed = Uint8Array.from(atob(film.pictures), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bytes = await new Response(stream).arrayBuffer();
    const size = film.numCells;
    return film.times.map((_, index) => {
        const start = index * size * BYTES_PER_CELL;
        return {
            owners: new Uint32Array(bytes.slice(start, start + 4 * size)),
            held: new Uint8Array(bytes, start + 4 * size, size),
            cached: new Uint8Array(bytes, start + 5 * size, size),
        };
    });
}

/** Return a description of a cell. */
export function describeCell(film, picture, cell) {
    const first = cell * film.blocksPerCell;
    const last = Math.min(first + film.blocksPerCell, film.numBlocks) - 1;
    const owner = picture.owners[cell];
    const who = owner === SHARED ? "by several requests" : `by request ${owner - FIRST_OWNER}`;
    if (first === last) {
        if (owner !== NOBODY) return `Block ${first}: held ${who}`;
        return `Block ${first}: ${picture.cached[cell] ? "only cached" : "free"}`;
    }
    const share = (part) => `${Math.round((100 * part) / FULL)} %`;
    const held = owner === NOBODY ? "none held" : `${share(picture.held[cell])} held, first ${who}`;
    return `Blocks ${first} to ${last}: ${held}, ${share(picture.cached[cell])} only cached`;
}

/** A film in its figure. `onMoment(time)` is called with its position. */
export class FilmView {
    constructor(figure, film, onMoment) {
        this.film = film;
        this.onMoment = onMoment;
        this.canvas = figure.querySelector("canvas");
        this.slider = figure.querySelector("input");
        this.words = figure.querySelector("output");
        this.detail = figure.querySelector(".detail");
        this.button = figure.querySelector("button");
        this.pictures = [];
        this.timer = null;
        this.cell = -1; // under the pointer
        this.slider.max = film.times.length - 1;
        this.slider.addEventListener("input", () => this.show());
        this.button.addEventListener("click", () => (this.timer === null ? this.play() : this.pause()));
        this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
        this.canvas.addEventListener("pointerleave", () => this.point(-1, -1));
        onTheme(() => this.draw());
    }

    /** Unpack the pictures and show the one in the middle: the ends of a run are mostly empty. Mutates. */
    async start() {
        this.pictures = await unpack(this.film);
        this.slider.value = Math.floor(this.pictures.length / 2);
        new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
        this.show();
    }

    get index() {
        return Number(this.slider.value);
    }

    show() {
        this.words.textContent = this.film.captions[this.index];
        this.slider.setAttribute("aria-valuetext", this.film.captions[this.index]);
        this.tell();
        this.draw();
        this.onMoment(this.film.times[this.index]);
    }

    play() {
        if (this.index >= this.pictures.length - 1) this.slider.value = 0;
        this.button.textContent = "Pause";
        this.timer = setInterval(() => {
            this.slider.value = this.index + 1;
            this.show();
            if (this.index >= this.pictures.length - 1) this.pause();
        }, PACE_MS);
    }

    pause() {
        clearInterval(this.timer);
        this.timer = null;
        this.button.textContent = "Play";
    }

    point(x, y) {
        const { cell, columns } = this.layout;
        const column = Math.floor(x / cell);
        const found = Math.floor(y / cell) * columns + column;
        this.cell = x >= 0 && column < columns && found < this.film.numCells ? found : -1;
        this.tell();
    }

    tell() {
        const picture = this.pictures[this.index];
        this.detail.textContent = this.cell < 0 || !picture ? "" : describeCell(this.film, picture, this.cell);
    }

    draw() {
        const { canvas, film } = this;
        const width = canvas.parentElement.clientWidth;
        const picture = this.pictures[this.index];
        if (!width || !picture) return;
        this.layout = layoutOf(film.numCells, width);
        const { cell, columns } = this.layout;
        const rows = Math.ceil(film.numCells / columns);
        const scale = devicePixelRatio || 1;
        canvas.width = Math.round(columns * cell * scale);
        canvas.height = Math.round(rows * cell * scale);
        canvas.style.width = `${columns * cell}px`;
        canvas.style.height = `${rows * cell}px`;
        const context = canvas.getContext("2d");
        context.scale(scale, scale);
        const colours = readColours();
        const side = cell > 4 ? cell - 1 : cell;
        for (let index = 0; index < film.numCells; index += 1) {
            const place = [(index % columns) * cell, Math.floor(index / columns) * cell, side, side];
            this.drawCell(context, colours, picture, index, place);
        }
    }

    drawCell(context, colours, picture, index, place) {
        const [owner, held, cached] = [picture.owners[index], picture.held[index], picture.cached[index]];
        context.fillStyle = cached && 2 * cached >= FULL - held ? colours.cached : colours.free;
        context.fillRect(...place);
        if (owner === NOBODY) return;
        context.globalAlpha = Math.max(FAINTEST, held / FULL);
        context.fillStyle = owner === SHARED ? colours.shared : colours[`owner-${(owner - FIRST_OWNER) % NUM_OWNERS}`];
        context.fillRect(...place);
        context.globalAlpha = 1;
    }
}
