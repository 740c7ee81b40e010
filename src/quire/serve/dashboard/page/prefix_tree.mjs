// The prefix tree: which published block follows which.
//
// A prompt of a hundred blocks is a chain of a hundred similar nodes, so a chain without a fork, all of one kind, is
// shown as one run. Only unfolded runs are built, up to a limit: a tree of a million blocks takes the work of its
// visible part, plus one walk to count.

import { paint } from "./colours.mjs";
import { count, counted } from "./format.mjs";
import { CACHED, IS_ONE, IS_SHARED, KINDS, ROOT } from "./state.mjs";

const MAX_RUNS = 150;

/** The children of each published block, as lists linked through arrays, and the size of each subtree. */
export class TreeIndex {
    constructor(memory) {
        const { numBlocks } = memory;
        this.memory = memory;
        this.firstChild = new Int32Array(numBlocks).fill(-1);
        this.nextSibling = new Int32Array(numBlocks).fill(-1);
        this.sizes = new Int32Array(numBlocks);
        this.roots = [];
        this.numPublished = 0;
        for (let id = numBlocks - 1; id >= 0; id -= 1) if (memory.isPublished(id)) this.add(id);
        this.count();
    }

    add(id) {
        const parent = this.memory.parents[id];
        this.numPublished += 1;
        if (parent === ROOT || !this.memory.isPublished(parent)) {
            this.roots.push(id);
            return;
        }
        this.nextSibling[id] = this.firstChild[parent];
        this.firstChild[parent] = id;
    }

    /** Count subtrees, children before parents. No root reaches blocks in a cycle, so they are left out. */
    count() {
        const order = [...this.roots];
        for (let place = 0; place < order.length; place += 1) order.push(...this.children(order[place]));
        for (const id of order.reverse()) {
            this.sizes[id] = 1;
            for (const child of this.children(id)) this.sizes[id] += this.sizes[child];
        }
        this.roots = this.sorted(this.roots);
    }

    children(id) {
        const found = [];
        for (let child = this.firstChild[id]; child >= 0; child = this.nextSibling[child]) found.push(child);
        return found;
    }

    sorted(ids) {
        return ids.sort((a, b) => this.sizes[b] - this.sizes[a] || a - b);
    }

    /** Return the run that begins with a block. */
    run(first) {
        const { memory } = this;
        const blocks = [first];
        let children = this.children(first);
        while (children.length === 1 && this.isAlike(first, children[0])) {
            blocks.push(children[0]);
            children = this.children(children[0]);
        }
        return {
            first,
            blocks,
            kind: memory.kind(first),
            refs: memory.refs[first],
            owner: memory.owners[first],
            children: this.sorted(children),
            numBelow: this.sizes[first] - blocks.length,
        };
    }

    isAlike(a, b) {
        const { states, refs } = this.memory;
        return (
            states[a] === states[b] &&
            refs[a] === refs[b] &&
            (states[a] === CACHED || this.memory.owners[a] === this.memory.owners[b])
        );
    }

    /** Return the visible runs, in order: `isOpen(run, level)` returns whether a run is unfolded. */
    visible(isOpen, maxRuns = MAX_RUNS) {
        const found = [];
        let numHidden = 0;
        const visit = (ids, level) => {
            ids.forEach((id, place) => {
                if (found.length >= maxRuns) {
                    numHidden += 1;
                    return;
                }
                const run = this.run(id);
                const open = run.children.length > 0 && isOpen(run, level);
                found.push({ ...run, level, open, place: place + 1, siblings: ids.length });
                if (open) visit(run.children, level + 1);
            });
        };
        visit(this.roots, 1);
        return { runs: found, numHidden };
    }

    /** Return a run's own blocks, and all its ancestors and descendants. */
    related(run) {
        const found = new Set(run.blocks);
        for (let id = this.memory.parents[run.first]; id >= 0 && !found.has(id); id = this.memory.parents[id])
            found.add(id);
        const queue = [...run.children];
        while (queue.length) {
            const id = queue.pop();
            found.add(id);
            queue.push(...this.children(id));
        }
        return found;
    }
}

/** The tree as a list with the keyboard controls of a tree. `onMark(blocks)`: highlight these; null: none. */
export class PrefixTree {
    constructor(list, note, { onMark }) {
        this.list = list;
        this.note = note;
        this.onMark = onMark;
        this.unfolded = new Map(); // first block of a run -> whether the user opened (true) or closed it
        this.focused = -1;
        this.index = null;
        this.shown = "";
        list.addEventListener("keydown", (event) => this.walk(event));
        list.addEventListener("click", (event) => this.toggle(event.target.closest("[role=treeitem]")));
        list.addEventListener("pointerover", (event) => this.mark(event.target.closest("[role=treeitem]")));
        list.addEventListener("pointerleave", () => this.onMark(null));
        list.addEventListener("focusin", (event) => this.mark(event.target));
        list.addEventListener("focusout", () => this.onMark(null));
    }

    /** Draw the tree of a memory; `lookOf` returns the look of a request. Mutates. */
    update(memory, blockSize, lookOf) {
        this.index = new TreeIndex(memory);
        this.blockSize = blockSize;
        this.lookOf = lookOf;
        const { runs, numHidden } = this.index.visible((run, level) => this.unfolded.get(run.first) ?? level < 3);
        this.runs = runs;
        const signature = JSON.stringify(
            runs.map((run) => [
                run.first,
                run.blocks.length,
                run.refs,
                run.kind,
                run.owner,
                lookOf(run.owner),
                run.level,
                run.open,
                run.numBelow,
            ]),
        );
        if (signature === this.shown) return;
        this.shown = signature;
        const hadFocus = this.list.contains(document.activeElement);
        if (!runs.some((run) => run.first === this.focused)) this.focused = runs[0]?.first ?? -1;
        this.list.replaceChildren(...runs.map((run, place) => this.item(run, place)));
        if (hadFocus) this.list.querySelector('[tabindex="0"]')?.focus();
        const more = numHidden ? ` ${count(numHidden)} more branches not shown.` : "";
        const { numPublished } = this.index;
        this.note.textContent = numPublished ? `${counted(numPublished, "block")} in the prefix cache.${more}` : "";
    }

    item(run, place) {
        const item = document.createElement("li");
        item.setAttribute("role", "treeitem");
        item.setAttribute("aria-level", run.level);
        item.setAttribute("aria-setsize", run.siblings);
        item.setAttribute("aria-posinset", run.place);
        if (run.children.length) item.setAttribute("aria-expanded", run.open);
        item.tabIndex = run.first === this.focused ? 0 : -1;
        item.dataset.place = place;
        item.style.setProperty("--level", run.level - 1);
        const twist = document.createElement("span");
        twist.className = "twist";
        twist.ariaHidden = "true";
        twist.textContent = run.children.length ? (run.open ? "▾" : "▸") : "";
        const swatch = document.createElement("span");
        swatch.className = `swatch ${KINDS[run.kind]}`;
        if (run.kind === IS_ONE) paint(swatch, this.lookOf(run.owner));
        const label = document.createElement("span");
        label.textContent = this.describe(run);
        item.append(twist, swatch, label);
        return item;
    }

    describe(run) {
        const last = run.blocks.at(-1);
        const where =
            run.blocks.length === 1
                ? `block ${run.first}`
                : `${counted(run.blocks.length, "block")}, ${run.first} to ${last}`;
        const tokens = counted(run.blocks.length * this.blockSize, "token");
        const who =
            run.kind === IS_SHARED
                ? `read by ${run.refs}`
                : run.refs
                  ? run.owner >= 0
                      ? `read by #${run.owner}`
                      : "read by one"
                  : "cached";
        const below = run.children.length && !run.open ? ` · ${count(run.numBelow)} below` : "";
        return `${where} · ${tokens} · ${who}${below}`;
    }

    runOf(item) {
        return item ? this.runs[Number(item.dataset.place)] : null;
    }

    mark(item) {
        const run = this.runOf(item);
        if (run) this.onMark(this.index.related(run));
    }

    toggle(item) {
        const run = this.runOf(item);
        if (!run) return;
        this.focused = run.first;
        if (run.children.length) this.unfolded.set(run.first, !run.open);
        this.again();
    }

    again() {
        this.shown = "";
        this.update(this.index.memory, this.blockSize, this.lookOf);
        this.list.querySelector('[tabindex="0"]')?.focus();
    }

    walk(event) {
        const place = Number(event.target.dataset?.place);
        const run = this.runs?.[place];
        if (!run) return;
        const parentPlace = this.runs.findLastIndex((other, at) => at < place && other.level < run.level);
        const targets = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: this.runs.length - 1 };
        if (event.key === "Enter" || event.key === " ") this.toggle(event.target);
        else if (event.key === "ArrowRight" && run.children.length && !run.open) this.toggle(event.target);
        else if (event.key === "ArrowLeft" && run.open) this.toggle(event.target);
        else if (event.key === "ArrowRight" && run.open) this.focus(place + 1);
        else if (event.key === "ArrowLeft") this.focus(parentPlace);
        else if (event.key in targets) this.focus(targets[event.key]);
        else return;
        event.preventDefault();
    }

    focus(place) {
        const item = this.list.children[place];
        if (!item) return;
        for (const other of this.list.children) other.tabIndex = -1;
        item.tabIndex = 0;
        this.focused = this.runs[place].first;
        item.focus();
    }
}
