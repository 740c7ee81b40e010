// The last minutes of a server, for the plots: one sample per second.
//
// Frames arrive eight times a second while something happens and once a second otherwise, so they are combined into
// seconds: the memory at the end of a second, its rates, and the median and 95th percentile of its latencies. Pure;
// times are on the reader's clock, in seconds.

import { usage } from "./state.mjs";

const COLUMNS = [
    "time",
    "used",
    "cached",
    "free",
    "generated",
    "prompt",
    "hitRate",
    "ttftMiddle",
    "ttftSlow",
    "itlMiddle",
    "itlSlow",
];

const IDLE = { generated: 0, prompt: 0, hitRate: null, ttftMiddle: null, ttftSlow: null, itlMiddle: null, itlSlow: null };

/** Return a quantile of numbers; null if there are none. */
export function quantile(values, share) {
    if (values.length === 0) return null;
    const sorted = [...values].sort((a, b) => a - b);
    return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

/** Samples of the last `windowS` seconds, as columns, and marks of preemptions and evictions. */
export class History {
    constructor(windowS = 300) {
        this.windowS = windowS;
        this.columns = Object.fromEntries(COLUMNS.map((name) => [name, []]));
        this.marks = []; // {time, kind, number}
        this.ttft = null; // the latest measured values, in ms
        this.itl = null;
        this.startBin(null, null);
    }

    /** Start with a server's rows of its last minutes, for `numBlocks` blocks. Mutates. */
    fill(rows, numBlocks, time) {
        for (const [age, used, cached, generated, prompt, hitRate, ...latencies] of rows) {
            const [ttftMiddle, ttftSlow, itlMiddle, itlSlow] = latencies;
            const free = numBlocks - used - cached;
            const sample = { used, cached, free, generated, prompt, hitRate, ttftMiddle, ttftSlow, itlMiddle, itlSlow };
            this.push(sample, time - age, 1);
            this.ttft = ttftMiddle ?? this.ttft;
            this.itl = itlMiddle ?? this.itl;
        }
        const [age, used, cached] = rows.at(-1) ?? [0, 0, 0];
        if (age > 2) this.push({ ...IDLE, used, cached, free: numBlocks - used - cached }, time, 1);
    }

    /** Add the sample of the `seconds` before a time; a gap since the last sample counts as idle. Mutates. */
    push(sample, time, seconds) {
        const before = this.columns.time.at(-1);
        const start = time - seconds;
        if (start > before + 0.5) {
            const { used, cached, free } = sample;
            const idle = { ...IDLE, used, cached, free };
            for (const at of new Set([Math.min(before + 1, start), start])) this.append(idle, at);
        }
        this.append(sample, time);
    }

    append(sample, time) {
        for (const name of COLUMNS) this.columns[name].push(name === "time" ? time : sample[name]);
    }

    startBin(time, totals) {
        this.bin = { time, totals, ttft: [], itl: [], kinds: new Map() };
    }

    /** Add a frame that arrived at a time. Returns whether that added a sample. Mutates. */
    add(frame, time) {
        if (this.bin.time === null || this.isBackwards(frame)) this.startBin(time, frame.totals);
        const { bin } = this;
        bin.ttft.push(...frame.ttft_ms);
        bin.itl.push(...frame.itl_ms);
        for (const [, kind, , number] of frame.events) {
            if (kind === "preempted" || kind === "evicted") bin.kinds.set(kind, (bin.kinds.get(kind) ?? 0) + number);
        }
        if (time - bin.time < 1) return false;
        this.endBin(frame, time);
        return true;
    }

    /** Return whether the totals of a frame restarted from 0, as after a restart of the server. */
    isBackwards(frame) {
        const before = this.bin.totals;
        return before !== null && frame.totals.generated_tokens < before.generated_tokens;
    }

    endBin(frame, time) {
        const { bin } = this;
        const seconds = time - bin.time;
        const grown = (name) => frame.totals[name] - bin.totals[name];
        this.ttft = quantile(bin.ttft, 0.5) ?? this.ttft;
        this.itl = quantile(bin.itl, 0.5) ?? this.itl;
        const sample = {
            ...usage(frame),
            generated: grown("generated_tokens") / seconds,
            prompt: grown("prompt_tokens") / seconds,
            hitRate: grown("queried_tokens") > 0 ? grown("hit_tokens") / grown("queried_tokens") : null,
            ttftMiddle: quantile(bin.ttft, 0.5),
            ttftSlow: quantile(bin.ttft, 0.95),
            itlMiddle: quantile(bin.itl, 0.5),
            itlSlow: quantile(bin.itl, 0.95),
        };
        this.push(sample, time, seconds);
        for (const [kind, number] of bin.kinds) this.marks.push({ time, kind, number });
        this.forget(time - this.windowS);
        this.startBin(time, frame.totals);
    }

    forget(before) {
        const { columns } = this;
        const first = columns.time.findIndex((time) => time >= before);
        if (first > 0) for (const name of COLUMNS) columns[name].splice(0, first);
        this.marks = this.marks.filter((mark) => mark.time >= before);
    }

    /** Return the newest sample of a column; null if there is none. */
    newest(name) {
        return this.columns[name].at(-1) ?? null;
    }
}
