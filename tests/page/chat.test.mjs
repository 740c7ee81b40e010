// The chat box against a server of promises: what it asks for, what it shows, and what it says the next time.

import assert from "node:assert/strict";
import { test } from "node:test";

import { scaled } from "../../src/quire/serve/dashboard/page/attachments.mjs";
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
        attach: new Element("button", { name: "attach" }),
        images: Object.assign(new Element("input", { name: "images" }), { value: "" }),
    };
    const stop = new Element("button", { name: "stop" });
    const submit = new Element("button", { type: "submit" });
    const thumbnails = new Element("ul");
    const voice = new Element("p", { role: "status" });
    const parts = [...Object.values(elements), thumbnails, stop, submit, voice];
    const form = Object.assign(new Element("form", {}, ...parts), { elements });
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
        read: async (file) => {
            await file.isSlow;
            if (file.isBroken) throw new Error("The source image could not be decoded.");
            return `data:image/png;base64,${file.name}`;
        },
    });
    chat.model = "guide";
    const say = (words) => {
        elements.text.value = words;
        form.fire("submit");
    };
    const shown = () => transcript.children.map((item) => item.children.map((child) => child.textContent).join(": "));
    return { chat, elements, stop, submit, transcript, calls, told, pictures, say, shown, thumbnails, voice };
}

/** A chat with a model that reads images. */
function openChatWithImages() {
    const opened = openChat();
    const { chat, elements, thumbnails } = opened;
    chat.attached.allow(true);
    const choose = (...files) => elements.images.fire("change", Object.assign(elements.images, { files }));
    const attached = () => thumbnails.children.map((item) => item.firstChild.alt);
    return { ...opened, choose, attached };
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

const imagePart = (name) => ({ type: "image_url", image_url: { url: `data:image/png;base64,${name}` } });

test("images are sent before the text, shown in the conversation, and part of all its later requests", async () => {
    const { calls, say, shown, choose, attached, transcript } = openChatWithImages();
    choose({ name: "cat" }, { name: "dog" });
    await settle();
    assert.deepEqual(attached(), ["cat", "dog"]);
    say("Which is larger?");
    const content = [imagePart("cat"), imagePart("dog"), { type: "text", text: "Which is larger?" }];
    assert.deepEqual(calls[0].fields.messages, [{ role: "user", content }]);
    assert.deepEqual(attached(), []);
    const images = transcript.firstChild.children.filter(({ tag }) => tag === "img");
    assert.deepEqual(
        images.map(({ src, alt }) => [src, alt]),
        ["cat", "dog"].map((name) => [imagePart(name).image_url.url, name]),
    );
    calls[0].answer(new Response(piece("The dog.")));
    await settle();
    assert.deepEqual(shown(), ["you: : : Which is larger?", "guide: The dog."]);
    say("Why?");
    assert.deepEqual(calls[1].fields.messages, [
        { role: "user", content },
        { role: "assistant", content: "The dog." },
        { role: "user", content: "Why?" },
    ]);
});

test("an image needs no text", async () => {
    const { calls, say, choose } = openChatWithImages();
    choose({ name: "cat" });
    await settle();
    say(" ");
    assert.deepEqual(calls[0].fields.messages, [{ role: "user", content: [imagePart("cat")] }]);
});

test("a message that is sent while its images are being read has all of them, in their order, once", async () => {
    const { calls, say, choose } = openChatWithImages();
    let arrive;
    choose({ name: "photo", isSlow: new Promise((resolve) => (arrive = resolve)) }, { name: "cat" });
    say("What is this?");
    say("What is this?");
    await settle();
    assert.equal(calls.length, 0);
    arrive();
    await settle();
    assert.equal(calls.length, 1);
    const content = [imagePart("photo"), imagePart("cat"), { type: "text", text: "What is this?" }];
    assert.deepEqual(calls[0].fields.messages, [{ role: "user", content }]);
});

test("an image can be removed before it is sent, and the focus moves to the next", async () => {
    const { calls, elements, say, choose, attached, thumbnails, voice } = openChatWithImages();
    choose({ name: "cat" }, { name: "dog" }, { name: "cow" });
    await settle();
    assert.equal(voice.textContent, "cow attached");
    const removeButton = (index) => thumbnails.children[index].querySelector("button");
    assert.equal(removeButton(1).ariaLabel, "Remove dog");
    removeButton(1).fire("click");
    assert.deepEqual([attached(), voice.textContent], [["cat", "cow"], "dog removed"]);
    assert.equal(document.activeElement, removeButton(1));
    removeButton(1).fire("click");
    assert.equal(document.activeElement, elements.text);
    say("What is this?");
    assert.equal(calls[0].fields.messages[0].content.length, 2);
});

test("a file that is no image is an error, and those around it are attached", async () => {
    const { choose, attached, shown } = openChatWithImages();
    choose({ name: "cat" }, { name: "notes.txt", isBroken: true }, { name: "dog" });
    await settle();
    assert.deepEqual(attached(), ["cat", "dog"]);
    assert.deepEqual(shown(), ["error: cannot read notes.txt; choose a PNG, JPEG, WebP or GIF image"]);
});

test("a refused image is not sent again", async () => {
    const { calls, say, shown, choose } = openChatWithImages();
    choose({ name: "broken" });
    await settle();
    say("What is this?");
    calls[0].answer(refusal(400, "the image is broken"));
    await settle();
    assert.deepEqual(shown().slice(1), ["error: the image is broken"]);
    say("Hello");
    assert.deepEqual(calls[1].fields.messages, [{ role: "user", content: "Hello" }]);
});

test("images can be pasted, but not the picture of a formatted text", async () => {
    const { elements, attached } = openChatWithImages();
    const paste = (types, ...files) => elements.text.fire("paste", { clipboardData: { types, files } });
    assert.ok(paste(["text/html", "Files"], { name: "copied" }));
    assert.ok(paste(["text/plain", "Files"], { name: "a file" }));
    assert.ok(!paste(["text/html", "text/plain", "Files"], { name: "cells of a table" }));
    assert.ok(!paste(["text/plain"]));
    await settle();
    assert.deepEqual(attached(), ["copied", "a file"]);
});

test("images can be dropped anywhere on the page", async () => {
    const { attached } = openChatWithImages();
    const page = document.documentElement;
    const drag = (type, types, ...files) => page.fire(type, { dataTransfer: { types, files } });
    assert.ok(drag("dragover", ["Files"]));
    assert.equal(page.dataset.drop, "here");
    drag("dragleave", ["Files"]);
    assert.equal(page.dataset.drop, undefined);
    assert.ok(drag("drop", ["Files"], { name: "cat" }));
    assert.ok(!drag("drop", ["text/plain"]));
    await settle();
    assert.deepEqual(attached(), ["cat"]);
});

test("a model without images gets none", async () => {
    const { chat, elements, attached, choose } = openChatWithImages();
    choose({ name: "cat" });
    await settle();
    chat.attached.allow(false);
    const files = [{ name: "dog" }];
    assert.ok(!elements.text.fire("paste", { clipboardData: { types: ["Files"], files } }));
    assert.ok(!document.documentElement.fire("drop", { dataTransfer: { types: ["Files"], files } }));
    await settle();
    assert.deepEqual([elements.attach.hidden, attached()], [true, []]);
});

test("the longer edge of a large image becomes 2,048 pixels, and no edge less than one", () => {
    assert.deepEqual(scaled(4000, 3000), [2048, 1536]);
    assert.deepEqual(scaled(3000, 4000), [1536, 2048]);
    assert.deepEqual(scaled(2048, 40), [2048, 40]);
    assert.deepEqual(scaled(9000, 1), [2048, 1]);
});
