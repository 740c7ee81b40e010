// The lists of the page, in a document of our own: events, requests, and the prefix tree under the keys of a tree.

import assert from "node:assert/strict";
import { mock, test } from "node:test";

import { Events } from "../../src/quire/serve/dashboard/page/events.mjs";
import { PrefixTree } from "../../src/quire/serve/dashboard/page/prefix_tree.mjs";
import { Requests } from "../../src/quire/serve/dashboard/page/requests.mjs";
import { CACHED, Memory, ROOT, USED } from "../../src/quire/serve/dashboard/page/state.mjs";
import { Element, Text, openDocument } from "./document.mjs";

// ---- events ---------------------------------------------------------------------------------------------------------

function openEvents() {
    openDocument();
    const [list, voice, filter] = ["ol", "p", "select"].map((tag) => new Element(tag));
    filter.value = "all";
    const events = new Events(list, voice, filter);
    const add = (...rows) => events.add(rows, (time) => time);
    const shown = () => list.children.map((item) => item.lastChild.textContent);
    return { list, voice, filter, add, shown };
}

test("each kind of event has its words, and the newest is on top", () => {
    mock.timers.enable({ apis: ["setTimeout"] });
    const { add, shown, list } = openEvents();
    add([0, "admitted", 1, 1], [1, "finished", 1, 20], [2, "aborted", 2, 0], [3, "failed", 3, 0]);
    add([4, "preempted", 4, 1], [5, "evicted", -1, 1000], [6, "rejected", -1, 0], [7, "moved", 5, 3]);
    assert.deepEqual(shown().reverse(), [
        "#1 admitted with 1 token",
        "#1 finished after 20 tokens",
        "#2 left",
        "#3 failed",
        "#4 preempted, freed 1 block",
        "1,000 cached blocks evicted",
        "1 request refused",
        "moved #5",
    ]);
    assert.equal(list.lastChild.dataset.kind, "admitted");
    mock.timers.reset();
});

test("evictions are counted within a second of the first, and never together with those of another run", () => {
    mock.timers.enable({ apis: ["setTimeout"] });
    const { add, shown } = openEvents();
    add([10, "evicted", -1, 1]);
    add([10.5, "admitted", 1, 5], [10.99, "evicted", -1, 2]);
    assert.deepEqual(shown(), ["#1 admitted with 5 tokens", "3 cached blocks evicted"]);
    add([11, "evicted", -1, 4]);
    assert.equal(shown()[0], "4 cached blocks evicted", "a second later is another entry");
    add([0.5, "evicted", -1, 8]);
    assert.equal(shown()[0], "8 cached blocks evicted", "the time of a new engine begins again");
    mock.timers.reset();
});

test("the list stays short, whatever comes at once", () => {
    mock.timers.enable({ apis: ["setTimeout"] });
    const { add, shown } = openEvents();
    add(...Array.from({ length: 500 }, (_, number) => [number, "aborted", number, 0]));
    assert.equal(shown().length, 120);
    assert.deepEqual([shown()[0], shown()[119]], ["#499 left", "#380 left"]);
    mock.timers.reset();
});

test("a screen reader is told of what interrupts, at once, and then every six seconds in sums", () => {
    mock.timers.enable({ apis: ["setTimeout"] });
    const { add, voice } = openEvents();
    add([0, "admitted", 1, 5], [0, "finished", 1, 5]);
    assert.equal(voice.textContent, "");
    add([1, "preempted", 1, 5]);
    assert.equal(voice.textContent, "1 preemption");
    add([2, "preempted", 1, 5], [2, "evicted", -1, 900], [2.1, "evicted", -1, 7], [3, "failed", 2, 0]);
    add([3, "rejected", -1, 1]);
    assert.equal(voice.textContent, "1 preemption", "not while it may still speak");
    mock.timers.tick(5999);
    assert.equal(voice.textContent, "1 preemption");
    mock.timers.tick(1);
    assert.equal(voice.textContent, "1 preemption, 2 evictions, 1 failure, 1 rejection");
    mock.timers.tick(6000);
    add([4, "failed", 9, 0]);
    assert.equal(voice.textContent, "1 failure", "after a silence at once again");
    mock.timers.reset();
});

test("the list is filtered from the beginning, and when the choice changes", () => {
    const { list, filter } = openEvents();
    assert.equal(list.dataset.filter, "all");
    filter.value = "memory";
    filter.fire("change");
    assert.equal(list.dataset.filter, "memory");
});

// ---- requests -------------------------------------------------------------------------------------------------------

function openRequests() {
    const span = (name) => new Element("span", { class: name });
    const bar = new Element("div", { role: "progressbar" }, ...["from-disk", "from-host", "from-cache", "computed", "missing"].map(span));
    const cells = ["status", "tenant", "own", "call", "tokens", "cached"].map(span);
    const row = new Element("tr", {}, new Element("button", {}, span("swatch")), ...cells, bar);
    openDocument({ "request-row": { content: new Element("fragment", {}, row) } });
    const [body, note] = [new Element("tbody"), new Element("p")];
    const scroller = Object.assign(new Element("div", { class: "scroll" }, body), { scrollTop: 0, clientHeight: 1e4 });
    const marks = [];
    return { body, note, marks, scroller, table: new Requests(body, note, { onMark: (id) => marks.push(id) }) };
}

const request = (id, more = {}) => ({
    key: id + 1000,
    id,
    status: "running",
    tenant: "ada",
    promptTokens: 10,
    computed: 12,
    total: 20,
    cached: 8,
    fromDisk: 0,
    fromHost: 0,
    preemptions: 0,
    look: id % 24,
    call: `req-${id}234567890`,
    ...more,
});
const ids = (body) => body.children.map((row) => Number(row.dataset.id));
const text = (row, name) => row.querySelector(name).textContent;
const width = (row, name) => row.querySelector(name).style.width;

test("the table shows the requests in their order, whatever it showed before, and keeps their rows", () => {
    const { body, table } = openRequests();
    let state = 1;
    const draw = (below) => (state = (state * 48271) % 2147483647) % below;
    const rows = new Map();
    for (let turn = 0; turn < 200; turn += 1) {
        const wanted = [];
        for (let id = 0; id < 12; id += 1) if (draw(3)) wanted.splice(draw(wanted.length + 1), 0, id);
        table.update(wanted.map((id) => request(id)), [], 0);
        assert.deepEqual(ids(body), wanted);
        for (const row of body.children) {
            const before = rows.get(row.dataset.id);
            if (before?.turn === turn - 1) assert.equal(row, before.row, "a row that stays is the same element");
            rows.set(row.dataset.id, { row, turn });
        }
    }
});

test("at most sixty are listed; those that ended fill up to ten", () => {
    const { body, note, table } = openRequests();
    const many = Array.from({ length: 61 }, (_, id) => request(id));
    const ended = Array.from({ length: 12 }, (_, place) => request(900 + place, { status: "finished" }));
    table.update(many, ended, 0);
    assert.deepEqual([ids(body).length, ids(body).at(-1), note.textContent], [60, 59, "1 more request not listed."]);
    table.update(many.slice(0, 60), ended, 0);
    assert.deepEqual([ids(body).length, note.textContent], [60, ""]);
    table.update(many.slice(0, 7), ended, 3);
    assert.deepEqual(ids(body), [0, 1, 2, 3, 4, 5, 6, 900, 901, 902]);
    table.update([], [], 0);
    assert.deepEqual(ids(body), []);
});

test("ended requests without a row are counted", () => {
    const { body, note, table } = openRequests();
    const ended = Array.from({ length: 12 }, (_, place) => request(900 + place, { status: "finished" }));
    table.update([], ended, 12_345);
    assert.deepEqual([ids(body).length, note.textContent], [10, "12,335 ended requests not listed."]);
    table.update([], ended, 10);
    assert.equal(note.textContent, "");
    table.update(Array.from({ length: 61 }, (_, id) => request(id)), ended, 1);
    assert.equal(note.textContent, "1 more request not listed. 1 ended request not listed.");
});

test("requests that are cut off below are counted, until they are scrolled to", () => {
    const { note, scroller, table } = openRequests();
    table.update(Array.from({ length: 8 }, (_, id) => request(id)), [], 0);
    assert.equal(note.textContent, "");
    table.body.children.forEach((row, place) => Object.assign(row, { offsetTop: 20 + 20 * place, offsetHeight: 20 }));
    scroller.clientHeight = 100;
    table.tellMore();
    assert.equal(note.textContent, "4 more requests below: scroll.");
    scroller.scrollTop = 60;
    scroller.fire("scroll");
    assert.equal(note.textContent, "1 more request below: scroll.");
    scroller.scrollTop = 80;
    scroller.fire("scroll");
    assert.equal(note.textContent, "");
});

test("the bars of all requests have one scale, and their parts add up to the length", () => {
    const { body, table } = openRequests();
    const requests = [
        request(1, { computed: 12, total: 20, cached: 8 }),
        request(2, { computed: 4, total: 10, cached: 6 }), // hit, but not yet counted as computed
        request(3, { computed: 42, total: 40, cached: 0 }), // the last step computed past its end
        request(4, { computed: 12, total: 20, cached: 8, fromDisk: 3, fromHost: 4 }),
    ];
    table.update(requests, [], 0);
    const parts = body.children.map((row) => [".from-disk", ".from-host", ".from-cache", ".computed", ".missing"].map((name) => width(row, name)));
    assert.deepEqual(parts, [
        ["0%", "0%", "20%", "10%", "20%"],
        ["0%", "0%", "10%", "0%", "15%"],
        ["0%", "0%", "0%", "105%", "0%"],
        ["7.5%", "10%", "2.5%", "10%", "20%"],
    ]);
    assert.equal(text(body.children[0], ".tokens"), "10 + 10");
    const bar = body.children[0].querySelector("[role=progressbar]");
    assert.equal(bar.ariaValueText, "12 of 20 tokens computed, 8 of them from the cache");
    const other = body.children[3].querySelector("[role=progressbar]");
    assert.equal(other.ariaValueText, "12 of 20 tokens computed, 8 of them from the cache, 3 of those from disk, 4 of those from host");
    assert.deepEqual([bar.ariaValueNow, bar.ariaValueMax, bar.ariaLabel], [12, 20, "request 1"]);
});

test("a row says how its request is, and whose it is", () => {
    const { body, table } = openRequests();
    table.own.add("req-1234567890");
    table.update([request(1, { status: "aborted" }), request(2, { status: "waiting", preemptions: 2, total: 3 })], [], 0);
    const [first, second] = body.children;
    assert.deepEqual([text(first, ".status"), text(first, ".own"), text(first, ".tenant")], ["left", "yours", "ada"]);
    assert.deepEqual([text(second, ".status"), text(second, ".own")], ["waiting, preempted 2×", ""]);
    assert.deepEqual([text(second, ".call"), second.querySelector(".call").title], ["req-22345678", "req-2234567890"]);
    assert.equal(text(second, ".tokens"), "10 + 0");
    assert.deepEqual([first.dataset.status, first.querySelector(".swatch").dataset.owner], ["aborted", "1"]);
    table.update([request(1, { status: "running" })], [], 0);
    assert.deepEqual([text(first, ".status"), first.dataset.status], ["running", "running"]);
});

test("a request is marked while pointed at, or as long as it is pinned and runs", () => {
    const { body, marks, table } = openRequests();
    const both = [request(1), request(2)];
    table.update(both, [], 0);
    const [first, second] = body.children;
    const press = (row) => row.querySelector("button").fire("click");
    first.fire("pointerenter");
    first.fire("pointerleave");
    press(second);
    assert.deepEqual(marks.splice(0), [1, null, 2]);
    assert.deepEqual([first, second].map((row) => row.querySelector("button").ariaPressed), ["false", "true"]);
    first.fire("pointerenter");
    first.fire("pointerleave");
    assert.deepEqual(marks.splice(0), [1, 2], "leaving falls back to what is pinned");
    press(second);
    press(first);
    assert.deepEqual(marks.splice(0), [null, 1]);
    table.update([request(2)], [request(1, { status: "finished" })], 1);
    assert.deepEqual(marks.splice(0), [null], "what has ended is pinned no longer");
    second.fire("pointerenter");
    table.update([], [], 0);
    assert.deepEqual(marks.splice(0), [2, null], "a row that is removed tells of no leave");
});

// ---- the prefix tree ------------------------------------------------------------------------------------------------

/** Two prompts that begin alike, and a chain of four cached blocks. */
function grownMemory() {
    const memory = new Memory(20);
    memory.write([0, USED, 2, 1, ROOT, 0]);
    memory.write([1, USED, 1, 1, 0, 0]);
    memory.write([2, USED, 1, 2, 0, 0]);
    memory.write([3, USED, 1, -1, 2, 0]);
    for (const id of [10, 11, 12, 13]) memory.write([id, CACHED, 0, 1, id === 10 ? ROOT : id - 1, 0]);
    return memory;
}

const lookOf = (id) => (id === 2 ? 17 : null);

function openTree(memory = grownMemory()) {
    openDocument();
    const [list, note] = [new Element("ul"), new Element("p")];
    const marks = [];
    const tree = new PrefixTree(list, note, { onMark: (blocks) => marks.push(blocks && [...blocks].sort((a, b) => a - b)) });
    tree.update(memory, 16, lookOf);
    const labels = () => list.children.map((item) => item.lastChild.textContent);
    const key = (name) => (document.activeElement ?? list.firstChild).fire("keydown", { key: name });
    return { tree, list, note, marks, labels, key };
}

test("the tree tells of each run how long it is and who reads it, largest branches first", () => {
    const { labels, note, list } = openTree();
    assert.deepEqual(labels(), [
        "block 0 · 16 tokens · read by 2",
        "block 2 · 16 tokens · read by #2",
        "block 3 · 16 tokens · read by one",
        "block 1 · 16 tokens · read by #1",
        "4 blocks, 10 to 13 · 64 tokens · cached",
    ]);
    assert.equal(note.textContent, "8 blocks in the prefix cache.");
    const levels = list.children.map((item) => Number(item.attributes["aria-level"]));
    const places = list.children.map((item) => `${item.attributes["aria-posinset"]}/${item.attributes["aria-setsize"]}`);
    assert.deepEqual(levels, [1, 2, 3, 2, 1]);
    assert.deepEqual(places, ["1/2", "1/2", "1/1", "2/2", "2/2"]);
});

test("the keys of a tree: right opens and enters, left closes and leaves, and the ends hold", () => {
    const { list, key, labels } = openTree();
    const at = () => list.children.indexOf(document.activeElement);
    const steps = [
        ["ArrowUp", 0],
        ["ArrowRight", 1], // open already: to its first child
        ["ArrowRight", 2],
        ["ArrowLeft", 1], // a leaf: to the run before it
        ["ArrowDown", 2],
        ["End", 4],
        ["ArrowDown", 4],
        ["ArrowLeft", 4], // a root has nothing before it
        ["Home", 0],
    ];
    list.children[0].focus();
    for (const [name, place] of steps) {
        assert.ok(key(name), `${name} is ours`);
        assert.equal(at(), place, name);
        assert.equal(list.children.filter((item) => item.tabIndex === "0").length, 1);
    }
    assert.ok(!key("a") && !key("Tab"), "other keys keep their effect");
    key("End");
    assert.ok(!key("ArrowRight"), "a leaf has nothing to open");
    key("Home");
    key("ArrowLeft");
    assert.deepEqual(labels()[0], "block 0 · 16 tokens · read by 2 · 3 below");
    assert.equal(list.children.length, 2);
    assert.equal(at(), 0, "the focus stays where it was");
    key("Enter");
    assert.equal(list.children.length, 5);
    key(" ");
    assert.equal(list.children.length, 2);
    key("ArrowRight");
    assert.equal(list.children.length, 5);
});

test("what the user has folded stays folded as the memory changes, and the focus stays on its run", () => {
    const memory = grownMemory();
    const { tree, list, labels } = openTree(memory);
    list.children[0].fire("click");
    assert.equal(list.children.length, 2);
    memory.write([5, USED, 1, 3, ROOT, 0]);
    tree.update(memory, 16, lookOf);
    assert.deepEqual(labels().slice(1), ["4 blocks, 10 to 13 · 64 tokens · cached", "block 5 · 16 tokens · read by #3"]);
    list.children[0].focus();
    list.children[0].fire("keydown", { key: "End" });
    memory.write([13, 0, 0, -1, -2, 0]);
    tree.update(memory, 16, lookOf);
    assert.equal(list.children.indexOf(document.activeElement), 2);
    const before = list.children;
    tree.update(memory, 16, lookOf);
    assert.deepEqual(list.children, before, "nothing is built again where nothing has changed");
});

test("a run has the look of the request that reads it", () => {
    const swatches = openTree().list.children.map((item) => item.childNodes[1].dataset);
    assert.deepEqual([swatches[1].owner, swatches[1].mark, swatches[2].owner], ["1", "2", undefined]);
});

test("to point at a run marks it, all before it and all behind it", () => {
    const { list, marks } = openTree();
    list.children[1].fire("pointerover");
    list.children[0].fire("pointerover");
    list.children[4].focus();
    list.fire("focusout");
    list.fire("pointerover", { target: list });
    assert.deepEqual(marks, [[0, 2, 3], [0, 1, 2, 3], [10, 11, 12, 13], null]);
});

test("a tree with too many branches tells how many are not shown, an empty one nothing", () => {
    const memory = new Memory(400);
    for (let id = 0; id < 400; id += 1) memory.write([id, CACHED, 0, 1, ROOT, 0]);
    const { note, list, tree } = openTree(memory);
    assert.equal(list.children.length, 150);
    assert.equal(note.textContent, "400 blocks in the prefix cache. 250 more branches not shown.");
    memory.clear();
    tree.update(memory, 16, lookOf);
    assert.deepEqual([list.children.length, note.textContent], [0, ""]);
    assert.ok(!list.fire("keydown", { key: "ArrowDown" }));
});

test("text in the document of these tests grows as text does", () => {
    const node = new Text("a");
    node.appendData("b");
    assert.deepEqual([node.length, new Element("p", {}, node, "c").textContent], [2, "abc"]);
});
