// The list of events, and a live region that summarises them for screen readers, not too often.
//
// A full memory evicts in almost every step, so the evictions of one second share an entry with their count.

import { counted, requestName } from "./format.mjs";

const MAX_ROWS = 120;
const SPEAK_EVERY_MS = 6000;

const WORDS = {
    admitted: (who, number) => `${who} admitted with ${counted(number, "token")}`,
    finished: (who, number) => `${who} finished after ${counted(number, "token")}`,
    aborted: (who) => `${who} left`,
    failed: (who) => `${who} failed`,
    preempted: (who, number) => `${who} preempted, freed ${counted(number, "block")}`,
    evicted: (_, number) => `${counted(number, "cached block")} evicted`,
    rejected: (_, number) => `${counted(Math.max(number, 1), "request")} refused`,
};
const SPOKEN = { preempted: "preemption", evicted: "eviction", failed: "failure", rejected: "rejection" };

/** Events as an ordered list, newest first. `voice` is a live region, `filter` a select. */
export class Events {
    constructor(list, voice, filter) {
        this.list = list;
        this.voice = voice;
        this.filter = filter;
        this.unspoken = new Map();
        this.last = null; // the newest entry of evictions: {item, time, number}
        this.timer = null;
        filter.addEventListener("change", () => (list.dataset.filter = filter.value));
        list.dataset.filter = filter.value;
    }

    /** Add the events of a frame; `wallOf` converts their times to the time of day. Mutates. */
    add(events, wallOf) {
        for (const [time, kind, request, number] of events) {
            if (kind in SPOKEN) this.unspoken.set(kind, (this.unspoken.get(kind) ?? 0) + 1);
            if (kind === "evicted" && this.addToLast(time, number)) continue;
            const item = document.createElement("li");
            item.dataset.kind = kind;
            const clock = document.createElement("time");
            clock.textContent = new Date(1000 * wallOf(time)).toLocaleTimeString("en-GB");
            const words = WORDS[kind] ?? (() => `${kind} ${requestName(request)}`);
            item.append(clock, words(requestName(request), number));
            this.list.prepend(item);
            if (kind === "evicted") this.last = { item, time, number };
        }
        while (this.list.children.length > MAX_ROWS) this.list.lastElementChild.remove();
        if (this.unspoken.size && this.timer === null) {
            this.speak();
            this.timer = setTimeout(() => this.speakAgain(), SPEAK_EVERY_MS);
        }
    }

    /** Add evictions to the last entry if that is less than a second old. Returns whether it is. Mutates. */
    addToLast(time, number) {
        const { last } = this;
        if (last === null || time - last.time >= 1 || time < last.time) return false;
        last.number += number;
        last.item.lastChild.data = WORDS.evicted("", last.number);
        return true;
    }

    speak() {
        this.voice.textContent = [...this.unspoken].map(([kind, number]) => counted(number, SPOKEN[kind])).join(", ");
        this.unspoken.clear();
    }

    speakAgain() {
        this.timer = null;
        if (!this.unspoken.size) return;
        this.speak();
        this.timer = setTimeout(() => this.speakAgain(), SPEAK_EVERY_MS);
    }
}
