// The table of replicas in words, and the memory of all of them as one.

import assert from "node:assert/strict";
import { test } from "node:test";

import { routeWords } from "../../src/quire/serve/dashboard/page/replicas.mjs";
import { usage } from "../../src/quire/serve/dashboard/page/state.mjs";

test("the reasons of a router are told by how often they were", () => {
    assert.equal(routeWords({ prefix: 3, load: 0, new: 1200, only: 4 }), "1,200 new, 4 only, 3 prefix");
    assert.equal(routeWords({ prefix: 0, load: 0, new: 0, only: 0 }), "–");
    assert.equal(routeWords({}), "–");
});

test("several engines are used as one, and one that is lost has no memory", () => {
    const ledger = { used: 1, cached: 2, free: 5, stored: 9 };
    const [one, other] = [
        { blocks: 8, used: 1, cached: 2 },
        { blocks: 8, used: 4, cached: 3 },
    ];
    const lost = { blocks: 0, used: 0, cached: 0 };
    assert.deepEqual(usage({ ledger }), { used: 1, cached: 2, free: 5 });
    assert.deepEqual(usage({ ledger, replicas: [other] }), { used: 1, cached: 2, free: 5 });
    assert.deepEqual(usage({ ledger, replicas: [one, other, lost] }), { used: 5, cached: 5, free: 6 });
});
