// What is pure in the modules of reports: numbers as Python writes them, ticks, stacks, and the pictures of a film.

import assert from "node:assert/strict";
import { test } from "node:test";
import { deflateSync } from "node:zlib";

import { logTicks, stacked } from "../../src/quire/reporting/document/charts.mjs";
import { describeCell, layoutOf, unpack } from "../../src/quire/reporting/document/film.mjs";
import { showNumber } from "../../src/quire/reporting/document/format.mjs";

test("numbers are written as the still pictures have them", () => {
    // the same cases as in tests/pure/test_report_document.py
    const cases = [0, 0.00012, 3.14159, 999.4, 999.5, 1234567];
    assert.deepEqual(cases.map((value) => showNumber(value)), ["0", "0.00012", "3.14", "999", "1,000", "1,234,567"]);
    const times = [0, 0.0123, 0.9994, 0.9996, 12.34, 1500].map((value) => showNumber(value, "s"));
    assert.deepEqual(times, ["0 s", "12.3 ms", "999 ms", "1 s", "12.3 s", "1,500 s"]);
    assert.equal(showNumber(null, "s"), "–");
});

test("ticks of logarithmic axes are 1, 2 and 5, or only 1 over many decades", () => {
    const near = (found, wanted) => assert.deepEqual(found.map((value) => Number(value.toPrecision(6))), wanted);
    near(logTicks(0.02, 0.5), [0.02, 0.05, 0.1, 0.2, 0.5]);
    near(logTicks(0.001, 100), [0.001, 0.01, 0.1, 1, 10, 100]);
    near(logTicks(5.1, 6.0), [5.2, 5.4, 5.6, 5.8, 6.0]);
});

test("areas lie on one another, and hidden ones take no room", () => {
    const columns = [[1, 2], [3, null], [5, 6]];
    assert.deepEqual(stacked(columns, () => true), [[1, 2], [4, 2], [9, 8]]);
    assert.deepEqual(stacked(columns, (index) => index !== 1), [[1, 2], [1, 2], [6, 8]]);
    assert.deepEqual(stacked([], () => true), []);
});

test("every cell has a place within the width, and the height where cells can be smaller", () => {
    for (let numCells = 1; numCells <= 2048; numCells += 7) {
        for (const width of [280, 360, 700, 1060]) {
            const { cell, columns } = layoutOf(numCells, width);
            assert.ok(columns * cell <= width && cell >= 2);
            assert.ok(Math.ceil(numCells / columns) * cell <= 320 || cell === 2);
        }
    }
});

test("pictures are unpacked as they were packed, and cells say what they are", async () => {
    const picture = (owners, ...shares) =>
        Buffer.concat([new Uint8Array(new Uint32Array(owners).buffer), Uint8Array.from(shares.flat())]);
    const pictures = [picture([0, 1, 70_000], [0, 255, 255], [255, 0, 0]), picture([0, 0, 2], [0, 0, 128], [0, 0, 64])];
    const film = { times: [0, 1], numCells: 3, numBlocks: 3, blocksPerCell: 1 };
    film.pictures = deflateSync(Buffer.concat(pictures)).toString("base64");
    const [first, second] = await unpack(film);
    assert.deepEqual([...first.owners], [0, 1, 70_000]);
    assert.deepEqual([[...second.held], [...second.cached]], [[0, 0, 128], [0, 0, 64]]);
    const said = [0, 1, 2].map((cell) => describeCell(film, first, cell));
    const expected = ["Block 0: only cached", "Block 1: held by several requests", "Block 2: held by request 69998"];
    assert.deepEqual(said, expected);
    assert.equal(describeCell(film, second, 0), "Block 0: free");
    const binned = { ...film, numBlocks: 8, blocksPerCell: 3 };
    assert.equal(describeCell(binned, second, 2), "Blocks 6 to 7: 50 % held, first by request 0, 25 % only cached");
    assert.equal(describeCell(binned, second, 0), "Blocks 0 to 2: none held, 0 % only cached");
});
