// The table of requests: how much of each is computed, and how much of its prompt came from the cache.
//
//     |▓▓▓▓▒▒▒▒████████░░░░|      from disk · from host · cached · computed · to be computed; all bars on one scale
//
// Rows stay from frame to frame and only their cells are updated, so that a button keeps its focus.

import { paint } from "./colours.mjs";
import { count, counted, requestName } from "./format.mjs";

const MAX_ROWS = 60;
const CALL_LENGTH = "req-".length + 8; // enough to find the request in the logs
const FILL_UP_TO = 10; // rows, including recently ended requests

/** Rows in a table body. `onMark(id)` must highlight the blocks of this request; null: of none. */
export class Requests {
    constructor(body, note, { onMark }) {
        this.body = body;
        this.note = note;
        this.numMore = 0; // requests without a row
        this.numMoreEnded = 0; // the same, of ended requests
        this.scroller = body.closest(".scroll");
        this.scroller.addEventListener("scroll", () => this.tellMore());
        this.onMark = onMark;
        this.rows = new Map();
        this.pinned = null;
        this.pointed = null; // the row under the mouse; a removed row fires no pointerleave
        this.own = new Set(); // ids of calls from this page's chat
    }

    /** Show these requests, in this order, and below them some of the `numEnded` ended requests. Mutates. */
    update(requests, ended, numEnded) {
        const shown = requests.slice(0, MAX_ROWS);
        const lastEnded = ended.slice(0, Math.max(0, FILL_UP_TO - shown.length));
        shown.push(...lastEnded);
        const longest = Math.max(1, ...shown.map((request) => request.total));
        const kept = new Set(shown.map((request) => request.key));
        for (const [key, row] of this.rows) {
            if (kept.has(key)) continue;
            row.remove();
            this.rows.delete(key);
            if (row === this.pointed) this.point(null);
        }
        if (this.pinned !== null && !requests.some((request) => request.id === this.pinned)) this.pin(null);
        shown.forEach((request, place) => {
            const row = this.rows.get(request.key) ?? this.addRow(request);
            this.write(row, request, longest);
            if (this.body.children[place] !== row) this.body.insertBefore(row, this.body.children[place] ?? null);
        });
        this.numMore = Math.max(0, requests.length - MAX_ROWS);
        this.numMoreEnded = numEnded - lastEnded.length;
        this.tellMore();
    }

    /** Show how many requests are below the visible part, and how many have no row. Mutates. */
    tellMore() {
        const { scrollTop, clientHeight } = this.scroller;
        const isBelow = (row) => row.offsetTop + row.offsetHeight / 2 > scrollTop + clientHeight;
        const numBelow = [...this.body.children].filter(isBelow).length;
        const words = [
            numBelow ? `${counted(numBelow, "more request")} below: scroll.` : "",
            this.numMore ? `${counted(this.numMore, "more request")} not listed.` : "",
            this.numMoreEnded ? `${counted(this.numMoreEnded, "ended request")} not listed.` : "",
        ];
        const text = words.filter(Boolean).join(" ");
        if (this.note.textContent !== text) this.note.textContent = text;
    }

    addRow(request) {
        const row = document.getElementById("request-row").content.firstElementChild.cloneNode(true);
        const button = row.querySelector("button");
        button.append(requestName(request.id));
        paint(button.querySelector(".swatch"), request.look);
        button.addEventListener("click", () => this.pin(this.pinned === request.id ? null : request.id));
        row.addEventListener("pointerenter", () => this.point(row));
        row.addEventListener("pointerleave", () => this.point(null));
        row.dataset.id = request.id;
        this.rows.set(request.key, row);
        return row;
    }

    point(row) {
        this.pointed = row;
        this.onMark(row === null ? this.pinned : Number(row.dataset.id));
    }

    pin(id) {
        this.pinned = id;
        for (const row of this.rows.values())
            row.querySelector("button").ariaPressed = String(row.dataset.id === String(id));
        this.onMark(id);
    }

    write(row, request, longest) {
        const { promptTokens, computed, total, cached, fromDisk, fromHost } = request;
        const set = (name, text) => {
            const cell = row.querySelector(name);
            if (cell.textContent !== text) cell.textContent = text;
        };
        const status = request.status === "aborted" ? "left" : request.status;
        set(".status", request.preemptions ? `${status}, preempted ${request.preemptions}×` : status);
        set(".tenant", request.tenant);
        set(".own", this.own.has(request.call) ? "yours" : "");
        set(".call", request.call.slice(0, CALL_LENGTH));
        row.querySelector(".call").title = request.call;
        set(".tokens", `${count(promptTokens)} + ${count(Math.max(total - promptTokens, 0))}`);
        set(".cached", count(cached));
        row.dataset.status = request.status;
        const bar = row.querySelector("[role=progressbar]");
        bar.ariaValueMax = total;
        bar.ariaValueNow = computed;
        const disk = fromDisk ? `, ${fromDisk} of those from disk` : "";
        const host = fromHost ? `, ${fromHost} of those from host` : "";
        bar.ariaValueText = `${computed} of ${total} tokens computed, ${cached} of them from the cache${disk}${host}`;
        bar.ariaLabel = `request ${request.id}`;
        const part = (name, tokens) => (bar.querySelector(name).style.width = `${(100 * tokens) / longest}%`);
        const fromCache = Math.min(cached, computed);
        const disks = Math.min(fromDisk, fromCache);
        const hosts = Math.min(fromHost, fromCache - disks);
        part(".from-disk", disks);
        part(".from-host", hosts);
        part(".from-cache", fromCache - disks - hosts);
        part(".computed", computed - fromCache);
        part(".missing", Math.max(total - computed, 0));
    }
}
