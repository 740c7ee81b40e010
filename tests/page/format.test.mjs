// Numbers and words of the page, at and around each limit at which they change their form.

import assert from "node:assert/strict";
import { test } from "node:test";

import {
    age,
    bytes,
    count,
    counted,
    milliseconds,
    percent,
    rate,
    requestName,
} from "../../src/quire/serve/dashboard/page/format.mjs";

/** Check a function against pairs of what goes in and what the page shows. */
const shows = (name, format, pairs) =>
    test(name, () => {
        for (const [value, text] of pairs) assert.equal(format(value), text, `${name} of ${value}`);
    });

shows("count", count, [
    [0, "0"],
    [999, "999"],
    [1000, "1,000"],
    [12_345_678, "12,345,678"],
]);
shows("a noun is plural but for one", (number) => counted(number, "block"), [
    [0, "0 blocks"],
    [1, "1 block"],
    [2, "2 blocks"],
    [1001, "1,001 blocks"],
]);
shows("percent", percent, [
    [null, "–"],
    [NaN, "–"],
    [0, "0 %"],
    [0.004, "0 %"],
    [0.005, "1 %"],
    [1, "100 %"],
]);
shows("milliseconds", milliseconds, [
    [null, "–"],
    [0, "0.0 ms"],
    [9.94, "9.9 ms"],
    [10, "10 ms"],
    [999, "999 ms"],
    [1000, "1.0 s"],
    [9949, "9.9 s"],
    [10_000, "10 s"],
    [61_400, "61 s"],
]);
shows("rate", rate, [
    [null, "–"],
    [0, "0"],
    [0.04, "0"],
    [0.25, "0.3"],
    [9.94, "9.9"],
    [9.96, "10"],
    [10.4, "10"],
    [1234.5, "1,235"],
]);
shows("age", age, [
    [0.99, "less than 1 s"],
    [1, "1 s"],
    [119.9, "119 s"],
    [120, "2 min"],
    [7199, "119 min"],
    [7200, "2 h"],
    [86_400, "24 h"],
]);
shows("bytes", bytes, [
    [0, "0 B"],
    [1023, "1023 B"],
    [1024, "1.0 KiB"],
    [99.9 * 1024, "99.9 KiB"],
    [100 * 1024, "100 KiB"],
    [1024 ** 2, "1.0 MiB"],
    [80 * 1024 ** 3, "80.0 GiB"],
    [1024 ** 4, "1.0 TiB"],
    [5000 * 1024 ** 4, "5000 TiB"],
]);
shows("the name of a request", requestName, [
    [-1, "an unknown request"],
    [0, "#0"],
    [12, "#12"],
]);
