// The chat box: sends requests like any client, so that users can watch their own blocks appear.
//
// It calls /v1/chat/completions, or /v1/completions if the model has no chat template. A user can request several
// answers to one prompt, because those share blocks. A conversation continues from the first answer. Answers are shown
// as Markdown, which most models write; the user's messages and errors are shown as plain text. Images stay in the
// conversation: each request has those of all its messages.

import { Attachments, dataUrl, picture } from "./attachments.mjs";
import { errorMessage } from "./live.mjs";
import { Markdown } from "./markdown.mjs";

/** Call `onEvent` with the JSON object of each event of a stream. Returns at its end. */
export async function readEvents(stream, onEvent) {
    const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) {
            const data = event.startsWith("data: ") ? event.slice(6) : "";
            if (data && data !== "[DONE]") onEvent(JSON.parse(data));
        }
    }
}

/** Return the content of a message: its text, or parts if it has images, which most models expect first. */
function contentOf(text, images) {
    if (images.length === 0) return text;
    const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
    return text ? [...parts, { type: "text", text }] : parts;
}

/**
 * The chat of the page. `headers()` returns the key's header; `onCall(id)` is called for each accepted call;
 * `read(file)` returns an attached image as a data URL.
 */
export class Chat {
    constructor(form, transcript, { headers, onCall, read = dataUrl }) {
        this.form = form;
        this.transcript = transcript;
        this.headers = headers;
        this.onCall = onCall;
        this.attached = new Attachments(form, { read, onError: (message) => this.show("error", message) });
        this.model = "";
        this.messages = [];
        this.hasTemplate = true;
        this.call = null;
        this.isAsked = false;
        this.stopButton = form.querySelector("[name=stop]");
        form.addEventListener("submit", (event) => {
            event.preventDefault();
            this.send();
        });
        form.elements.text.addEventListener("keydown", (event) => {
            if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
            event.preventDefault();
            this.send();
        });
        this.stopButton.addEventListener("click", () => this.call?.abort());
        form.elements.anew.addEventListener("click", () => this.forget());
    }

    forget() {
        this.call?.abort();
        this.messages = [];
        this.transcript.replaceChildren();
        this.form.elements.text.focus();
    }

    async send() {
        if (this.attached.numUnread > 0) await this.attached.allRead;
        const text = this.form.elements.text.value.trim();
        if (this.call || !(text || this.attached.images.length)) return;
        this.form.elements.text.value = "";
        const images = this.attached.take();
        const { messages } = this; // of this conversation: the user may clear it during the call
        messages.push({ role: "user", content: contentOf(text, images) });
        this.show("you", text, { images });
        this.setBusy(new AbortController());
        try {
            await this.ask(messages, this.call.signal);
        } catch (error) {
            if (error.name !== "AbortError") this.show("error", error.message);
        } finally {
            if (messages.at(-1).role === "user") messages.pop(); // unanswered, and templates need alternating roles
            this.setBusy(null);
        }
    }

    setBusy(call) {
        this.call = call;
        this.stopButton.disabled = call === null;
        this.form.querySelector("[type=submit]").disabled = call !== null;
        this.transcript.ariaBusy = String(call !== null);
    }

    async ask(messages, signal) {
        const fields = {
            model: this.model,
            stream: true,
            n: Number(this.form.elements.answers.value),
            max_tokens: Number(this.form.elements.tokens.value),
        };
        let response = this.hasTemplate
            ? await this.post("v1/chat/completions", { ...fields, messages }, signal)
            : null;
        if (response?.status === 400 && (await this.lacksTemplate(response.clone()))) this.hasTemplate = false;
        const prompt = messages.at(-1).content;
        if (!this.hasTemplate) response = await this.post("v1/completions", { ...fields, prompt }, signal);
        if (!response.ok) throw new Error(await errorMessage(response));
        this.onCall(response.headers.get("x-request-id"));
        await this.read(response.body, messages, fields.max_tokens);
    }

    async lacksTemplate(response) {
        return /has no chat template/.test(await errorMessage(response));
    }

    post(url, fields, signal) {
        const headers = { "content-type": "application/json", ...this.headers() };
        return fetch(url, { method: "POST", headers, body: JSON.stringify(fields), signal });
    }

    async read(stream, messages, maxTokens) {
        const answers = new Map();
        let [failure, isCut] = ["", false];
        const said = (index) => {
            if (!answers.has(index))
                answers.set(index, { text: "", page: new Markdown(this.show("model", "", { index })) });
            return answers.get(index);
        };
        try {
            await readEvents(stream, (event) => {
                if (event.error) failure = event.error.message;
                for (const choice of event.choices ?? []) {
                    isCut ||= choice.finish_reason === "length";
                    const piece = choice.delta?.content ?? choice.text ?? "";
                    if (!piece) continue;
                    said(choice.index).text += piece;
                }
                this.later(answers);
            });
            if (failure) throw new Error(failure);
        } finally {
            this.write(answers);
            if (isCut) this.show("note", `cut off at ${maxTokens} tokens, or as the context is full; raise tokens`);
            messages.push({ role: "assistant", content: answers.get(0)?.text ?? "" });
        }
    }

    /** Write the received text in the next frame: a fast model sends far more pieces than the screen shows frames. */
    later(answers) {
        if (this.isAsked) return;
        this.isAsked = true;
        requestAnimationFrame(() => {
            this.isAsked = false;
            this.write(answers);
        });
    }

    write(answers) {
        for (const { text, page } of answers.values()) page.show(text);
        this.scroll();
    }

    show(who, text, { index = 0, images = [] } = {}) {
        const item = document.createElement("li");
        item.dataset.who = who;
        const name = document.createElement("b");
        name.textContent =
            who === "model" && index ? `${this.model}, answer ${index + 1}` : who === "model" ? this.model : who;
        const body = document.createElement(who === "model" ? "div" : "p");
        body.append(text);
        item.append(name, ...images.map((image) => picture(image, { onload: () => this.scroll() })), body);
        this.transcript.append(item);
        this.scroll();
        return body;
    }

    scroll() {
        this.transcript.scrollTop = this.transcript.scrollHeight;
    }
}
