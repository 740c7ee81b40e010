// The pure modules of the dashboard: frames added up are the full state, however they are cut.
//
// The oracle keeps the state of a made-up engine as plain objects and tells frames of differences; the model of the
// page has only the frames. Random from seeds, so that a failure can be repeated.

import assert from "node:assert/strict";
import { test } from "node:test";

import { History, quantile } from "../../src/quire/serve/dashboard/page/history.mjs";
import { cellAt, layoutOf, moved } from "../../src/quire/serve/dashboard/page/layout.mjs";
import { readLines } from "../../src/quire/serve/dashboard/page/live.mjs";
import { TreeIndex } from "../../src/quire/serve/dashboard/page/prefix_tree.mjs";
import {
    CACHED,
    FREE,
    Memory,
    Model,
    NOBODY,
    NUM_LOOKS,
    ROOT,
    UNPUBLISHED,
    USED,
} from "../../src/quire/serve/dashboard/page/state.mjs";
import { readEvents } from "../../src/quire/serve/dashboard/page/chat.mjs";
import { stack } from "../../src/quire/serve/dashboard/page/plots.mjs";

const HELLO = {
    type: "hello",
    model: "guide",
    num_blocks: 64,
    block_size: 16,
    bytes_per_block: 1024,
    scope: "operator",
    tenant: "",
};

/** Numbers from a seed (mulberry32). */
function random(seed) {
    return () => {
        seed = (seed + 0x6d2b79f5) | 0;
        let value = Math.imul(seed ^ (seed >>> 15), 1 | seed);
        value = (value + Math.imul(value ^ (value >>> 7), 61 | value)) ^ value;
        return ((value ^ (value >>> 14)) >>> 0) / 4294967296;
    };
}

/** A made-up engine: blocks and requests that change at random, told as rows of frames. */
class Engine {
    constructor(seed) {
        this.random = random(seed);
        this.time = 0;
        this.lastRequest = 0;
        this.numEnded = 0;
        this.totals = {
            prompt_tokens: 0,
            generated_tokens: 0,
            queried_tokens: 0,
            hit_tokens: 0,
            evictions: 0,
            preemptions: 0,
            rejected: 0,
        };
        this.restart();
    }

    pick(number) {
        return Math.floor(this.random() * number);
    }

    restart() {
        this.time = 0;
        this.blocks = Array.from({ length: HELLO.num_blocks }, (_, id) => [id, FREE, 0, NOBODY, UNPUBLISHED, 0]);
        this.requests = new Map();
    }

    frame(full) {
        this.time += this.random();
        const changed = new Set();
        const touched = new Set();
        const gone = [];
        for (let count = this.pick(12); count > 0; count -= 1) {
            const id = this.pick(HELLO.num_blocks);
            const state = [FREE, USED, CACHED][this.pick(3)];
            const refs = state === USED ? 1 + this.pick(4) : 0;
            const owner = state === FREE ? NOBODY : this.pick(9) - 1;
            const parent = state === FREE ? UNPUBLISHED : this.pick(HELLO.num_blocks + 2) - 2;
            this.blocks[id] = [id, state, refs, owner, parent, this.time];
            changed.add(id);
        }
        for (let count = this.pick(4); count > 0; count -= 1) {
            if (this.requests.size && this.pick(2)) {
                const id = [...this.requests.keys()][this.pick(this.requests.size)];
                if (touched.has(id)) continue;
                this.requests.delete(id);
                gone.push([id, 9, 30, 2]);
                this.numEnded += 1;
            } else {
                const id = this.pick(3) && this.requests.size ? [...this.requests.keys()][0] : ++this.lastRequest;
                this.requests.set(id, [
                    id,
                    "running",
                    "",
                    10,
                    this.pick(20),
                    20 + this.pick(9),
                    this.pick(9),
                    this.pick(2),
                    `req-${id}`,
                ]);
                touched.add(id);
            }
        }
        this.totals.generated_tokens += this.pick(50);
        return {
            type: "frame",
            t: this.time,
            step: 1,
            full,
            blocks: full
                ? this.blocks.filter((row) => row[1] !== FREE || this.pick(2))
                : [...changed].map((id) => this.blocks[id]),
            requests: full
                ? [...this.requests.values()]
                : [...touched].filter((id) => this.requests.has(id)).map((id) => this.requests.get(id)),
            gone: full ? [] : gone,
            num_ended: this.numEnded,
            ledger: { used: 1, cached: 2, free: 61, stored: 0, reserved: 0, fragmented: 0, saved: 0 },
            totals: { ...this.totals },
            running: this.requests.size,
            waiting: 0,
            state: "ready",
            ttft_ms: [],
            itl_ms: [],
            events: gone.map(([id]) => [this.time, "finished", id, 5]),
        };
    }
}

function assertEqual(model, engine) {
    for (const [id, state, refs, owner, parent] of engine.blocks) {
        const block = model.memory.block(id);
        assert.deepEqual(
            [block.state, block.refs, block.owner, block.parent],
            [state, refs, owner, parent],
            `block ${id}`,
        );
    }
    const counts = [0, 0, 0, 0];
    for (const [, state, refs] of engine.blocks)
        counts[state === FREE ? 0 : state === CACHED ? 3 : refs > 1 ? 2 : 1] += 1;
    assert.deepEqual(model.memory.counts, counts);
    assert.deepEqual(
        [...model.requests.keys()].sort((a, b) => a - b),
        [...engine.requests.keys()].sort((a, b) => a - b),
    );
    for (const [id, row] of engine.requests) assert.deepEqual(Object.values(model.requests.get(id)).slice(0, 9), row);
}

test("frames added up are the full state", () => {
    for (let seed = 0; seed < 60; seed += 1) {
        const engine = new Engine(seed);
        const model = new Model(HELLO);
        for (let step = 0; step < 60; step += 1) {
            const isRestart = step > 0 && engine.pick(20) === 0;
            if (isRestart) engine.restart();
            const frame = engine.frame(step === 0 || isRestart || engine.pick(15) === 0);
            const change = model.apply(frame);
            assertEqual(model, engine);
            assert.equal(change.blocks === null, frame.full);
            if (!frame.full) assert.deepEqual(new Set(change.blocks), new Set(frame.blocks.map((row) => row[0])));
            assert.ok(model.events.length <= 400 && model.ended.length <= 12);
            assert.equal(model.numEnded, engine.numEnded);
        }
    }
});

test("what ends is remembered with how it ended", () => {
    const model = new Model(HELLO);
    const engine = new Engine(1);
    const frame = {
        ...engine.frame(true),
        blocks: [],
        requests: [[7, "running", "ada", 4, 4, 5, 0, 0, "req-1"]],
        gone: [],
        events: [],
    };
    model.apply(frame);
    model.apply({ ...frame, full: false, requests: [], gone: [[7, 31, 32, 16]], events: [[1, "aborted", 7, 0]] });
    assert.equal(model.requests.size, 0);
    const { id, status, tenant, computed, total, cached } = model.ended[0];
    assert.deepEqual([id, status, tenant, computed, total, cached], [7, "aborted", "ada", 31, 32, 16]);
});

test("a request that begins and ends in one frame is among those that ended, a replaced beam is not", () => {
    const model = new Model(HELLO);
    const frame = { ...new Engine(1).frame(true), blocks: [], requests: [], gone: [], events: [] };
    model.apply(frame);
    const row = (id, ...more) => [id, ...more, 4, 4, 5, 0, 0, `req-${id}`];
    const change = model.apply({
        ...frame,
        full: false,
        requests: [row(8, "finished", "ada"), row(9, "running", "ada")],
        gone: [
            [8, 5, 5, 3],
            [9, 5, 5, 3],
        ],
        events: [
            [1, "admitted", 8, 4],
            [1, "finished", 8, 1],
        ],
        num_ended: 7,
    });
    assert.ok(change.requests && model.requests.size === 0 && model.lookOf(8) === null);
    assert.deepEqual(Math.max(...model.looks), 0);
    const listed = model.ended.map(({ id, status, call, computed, cached }) => [id, status, call, computed, cached]);
    assert.deepEqual([listed, model.numEnded], [[[8, "finished", "req-8", 5, 3]], 7]);
});

test("up to twenty-four requests look each another way, and keep their look", () => {
    const next = random(5);
    const model = new Model(HELLO);
    const engine = new Engine(2);
    const row = (id) => [id, "running", "ada", 4, 4, 5, 0, 0, `req-${id}`];
    const frame = { ...engine.frame(true), blocks: [], requests: [], gone: [], events: [] };
    model.apply(frame);
    let running = [];
    for (let turn = 0; turn < 300; turn += 1) {
        const before = new Map(running.map((id) => [id, model.lookOf(id)]));
        const gone = running.filter(() => next() < 0.2);
        const added = Array.from({ length: Math.floor(next() * 8) }, (_, place) => 1000 * turn + place);
        running = running.filter((id) => !gone.includes(id));
        added.length = Math.min(added.length, 24 - running.length);
        running.push(...added);
        model.apply({ ...frame, full: false, gone: gone.map((id) => [id, 1, 1, 0]) });
        model.apply({ ...frame, full: false, requests: running.map(row) });
        const looks = running.map((id) => model.lookOf(id));
        assert.equal(new Set(looks).size, running.length);
        for (const id of running) if (before.has(id)) assert.equal(model.lookOf(id), before.get(id));
        for (const id of gone) assert.equal(model.lookOf(id), null);
    }
    const many = Array.from({ length: 60 }, (_, place) => 10 ** 6 + place);
    model.apply({ ...frame, requests: many.map(row) });
    const numOf = Array.from({ length: NUM_LOOKS }, (_, look) => many.filter((id) => model.lookOf(id) === look).length);
    assert.ok(Math.max(...numOf) - Math.min(...numOf) <= 1, "more of them share looks evenly");
});

test("a block that is not there is not written", () => {
    const memory = new Memory(4);
    assert.ok(!memory.write([4, USED, 1, 1, ROOT, 0]) && !memory.write([-1, USED, 1, 1, ROOT, 0]));
    assert.deepEqual(memory.counts, [4, 0, 0, 0]);
});

test("a request reads its own blocks and those before them", () => {
    const memory = new Memory(8);
    memory.write([0, USED, 2, 1, ROOT, 0]);
    memory.write([1, USED, 2, 1, 0, 0]);
    memory.write([2, USED, 1, 1, 1, 0]);
    memory.write([3, USED, 1, 2, 1, 0]);
    memory.write([4, USED, 1, 2, UNPUBLISHED, 0]);
    memory.write([5, CACHED, 0, 2, ROOT, 0]);
    assert.deepEqual(memory.blocksOf(2), new Set([3, 1, 0, 4]));
});

test("the tree holds every published block once, in runs, within its bound", () => {
    for (let seed = 100; seed < 140; seed += 1) {
        const draw = random(seed);
        const memory = new Memory(200);
        for (let id = 0; id < 200; id += 1) {
            const parent = draw() < 0.1 || id === 0 ? ROOT : Math.floor(draw() * id);
            if (draw() < 0.9) memory.write([id, draw() < 0.5 ? CACHED : USED, 1, Math.floor(draw() * 3), parent, 0]);
        }
        const index = new TreeIndex(memory);
        const { runs, numHidden } = index.visible(() => true, 1000);
        const seen = runs.flatMap((run) => run.blocks);
        assert.equal(new Set(seen).size, seen.length);
        assert.equal(seen.length, index.numPublished);
        assert.equal(numHidden, 0);
        for (const run of runs) {
            const places = run.blocks.slice(1).map((id) => memory.parents[id]);
            assert.deepEqual(places, run.blocks.slice(0, -1));
            assert.equal(
                run.numBelow,
                run.children.reduce((sum, id) => sum + index.sizes[id], 0),
            );
        }
        assert.equal(index.visible(() => true, 7).runs.length, 7);
        assert.ok(index.visible(() => true, 7).numHidden > 0);
    }
});

test("blocks in a circle do not hold the tree up", () => {
    const memory = new Memory(3);
    memory.write([0, CACHED, 0, 1, 1, 0]);
    memory.write([1, CACHED, 0, 1, 0, 0]);
    memory.write([2, CACHED, 0, 1, ROOT, 0]);
    assert.deepEqual(
        new TreeIndex(memory).visible(() => true).runs.map((run) => run.first),
        [2],
    );
});

test("a map of any size has a place for every block, within its height", () => {
    for (const numBlocks of [1, 31, 512, 8192, 100_000, 1_000_000, 10_000_000]) {
        for (const width of [40, 360, 813, 1600]) {
            const layout = layoutOf(numBlocks, width, 340);
            assert.ok(layout.columns * layout.cell <= Math.max(width, layout.cell));
            assert.ok(layout.rows * layout.cell <= 340);
            assert.ok(
                layout.numCells * layout.perCell >= numBlocks && (layout.numCells - 1) * layout.perCell < numBlocks,
            );
            assert.ok(layout.columns * layout.rows >= layout.numCells);
            const last = layout.numCells - 1;
            const x = ((last % layout.columns) + 0.5) * layout.cell;
            const y = (Math.floor(last / layout.columns) + 0.5) * layout.cell;
            assert.equal(cellAt(layout, x, y), last);
            assert.equal(cellAt(layout, layout.columns * layout.cell + 1, 1), -1);
        }
    }
});

test("keys move within the map", () => {
    const layout = layoutOf(50, 280, 340);
    assert.equal(layout.columns, 10);
    assert.deepEqual(
        ["ArrowRight", "ArrowDown", "End", "Home", "ArrowUp", "a"].map((key) => moved(layout, 12, key)),
        [13, 22, 19, 10, 2, null],
    );
    assert.equal(moved(layout, 0, "ArrowLeft"), 0);
    assert.equal(moved(layout, 49, "ArrowDown"), 49);
});

test("samples are rates over a second, and begin anew after a restart", () => {
    const engine = new Engine(3);
    const history = new History(10);
    const frame = (generated, ttft) => ({
        ...engine.frame(true),
        events: [[0, "evicted", -1, 3]],
        ttft_ms: ttft,
        totals: { ...engine.totals, generated_tokens: generated },
    });
    history.add(frame(0, [10]), 100);
    assert.ok(!history.add(frame(50, [30]), 100.5));
    assert.ok(history.add(frame(200, [20]), 102));
    assert.deepEqual(
        [history.newest("generated"), history.newest("ttftMiddle"), history.marks[0].number],
        [100, 20, 9],
    );
    history.add(frame(5, []), 103);
    assert.ok(history.add(frame(15, []), 104.25));
    assert.deepEqual([history.newest("generated"), history.newest("ttftMiddle"), history.ttft], [8, null, 20]);
    for (let time = 105; time < 130; time += 1) history.add(frame(20, []), time);
    assert.ok(history.columns.time[0] >= 119 && history.marks.every((mark) => mark.time >= 119));
});

test("samples begin with the last minutes of the server, and fall to nothing where it says nothing", () => {
    const history = new History(300);
    const rows = [
        [9.5, 3, 2, 40, 8, 0.5, 120, 130, 20, 30],
        [8.5, 4, 2, 50, 0, null, null, null, 21, 31],
        [2.5, 5, 2, 60, 0, null, null, null, 22, 32],
    ];
    history.fill(rows, 10, 1000);
    const { time, free, generated, hitRate, ttftMiddle } = history.columns;
    assert.deepEqual(time, [990.5, 991.5, 992.5, 996.5, 997.5, 998.5, 999, 1000]);
    assert.deepEqual([free, generated], [[5, 4, 3, 3, 3, 3, 3, 3], [40, 50, 0, 0, 60, 0, 0, 0]]);
    assert.deepEqual([hitRate[0], ttftMiddle[2], history.ttft, history.itl], [0.5, null, 120, 22]);

    const frame = { ...new Engine(3).frame(true), ttft_ms: [], itl_ms: [], events: [] };
    history.add(frame, 1000);
    history.add(frame, 1001.25);
    history.startBin(1004, frame.totals);
    history.add(frame, 1005);
    assert.deepEqual([time.slice(8), generated.slice(8)], [[1001.25, 1002.25, 1004, 1005], [0, 0, 0, 0]]);
});

test("numbers", () => {
    assert.deepEqual([quantile([], 0.5), quantile([3, 1, 2], 0.5), quantile([1, 2, 3, 4], 0.95)], [null, 2, 4]);
    assert.deepEqual(
        stack([
            [1, 2],
            [10, 20],
            [100, 200],
        ]),
        [
            [111, 222],
            [110, 220],
            [100, 200],
        ],
    );
});

test("lines and events are put together however they are cut", async () => {
    const cut = (text, size) =>
        new Blob([text]).stream().pipeThrough(
            new TransformStream({
                transform(bytes, out) {
                    for (let at = 0; at < bytes.length; at += size) out.enqueue(bytes.slice(at, at + size));
                },
            }),
        );
    const objects = [{ a: "é\u2028€" }, { b: [1, 2] }, { c: "𝄞" }];
    for (const size of [1, 2, 3, 7, 1000]) {
        const lines = [];
        await readLines(cut(objects.map((one) => `${JSON.stringify(one)}\n`).join(""), size), (one) => lines.push(one));
        assert.deepEqual(lines, objects);
        const events = [];
        const text = objects.map((one) => `data: ${JSON.stringify(one)}\n\n`).join("") + "data: [DONE]\n\n";
        await readEvents(cut(text, size), (one) => events.push(one));
        assert.deepEqual(events, objects);
    }
});
