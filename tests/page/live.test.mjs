// The line to the server, against a server of promises and a clock that the test moves.

import assert from "node:assert/strict";
import { mock, test } from "node:test";

import { Live, errorMessage } from "../../src/quire/serve/dashboard/page/live.mjs";
import { settle } from "./document.mjs";

/** A server that answers when the test says so; each call is {headers, signal, answer, refuse}. */
class Server {
    constructor() {
        this.calls = [];
        globalThis.fetch = (url, { headers, signal }) =>
            new Promise((answer, refuse) => {
                signal.addEventListener("abort", () => refuse(signal.reason));
                this.calls.push({ url, headers, signal, answer, refuse });
            });
    }

    /** Answer the last call with a stream; returns how to write to it and how to end it. */
    open() {
        const { answer, signal } = this.calls.at(-1);
        let stream;
        const body = new ReadableStream({ start: (controller) => (stream = controller) });
        signal.addEventListener("abort", () => {
            try {
                stream.error(signal.reason);
            } catch {
                // it had ended
            }
        });
        answer(new Response(body));
        return {
            write: (text) => stream.enqueue(new TextEncoder().encode(text)),
            close: () => stream.close(),
        };
    }
}

function watched() {
    mock.timers.enable({ apis: ["setTimeout", "Date"] });
    const server = new Server();
    const objects = [];
    const phases = [];
    const live = new Live("live", {
        onObject: (object) => objects.push(object),
        onPhase: (phase, text, retryAt) => phases.push([phase, text, retryAt && retryAt - Date.now()]),
    });
    return { live, server, objects, phases };
}

/** A test in which time stands until it is moved. */
const timed = (name, body) =>
    test(name, async () => {
        try {
            await body(watched());
        } finally {
            mock.timers.reset();
        }
    });

timed("a server that is away is tried after twice as long each time, at most ten seconds", async (page) => {
    const { live, server, phases } = page;
    live.connect();
    const waits = [500, 1000, 2000, 4000, 8000, 10_000, 10_000];
    for (const [number, wait] of waits.entries()) {
        assert.equal(server.calls.length, number + 1);
        server.calls.at(-1).refuse(new TypeError("fetch failed"));
        await settle();
        assert.deepEqual(phases.at(-1), ["lost", "fetch failed", wait]);
        mock.timers.tick(wait - 1);
        assert.equal(server.calls.length, number + 1, "not a millisecond early");
        mock.timers.tick(1);
        assert.deepEqual(phases.at(-1), ["connecting", "", 0]);
    }
    server.open().write('{"type": "hello"}\n');
    await settle();
    assert.deepEqual(phases.at(-1), ["live", "", 0]);
    live.connect();
    server.calls.at(-1).refuse(new TypeError("fetch failed"));
    await settle();
    assert.deepEqual(phases.at(-1), ["lost", "fetch failed", 500], "a line that lived is sought at once again");
});

timed("a line that says nothing for six seconds is dead, one that speaks every five is not", async (page) => {
    const { live, server, phases, objects } = page;
    live.connect();
    const line = server.open();
    await settle();
    for (let second = 0; second < 50; second += 5) {
        line.write(`{"t": ${second}}\n`);
        await settle();
        assert.deepEqual([objects.at(-1).t, phases.at(-1)[0]], [second, "live"]);
        mock.timers.tick(5000);
        await settle();
    }
    mock.timers.tick(999);
    await settle();
    assert.equal(phases.at(-1)[0], "live");
    mock.timers.tick(1);
    await settle();
    assert.deepEqual(phases.at(-1), ["lost", "the server is silent", 500]);
    assert.ok(server.calls[0].signal.aborted);
});

timed("half a line is no sign of life", async ({ live, server, phases }) => {
    live.connect();
    const line = server.open();
    line.write('{"t": 1}\n{"t"');
    await settle();
    mock.timers.tick(3000);
    line.write(": 2");
    await settle();
    mock.timers.tick(3000);
    await settle();
    assert.deepEqual(phases.at(-1), ["lost", "the server is silent", 500]);
});

timed("a server that does not even answer is given up after six seconds", async ({ live, server, phases }) => {
    live.connect();
    mock.timers.tick(6000);
    await settle();
    assert.deepEqual(phases, [
        ["connecting", "", 0],
        ["lost", "the server is silent", 500],
    ]);
    assert.equal(server.calls.length, 1);
});

timed("a stream that ends is lost, whatever it said before", async ({ live, server, phases, objects }) => {
    live.connect();
    const line = server.open();
    line.write('{"t": 1}\n{"t": 2}\n{"t": 3');
    line.close();
    await settle();
    assert.deepEqual(objects, [{ t: 1 }, { t: 2 }]);
    assert.deepEqual(phases.at(-1), ["lost", "the server closed the stream", 500]);
});

timed("a line that is no object of JSON ends the attempt, and names the error", async ({ live, server, phases }) => {
    live.connect();
    server.open().write("<html>\n");
    await settle();
    assert.equal(phases.at(-1)[0], "lost");
    assert.match(phases.at(-1)[1], /JSON/);
});

timed("without a key it waits for one, and then sends it", async ({ live, server, phases }) => {
    live.connect();
    assert.deepEqual(server.calls[0].headers, {});
    server.calls[0].answer(Response.json({ error: { message: "a key is needed" } }, { status: 401 }));
    await settle();
    assert.deepEqual(phases.at(-1), ["locked", "a key is needed", 0]);
    mock.timers.tick(60_000);
    await settle();
    assert.equal(server.calls.length, 1, "it does not try again without a key");
    live.key = "sesame";
    live.connect();
    assert.deepEqual(server.calls[1].headers, { authorization: "Bearer sesame" });
});

timed("an error is shown in the server's words, or by its number", async ({ live, server, phases }) => {
    live.connect();
    server.calls[0].answer(Response.json({ error: { message: "busy" } }, { status: 503 }));
    await settle();
    assert.deepEqual(phases.at(-1), ["lost", "busy", 500]);
    mock.timers.tick(500);
    server.calls[1].answer(new Response("<html>", { status: 502 }));
    await settle();
    assert.deepEqual(phases.at(-1), ["lost", "the server answered 502", 1000]);
    for (const body of ["null", "[]", '{"error": null}', ""]) {
        assert.equal(await errorMessage(new Response(body, { status: 500 })), "the server answered 500");
    }
});

timed("of two attempts only the newer one counts", async ({ live, server, phases, objects }) => {
    live.connect();
    const old = server.open();
    old.write('{"t": 1}\n');
    await settle();
    live.connect();
    assert.ok(server.calls[0].signal.aborted);
    await settle();
    assert.deepEqual(phases.at(-1), ["connecting", "", 0], "the end of the old one is no loss");
    server.open().write('{"t": 2}\n');
    await settle();
    assert.deepEqual(objects, [{ t: 1 }, { t: 2 }]);
    mock.timers.tick(1000);
    assert.equal(server.calls.length, 2);
});

timed("an answer that comes after the next attempt has begun is not read", async ({ live, server, phases }) => {
    live.connect();
    const [first] = server.calls;
    live.connect();
    first.answer(Response.json({ error: { message: "a key is needed" } }, { status: 401 }));
    await settle();
    assert.deepEqual(phases, [
        ["connecting", "", 0],
        ["connecting", "", 0],
    ]);
});

timed("to connect while it waits for the next try is one attempt, not two", async ({ live, server }) => {
    live.connect();
    server.calls[0].refuse(new TypeError("fetch failed"));
    await settle();
    live.connect();
    mock.timers.tick(5000);
    await settle();
    assert.equal(server.calls.length, 2);
});
