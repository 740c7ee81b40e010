// What is drawn: the plots by a stand-in for uPlot, and the block map on a canvas that writes down what is drawn on it.

import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

import { BlockMap } from "../../src/quire/serve/dashboard/page/block_map.mjs";
import { History } from "../../src/quire/serve/dashboard/page/history.mjs";
import { Plots } from "../../src/quire/serve/dashboard/page/plots.mjs";
import { CACHED, Memory, ROOT, USED } from "../../src/quire/serve/dashboard/page/state.mjs";
import { Element, openDocument } from "./document.mjs";

/** A context that keeps every rectangle and text with the state in which it is drawn. */
class Context {
    constructor() {
        this.drawn = [];
        this.globalAlpha = 1;
    }

    fillRect(...place) {
        this.drawn.push({ place, style: this.fillStyle, alpha: this.globalAlpha });
    }

    fillText(text, ...place) {
        this.drawn.push({ text, place });
    }

    createPattern() {
        return "hatch";
    }
}
for (const name of ["save", "restore", "clearRect", "beginPath", "moveTo", "lineTo", "stroke", "strokeRect"]) {
    Context.prototype[name] = () => {};
}

let pictures = [];
const draw = () => pictures.splice(0).forEach((picture) => picture());

beforeEach(() => {
    openDocument();
    pictures = [];
    Object.assign(globalThis, {
        window: { devicePixelRatio: 1 },
        requestAnimationFrame: (picture) => pictures.push(picture),
        getComputedStyle: (probe) => ({ color: probe.style.color.slice("var(--".length, -1) }),
        ResizeObserver: class {
            observe() {}
        },
        OffscreenCanvas: class {
            getContext() {
                return new Context();
            }
        },
        uPlot: class {
            constructor(options) {
                this.options = options;
                this.ctx = new Context();
                this.bbox = { top: 10, height: 100 };
            }
            setData(data) {
                this.data = data;
            }
            valToPos(time) {
                return time;
            }
        },
    });
});

// ---- plots ----------------------------------------------------------------------------------------------------------

/** Plots of a history whose samples are at some times, all their columns counted from the time. */
function plotsOf(times) {
    const history = new History(300);
    for (const name of Object.keys(history.columns)) history.columns[name] = times.map((time) => time + name.length);
    history.columns.time = times;
    const figure = (name) =>
        new Element("figure", { "data-plot": name }, new Element("div", { class: "plot" }), new Element("p", { class: "now" }));
    const root = new Element("main", {}, ...["memory", "throughput", "ttft", "itl"].map(figure));
    const plots = new Plots(root, history);
    return { history, plots, figures: root.children };
}

test("the window is the shortest that holds what is known, and ends now", () => {
    const cases = [
        [[], [-60, 0]],
        [[5], [-55, 5]],
        [[100, 160], [100, 160]],
        [[100, 161], [41, 161]],
        [[0, 120.5], [-179.5, 120.5]],
        [[0, 299], [-1, 299]],
        [[0, 400], [100, 400]],
    ];
    for (const [times, range] of cases) assert.deepEqual(plotsOf(times).plots.window(), range, String(times));
});

test("marks on the axis lie at whole steps before now, and are told in seconds and minutes", () => {
    const told = (times) => {
        const { plots } = plotsOf(times);
        return plots.splits().map((time) => plots.ago(time));
    };
    assert.deepEqual(told([100, 160]), ["−45 s", "−30 s", "−15 s", "now"]);
    assert.deepEqual(told([100, 200]), ["−90 s", "−1 min", "−30 s", "now"]);
    assert.deepEqual(told([0, 299]), ["−4 min", "−3 min", "−2 min", "−1 min", "now"]);
});

test("areas lie on one another, lines do not, and the newest values are told in words", () => {
    const { history, plots, figures } = plotsOf([100, 101]);
    Object.assign(history.columns, { used: [1, 2], cached: [10, 20], free: [1000, 2000] });
    Object.assign(history.columns, { generated: [3, 2.5], prompt: [400, 1500] });
    history.ttft = 1234;
    plots.update();
    const [memory, throughput, ttft] = plots.plots.map(({ plot }) => plot.data);
    assert.deepEqual(memory, [[100, 101], [1011, 2022], [11, 22], [1, 2]]);
    assert.deepEqual(throughput, [[100, 101], [3, 2.5], [400, 1500]]);
    assert.deepEqual(ttft[1], history.columns.ttftSlow);
    const words = figures.map((figure) => figure.querySelector(".now").textContent);
    assert.deepEqual(words, ["2 used, 20 cached, 2,000 free", "2.5 new, 1,500 prompt", "median 1.2 s", ""]);
});

test("nothing is told of nothing", () => {
    const { plots, figures } = plotsOf([]);
    plots.update();
    assert.deepEqual(figures.map((figure) => figure.querySelector(".now").textContent), ["", "", "", ""]);
    const [x, y] = plots.plots[0].plot.options.axes;
    assert.deepEqual([x.values(null, [0, 30]), y.values(null, [0, 1])], [["", ""], ["", ""]]);
});

test("a scale begins at 0, has room above lines, and none above the whole memory", () => {
    const [memory, throughput] = plotsOf([1]).plots.plots.map(({ plot }) => plot.options.scales.y.range);
    assert.deepEqual([memory(null, 5, 64), memory(null, null, null)], [[0, 64], [0, 1]]);
    assert.deepEqual([throughput(null, 5, 100)[0], Math.round(throughput(null, 5, 100)[1])], [0, 110]);
});

test("what interrupts is marked in every plot: preemptions by a line, evictions by a tick, within the window", () => {
    const { history, plots } = plotsOf([100, 160]);
    history.marks = [
        { time: 99, kind: "preempted", number: 1 },
        { time: 100, kind: "preempted", number: 1 },
        { time: 130, kind: "evicted", number: 9 },
        { time: 161, kind: "evicted", number: 9 },
    ];
    for (const { plot } of plots.plots) {
        plot.options.hooks.draw[0](plot);
        assert.deepEqual(
            plot.ctx.drawn.map(({ place, style }) => [...place, style]),
            [
                [100, 10, 1, 100, "warn"],
                [130, 106, 1, 4, "warn"],
            ],
        );
    }
});

// ---- the map --------------------------------------------------------------------------------------------------------

function openMap(numBlocks, width = 280) {
    const context = new Context();
    const canvas = Object.assign(new Element("canvas"), { getContext: () => context });
    const marker = new Element("div", { class: "cursor" });
    const host = Object.assign(new Element("div", {}, canvas, marker), { clientWidth: width });
    const told = [];
    const map = new BlockMap(host, { onPoint: (...point) => told.push(point) });
    const memory = new Memory(numBlocks);
    map.show(memory, (owner) => (owner < 100 ? owner : null));
    draw();
    const drawn = () => context.drawn.splice(0);
    drawn();
    return { map, memory, host, canvas, marker, told, drawn };
}

test("only what changed is drawn again, once for each picture", () => {
    const { map, memory, drawn } = openMap(50);
    const before = map.numDrawn;
    memory.write([7, USED, 1, 3, ROOT, 0]);
    memory.write([49, CACHED, 0, -1, ROOT, 0]);
    map.update([7, 49]);
    map.update([7]);
    assert.equal(pictures.length, 1);
    draw();
    assert.equal(map.numDrawn - before, 2);
    assert.deepEqual(drawn().map((each) => each.style).filter((style) => style !== "ground"), ["owner-3", "cached"]);
    map.update(null);
    draw();
    assert.equal(map.numDrawn - before, 2 + 50);
    map.update([]);
    draw();
    assert.equal(map.numDrawn - before, 2 + 50);
});

test("a block has the colour and the mark of its request's look, and none of one that has ended", () => {
    const { map, memory, drawn } = openMap(50);
    memory.write([1, USED, 1, 9, ROOT, 0]);
    memory.write([2, USED, 1, 17, ROOT, 0]);
    memory.write([3, USED, 1, 200, ROOT, 0]);
    map.update([1, 2, 3]);
    draw();
    const cells = drawn().filter((each) => each.style !== "ground");
    assert.deepEqual(cells.map((each) => each.style), ["owner-1", "panel", "owner-1", "panel", "unknown"]);
    const [, square, , bar] = cells.map((each) => each.place);
    assert.ok(square[2] === square[3] && bar[2] > 3 * bar[3], "a square in the middle, a bar across");
});

test("the cursor follows mouse and keys, and tells which blocks it is on", () => {
    const { host, canvas, marker, told } = openMap(50);
    assert.ok(marker.hidden);
    canvas.fire("pointermove", { offsetX: 30, offsetY: 30 });
    assert.deepEqual([told.pop(), marker.hidden, marker.style.left, marker.style.top], [[11, 1, false], false, "28px", "28px"]);
    assert.ok(host.fire("keydown", { key: "ArrowDown" }));
    assert.deepEqual(told.pop(), [21, 1, true]);
    assert.ok(!host.fire("keydown", { key: "ArrowDown", ctrlKey: true }) && !host.fire("keydown", { key: "x" }));
    assert.equal(told.length, 0);
    canvas.fire("pointermove", { offsetX: 30, offsetY: 5000 });
    assert.deepEqual([told.pop(), marker.hidden], [[-1, 0, false], true]);
    host.fire("focus");
    assert.deepEqual(told.pop(), [0, 1, true], "by keys it begins with the first block");
    document.activeElement = host;
    host.fire("pointerleave");
    assert.equal(told.length, 0, "the mouse leaves what the keyboard holds");
    host.fire("blur");
    assert.deepEqual(told.pop(), [-1, 0, false]);
});

test("a change under the cursor is told again, another one is not", () => {
    const { map, canvas, told } = openMap(50);
    canvas.fire("pointermove", { offsetX: 30, offsetY: 30 });
    told.splice(0);
    map.update([12]);
    assert.deepEqual(told, []);
    map.update([3, 11]);
    map.update(null);
    assert.deepEqual(told, [[11, 1, false], [11, 1, false]]);
});

test("where blocks share a cell the cursor tells of them all, and the last cell of what is left", () => {
    const { map, host, canvas, told } = openMap(100_000);
    const { perCell, numCells } = map.layout;
    assert.ok(perCell > 1);
    assert.equal(canvas.dataset.perCell, String(perCell));
    map.point(numCells - 1, false);
    const [first, count] = told.pop();
    assert.equal(first + count, 100_000);
    assert.equal(first, (numCells - 1) * perCell);
    host.clientWidth = 1600; // wider: fewer blocks to a cell
    map.redraw();
    draw();
    assert.ok(map.layout.perCell < perCell);
    assert.ok(map.cursor < map.layout.numCells);
});

test("without a memory or a width nothing is drawn, and the keyboard finds nothing", () => {
    const { host, map, memory } = openMap(8, 0);
    assert.equal(map.layout, null);
    assert.ok(!host.fire("keydown", { key: "ArrowRight" }));
    map.update([1]);
    draw();
    host.clientWidth = 100;
    map.show(memory, () => null);
    draw();
    assert.equal(map.numDrawn, 8);
});
