// The page's model of a server: the sum of the hello and the frames of /live.
//
//     hello ──► Model: an empty memory with its number of blocks
//     frame ──► apply: overwrite what changed, and return it in a Change, so that only that is drawn again
//
// Pure: no document, no clock, no network. The same frames give the same model, which tests compare with the full
// state. Blocks are in typed arrays, one per column: a million blocks take 21 MB, and applying a frame is linear in its
// length.

export const FREE = 0;
export const USED = 1;
export const CACHED = 2;

export const ROOT = -1; // parent: first block of its prompt
export const UNPUBLISHED = -2; // parent: not in the prefix index
export const NOBODY = -1; // owner

export const KINDS = ["free", "one", "shared", "cached"];
export const [IS_FREE, IS_ONE, IS_SHARED, IS_CACHED] = [0, 1, 2, 3];

export const NUM_LOOKS = 24; // eight colours, each plain or with one of two marks

const MAX_EVENTS = 400;
const MAX_ENDED = 12;
const ENDS = ["finished", "aborted", "failed"];

/** The blocks of the KV memory. */
export class Memory {
    constructor(numBlocks) {
        this.numBlocks = numBlocks;
        this.states = new Uint8Array(numBlocks);
        this.refs = new Int32Array(numBlocks);
        this.owners = new Int32Array(numBlocks).fill(NOBODY);
        this.parents = new Int32Array(numBlocks).fill(UNPUBLISHED);
        this.times = new Float64Array(numBlocks);
        this.counts = [numBlocks, 0, 0, 0]; // of each kind
    }

    /** Forget everything. Mutates. */
    clear() {
        this.states.fill(FREE);
        this.refs.fill(0);
        this.owners.fill(NOBODY);
        this.parents.fill(UNPUBLISHED);
        this.times.fill(0);
        this.counts = [this.numBlocks, 0, 0, 0];
    }

    /** Store a frame's row of a block. Returns whether the block exists. Mutates. */
    write([id, state, refs, owner, parent, time]) {
        if (!(id >= 0 && id < this.numBlocks)) return false;
        this.counts[this.kind(id)] -= 1;
        this.states[id] = state;
        this.refs[id] = refs;
        this.owners[id] = state === FREE ? NOBODY : owner;
        this.parents[id] = state === FREE ? UNPUBLISHED : parent;
        this.times[id] = time;
        this.counts[this.kind(id)] += 1;
        return true;
    }

    /** Return a block's kind: free, held by one, shared, or cached. */
    kind(id) {
        const state = this.states[id];
        if (state === FREE) return IS_FREE;
        if (state === CACHED) return IS_CACHED;
        return this.refs[id] > 1 ? IS_SHARED : IS_ONE;
    }

    /** Return whether a block is in the prefix index. */
    isPublished(id) {
        return this.states[id] !== FREE && this.parents[id] !== UNPUBLISHED;
    }

    /** Return a block as an object. */
    block(id) {
        return {
            id,
            state: this.states[id],
            kind: KINDS[this.kind(id)],
            refs: this.refs[id],
            owner: this.owners[id],
            parent: this.parents[id],
            time: this.times[id],
        };
    }

    /** Return the blocks that a request reads: its own, and those before them in the prefix index. */
    blocksOf(owner) {
        const found = new Set();
        for (let id = 0; id < this.numBlocks; id += 1) {
            if (this.owners[id] !== owner || this.states[id] !== USED) continue;
            for (let block = id; block >= 0 && !found.has(block); block = this.parents[block]) found.add(block);
        }
        return found;
    }
}

/** Return a request as an object. */
function readRequest([id, status, tenant, promptTokens, computed, total, cached, preemptions, call, fromDisk, fromHost]) {
    return { id, status, tenant, promptTokens, computed, total, cached, preemptions, call, fromDisk, fromHost };
}

/** Return the use of blocks in a frame: of all engines if there are several. */
export function usage({ ledger, replicas = [] }) {
    if (replicas.length < 2) return { used: ledger.used, cached: ledger.cached, free: ledger.free };
    const sum = (name) => replicas.reduce((total, replica) => total + replica[name], 0);
    const [used, cached] = [sum("used"), sum("cached")];
    return { used, cached, free: sum("blocks") - used - cached };
}

/** The state of a server. `step` is -1 until the first frame, and null for a tenant. */
export class Model {
    constructor(hello) {
        this.hello = hello;
        this.memory = new Memory(hello.num_blocks);
        this.requests = new Map();
        this.numSeen = 0; // requests in total: numbers can be reused, keys are not
        this.looks = new Int32Array(NUM_LOOKS); // the number of requests with each look
        this.ended = []; // the last ended requests, newest first
        this.numEnded = 0; // ended requests since the page connected
        this.events = []; // newest last
        this.ledger = null;
        this.totals = null;
        this.replicas = []; // the engines, as the last frame shows them
        this.running = 0;
        this.waiting = 0;
        this.state = "starting";
        this.step = -1;
        this.time = 0;
        this.numFrames = 0;
        this.numRestarts = 0;
    }

    /**
     * Apply a frame. Mutates. Returns what changed: `blocks` (null: all), `requests` (whether any), `events`.
     * A full frame replaces the state; any other frame adds to it.
     */
    apply(frame) {
        const isRestart = frame.full && this.numFrames > 0 && frame.t < this.time;
        if (frame.full) {
            this.memory.clear();
            this.requests.clear();
            this.looks.fill(0);
        }
        const blocks = [];
        for (const row of frame.blocks) if (this.memory.write(row)) blocks.push(row[0]);
        for (const row of frame.requests) this.write(row);
        for (const row of frame.gone) this.end(row, frame.events);
        this.events.push(...frame.events.map(([t, kind, request, number]) => ({ t, kind, request, number })));
        if (this.events.length > MAX_EVENTS) this.events.splice(0, this.events.length - MAX_EVENTS);
        this.numEnded = frame.num_ended;
        this.ledger = frame.ledger;
        this.totals = frame.totals;
        this.running = frame.running;
        this.waiting = frame.waiting;
        this.state = frame.state;
        this.replicas = frame.replicas ?? [];
        this.step = frame.step;
        this.time = frame.t;
        this.numFrames += 1;
        if (isRestart) this.numRestarts += 1;
        return {
            blocks: frame.full ? null : blocks,
            requests: frame.full || frame.requests.length > 0 || frame.gone.length > 0,
            events: frame.events,
            isRestart,
        };
    }

    /** Store a frame's row of a request. Mutates. */
    write(row) {
        const { key, look } = this.requests.get(row[0]) ?? this.introduce();
        this.requests.set(row[0], { ...readRequest(row), key, look });
    }

    /** Return a new, unique key, and the look that the fewest requests have now. Mutates. */
    introduce() {
        const look = this.looks.indexOf(Math.min(...this.looks));
        this.looks[look] += 1;
        this.numSeen += 1;
        return { key: this.numSeen, look };
    }

    /** Return the look of a request; null if it has ended. */
    lookOf(id) {
        return this.requests.get(id)?.look ?? null;
    }

    /** End a request, with these token counts. Its event shows how it ended; a replaced beam has none. Mutates. */
    end([id, computed, total, cached, fromDisk, fromHost], events) {
        const request = this.requests.get(id);
        if (!request) return;
        this.requests.delete(id);
        this.looks[request.look] -= 1;
        const how = events.findLast(([, kind, who]) => who === id && ENDS.includes(kind));
        if (!how) return;
        this.ended.unshift({ ...request, computed, total, cached, fromDisk, fromHost, status: how[1] });
        if (this.ended.length > MAX_ENDED) this.ended.pop();
    }

    /** Return the requests in display order: running ones first, then by age. */
    listRequests() {
        const order = { running: 0, preempted: 1, swapped: 2, waiting: 3 };
        const place = (request) => order[request.status] ?? 4;
        return [...this.requests.values()].sort((a, b) => place(a) - place(b) || a.id - b.id);
    }
}
