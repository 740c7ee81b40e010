// The chat box against a server of promises: what it asks for, what it shows, and what it says the next time.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Chat } from "../../src/quire/serve/dashboard/page/chat.mjs";
import { Element, openDocument, settle } from "./document.mjs";

/** A chat on a page, with what it has asked the server for, and what it has told of that. */
function openChat() {
    openDocument();
    const field = (name, value) => Object.assign(new Element("input", { name }), { value });
    const elements = {
        text: field("text", ""),
        answers: field("answers", "1"),
        tokens: field("tokens", "64"),
        anew: new Element("button", { name: "anew" }),
    };
    const stop = new Element("button", { name: "stop" });
    const submit = new Element("button", { type: "submit" });
    const form = Object.assign(new Element("form", {}, ...Object.values(elements), stop, submit), { elements });
    const transcript = new Element("ol");
    const [calls, told, pictures] = [[], [], []];
    globalThis.fetch = (url, { headers, body, signal }) =>
        new Promise((answer, refuse) => {
            signal.addEventListener("abort", () => refuse(signal.reason));
            calls.push({ url, headers, fields: JSON.parse(body), signal, answer, refuse });
        });
    globalThis.requestAnimationFrame = (draw) => pictures.push(draw);
    const chat = new Chat(form, transcript, {
        headers: () => ({ authorization: "Bearer sesame" }),
        onCall: (id) => told.push(id),
    });
    chat.model = "guide";
    const say = (words) => {
        elements.text.value = words;
        form.fire("submit");
    };
    const shown = () => transcript.children.map((item) => item.children.map((child) => child.textContent).join(": "));
    return { chat, elements, stop, submit, transcript, calls, told, pictures, say, shown };
}

const event = (fields) => `data: ${JSON.stringify(fields)}\n\n`;
const piece = (content, index = 0) => event({ choices: [{ index, delta: { content } }] });
const refusal = (status, message) => Response.json({ error: { message } }, { status });

/** Answer a call with a stream that stays open: returns how to go on with it. */
function streamed(call) {
    let stream;
    const body = new ReadableStream({ start: (controller) => (stream = controller) });
    call.signal.addEventListener("abort", () => stream.error(call.signal.reason));
    call.answer(new Response(body));
    return { write: (text) => stream.enqueue(new TextEncoder().encode(text)), close: () => stream.close() };
}

test("a conversation goes on from what was said, with the settings of the form and our key", async () => {
    const { calls, elements, say, shown, told, stop, submit, transcript } = openChat();
    say("  hello ");
    assert.deepEqual([stop.disabled, submit.disabled, transcript.ariaBusy], [false, true, "true"]);
    assert.equal(elements.text.value, "");
    const headers = { "x-request-id": "req-1f2a" };
    calls[0].answer(new Response(piece("good ") + piece("day") + "data: [DONE]\n\n", { headers }));
    await settle();
    assert.deepEqual(shown(), ["you: hello", "guide: good day"]);
    assert.deepEqual([stop.disabled, submit.disabled, transcript.ariaBusy], [true, false, "false"]);
    Object.assign(elements.answers, { value: "3" });
    say("and now?");
    await settle();
    const [first, second] = calls.map((call) => call.fields);
    assert.deepEqual(first.messages, [{ role: "user", content: "hello" }]);
    assert.deepEqual(second.messages.slice(1), [
        { role: "assistant", content: "good day" },
        { role: "user", content: "and now?" },
    ]);
    assert.deepEqual([first.n, second.n, first.max_tokens, first.stream, first.model], [1, 3, 64, true, "guide"]);
    assert.equal(calls[0].headers.authorization, "Bearer sesame");
    assert.equal(calls[0].url, "v1/chat/completions");
    assert.deepEqual(told, ["req-1f2a"]);
});

test("several answers are shown by number, and the conversation goes on from the first", async () => {
    const { calls, say, shown } = openChat();
    say("hello");
    calls[0].answer(new Response(piece("b", 1) + piece("a", 0) + piece("B", 1) + piece("", 2) + piece("A", 0)));
    await settle();
    assert.deepEqual(shown(), ["you: hello", "guide, answer 2: bB", "guide: aA"]);
    say("more");
    assert.deepEqual(calls[1].fields.messages[1], { role: "assistant", content: "aA" });
});

test("an answer that ends at the limit of tokens says so", async () => {
    const { calls, say, shown } = openChat();
    const end = (reason) => event({ choices: [{ index: 0, delta: {}, finish_reason: reason }] });
    say("count");
    calls[0].answer(new Response(piece("one, two") + end("length")));
    await settle();
    const note = "note: cut off at 64 tokens, or as the context is full; raise tokens";
    assert.deepEqual(shown(), ["you: count", "guide: one, two", note]);
    say("go on");
    assert.deepEqual(calls[1].fields.messages.at(-2), { role: "assistant", content: "one, two" });
    calls[1].answer(new Response(piece("three") + end("stop")));
    await settle();
    assert.deepEqual(shown().slice(3), ["you: go on", "guide: three"]);
});

test("nothing is asked for nothing, nor while an answer is under way", () => {
    const { calls, say } = openChat();
    say("   ");
    assert.equal(calls.length, 0);
    say("one");
    say("two");
    assert.equal(calls.length, 1);
});

test("enter sends, but not in the middle of a line or of a character that is being composed", () => {
    const { calls, elements } = openChat();
    elements.text.value = "hello";
    const press = (details) => elements.text.fire("keydown", details);
    for (const more of [{ shiftKey: true }, { isComposing: true }]) assert.ok(!press({ key: "Enter", ...more }));
    assert.ok(!press({ key: "a" }));
    assert.equal(calls.length, 0);
    assert.ok(press({ key: "Enter" }));
    assert.equal(calls.length, 1);
});

test("a model without a chat template is asked for completions, from then on at once", async () => {
    const { calls, say, shown } = openChat();
    say("once");
    calls[0].answer(refusal(400, "the model guide has no chat template"));
    await settle();
    assert.deepEqual([calls[1].url, calls[1].fields.prompt, calls[1].fields.messages], ["v1/completions", "once", undefined]);
    calls[1].answer(new Response(event({ choices: [{ index: 0, text: " upon" }] })));
    await settle();
    assert.deepEqual(shown(), ["you: once", "guide:  upon"]);
    say("again");
    assert.equal(calls[2].url, "v1/completions");
});

test("another refusal is shown in the server's words, and the refused text is not said again", async () => {
    const { calls, say, shown } = openChat();
    say("much too long");
    calls[0].answer(refusal(400, "the prompt has too many tokens"));
    await settle();
    assert.deepEqual(shown(), ["you: much too long", "error: the prompt has too many tokens"]);
    say("short");
    assert.deepEqual(calls[1].fields.messages, [{ role: "user", content: "short" }]);
});

test("a text that got no answer is not said again: the server was away, or the user stopped the call", async () => {
    const { calls, say, shown, stop } = openChat();
    say("one");
    calls[0].refuse(new TypeError("fetch failed"));
    await settle();
    say("two");
    stop.fire("click");
    await settle();
    assert.deepEqual(shown(), ["you: one", "error: fetch failed", "you: two"], "to stop is no error");
    say("three");
    assert.deepEqual(calls[2].fields.messages, [{ role: "user", content: "three" }]);
});

test("what came before the user stopped the answer stays in the conversation", async () => {
    const { calls, say, shown, stop } = openChat();
    say("count");
    streamed(calls[0]).write(piece("one, two"));
    await settle();
    stop.fire("click");
    await settle();
    assert.deepEqual(shown(), ["you: count", "guide: one, two"]);
    say("go on");
    assert.deepEqual(calls[1].fields.messages[1], { role: "assistant", content: "one, two" });
});

test("a failure in the middle of an answer is shown after what came", async () => {
    const { calls, say, shown } = openChat();
    say("count");
    calls[0].answer(new Response(piece("one") + event({ error: { message: "the engine has stopped" } })));
    await settle();
    assert.deepEqual(shown(), ["you: count", "guide: one", "error: the engine has stopped"]);
});

test("a new conversation knows nothing of the old, though an answer was under way", async () => {
    const { calls, elements, say, shown } = openChat();
    say("a secret");
    streamed(calls[0]).write(piece("I shall"));
    await settle();
    elements.anew.fire("click");
    await settle();
    assert.ok(calls[0].signal.aborted);
    assert.deepEqual(shown(), []);
    assert.equal(document.activeElement, elements.text);
    say("hello");
    assert.deepEqual(calls[1].fields.messages, [{ role: "user", content: "hello" }]);
});

test("pieces are written with the next picture, all that came since, and each once", async () => {
    const { calls, say, shown, pictures } = openChat();
    say("count");
    const stream = streamed(calls[0]);
    for (const word of ["one ", "two ", "three "]) stream.write(piece(word));
    await settle();
    assert.deepEqual([pictures.length, shown()[1]], [1, "guide: "]);
    pictures.shift()();
    assert.equal(shown()[1], "guide: one two three ");
    stream.write(piece("four"));
    await settle();
    pictures.shift()();
    assert.equal(shown()[1], "guide: one two three four");
    stream.close();
    await settle();
    assert.equal(shown()[1], "guide: one two three four");
});
