// The line to the server: GET /live, read line by line from a streamed fetch.
//
//     connecting ──► live ──► lost ──► (a while) ──► connecting
//         └──► needs key (401): waits until it is given one
//
// A fetch, not an EventSource, because that cannot send a key. The server writes at least once a second, so a line that
// says nothing for a while is dead, whatever the system thinks of the connection.

const SILENCE_MS = 6000;
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 10_000;

/** Split a stream of bytes into lines, each handed on as the object that it says. Returns when the stream ends. */
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

/** Return the message of an answer that is an error. */
export async function errorMessage(response) {
    try {
        return (await response.json()).error.message;
    } catch {
        return `the server answered ${response.status}`;
    }
}

/** Holds the line. `onObject` gets each object, `onPhase(phase, text, retryAt)` how the line is; `key` may be empty. */
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

    /** Connect now, whatever is going on. Mutates. */
    connect() {
        clearTimeout(this.timer);
        this.attempt?.abort();
        this.attempt = new AbortController();
        this.onPhase("connecting", "", 0);
        this.run(this.attempt);
    }

    /** The headers of a call with our key. */
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
        const message = error.name === "AbortError" ? "the server says nothing" : error.message;
        this.onPhase("lost", message, Date.now() + wait);
        this.timer = setTimeout(() => this.connect(), wait);
    }
}
