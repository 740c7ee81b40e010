// The connection to the server: GET /live, read line by line from a streamed fetch.
//
//     connecting ──► live ──► lost ──► (a while) ──► connecting
//         └──► needs key (401): waits for a key
//
// Uses fetch, not EventSource, which cannot send a key. The server writes at least once a second, so a connection that
// is silent for a while is dead, even if the system reports it as open.

const SILENCE_MS = 6000;
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 10_000;

/** Call `onObject` with the JSON object of each line of a byte stream. Returns when the stream ends. */
export async function readLines(stream, onObject) {
    const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines) if (line) onObject(JSON.parse(line));
    }
}

/** Return the message of an error answer. */
export async function errorMessage(response) {
    try {
        return (await response.json()).error.message;
    } catch {
        return `the server answered ${response.status}`;
    }
}

/** Keeps the connection. `onObject` gets each object, `onPhase(phase, text, retryAt)` its state; `key` may be empty. */
export class Live {
    constructor(url, { onObject, onPhase }) {
        this.url = url;
        this.key = "";
        this.onObject = onObject;
        this.onPhase = onPhase;
        this.numFailures = 0;
        this.attempt = null;
        this.timer = null;
    }

    /** Connect now, ending any other attempt. Mutates. */
    connect() {
        clearTimeout(this.timer);
        this.attempt?.abort();
        this.attempt = new AbortController();
        this.onPhase("connecting", "", 0);
        this.run(this.attempt);
    }

    /** Return the headers of a request with the key. */
    headers() {
        return this.key ? { authorization: `Bearer ${this.key}` } : {};
    }

    async run(attempt) {
        let watchdog = null;
        const watch = () => {
            clearTimeout(watchdog);
            watchdog = setTimeout(() => attempt.abort(), SILENCE_MS);
        };
        try {
            watch();
            const response = await fetch(this.url, {
                headers: this.headers(),
                signal: attempt.signal,
                cache: "no-store",
            });
            if (attempt !== this.attempt) return;
            if (response.status === 401) {
                this.onPhase("locked", await errorMessage(response), 0);
                return;
            }
            if (!response.ok) throw new Error(await errorMessage(response));
            await readLines(response.body, (object) => {
                if (attempt !== this.attempt) return;
                watch();
                this.numFailures = 0;
                this.onObject(object);
                this.onPhase("live", "", 0);
            });
            throw new Error("the server closed the stream");
        } catch (error) {
            if (attempt === this.attempt) this.lose(error);
        } finally {
            clearTimeout(watchdog);
            attempt.abort();
        }
    }

    lose(error) {
        const wait = Math.min(LAST_RETRY_MS, FIRST_RETRY_MS * 2 ** this.numFailures);
        this.numFailures += 1;
        const message = error.name === "AbortError" ? "the server is silent" : error.message;
        this.onPhase("lost", message, Date.now() + wait);
        this.timer = setTimeout(() => this.connect(), wait);
    }
}
