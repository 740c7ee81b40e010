// The table of replicas: each engine's state, its use of blocks, and why requests were sent to it.
//
//     replica 1   ready   3 texts   |▓▓▓▓▒▒▒▒░░░░| 31 % held, 40 % cached   62 %   0 restarts   80 prefix, 12 new
//
// The button of a row shows that engine's memory in the map. A tenant sees only the buttons.

import { count, percent } from "./format.mjs";

const REASONS = {
    prefix: "no other engine held more of the prompt",
    load: "another engine held more of the prompt, but had more work",
    new: "no engine held any of the prompt",
    only: "no other engine took requests",
};

/** Return the counts of requests by reason, as text: the most frequent first, without zero counts. */
export function routeWords(routes) {
    const pairs = Object.entries(routes).filter(([, number]) => number > 0);
    pairs.sort(([, one], [, other]) => other - one);
    return pairs.map(([reason, number]) => `${count(number)} ${reason}`).join(", ") || "–";
}

/** Rows in a table body. `onShow(index)` must show the memory of this engine. */
export class Replicas {
    constructor(region, { onShow }) {
        this.region = region;
        this.body = region.querySelector("tbody");
        this.onShow = onShow;
    }

    /** Make a row for each of several engines; `shown` is the engine whose memory is in the map. Mutates. */
    list(numReplicas, shown) {
        this.region.hidden = numReplicas < 2;
        while (this.body.children.length > numReplicas) this.body.lastElementChild.remove();
        while (this.body.children.length < numReplicas) this.addRow(this.body.children.length);
        [...this.body.children].forEach((row, index) => {
            row.querySelector("button").ariaPressed = String(index === shown);
        });
    }

    /** Show the engines' states. Mutates. */
    update(replicas) {
        if (this.region.hidden) return;
        replicas.forEach((replica, index) => this.write(this.body.children[index], replica));
    }

    addRow(index) {
        const row = document.getElementById("replica-row").content.firstElementChild.cloneNode(true);
        const button = row.querySelector("button");
        button.textContent = `replica ${index}`;
        button.addEventListener("click", () => this.onShow(index));
        row.querySelector("[role=img]").dataset.index = index;
        this.body.append(row);
    }

    write(row, replica) {
        const { state, failure, texts, restarts, routes, blocks, used, cached } = replica;
        const set = (name, text) => {
            const cell = row.querySelector(name);
            if (cell.textContent !== text) cell.textContent = text;
        };
        row.dataset.state = state;
        set(".state", state);
        row.querySelector(".state").title = failure;
        set(".texts", count(texts));
        set(".use", blocks ? `${count(used)} + ${count(cached)} of ${count(blocks)}` : "–");
        set(".hits", replica.queried_tokens ? percent(replica.hit_tokens / replica.queried_tokens) : "–");
        set(".restarts", count(restarts));
        set(".routes", routeWords(routes));
        row.querySelector(".routes").title = Object.entries(REASONS)
            .map(([reason, meaning]) => `${reason}: ${meaning}`)
            .join("\n");
        const bar = row.querySelector("[role=img]");
        bar.ariaLabel = `replica ${bar.dataset.index}: ${used} of ${blocks} blocks in use, ${cached} cached`;
        const part = (name, number) => (bar.querySelector(name).style.width = `${(100 * number) / Math.max(blocks, 1)}%`);
        part(".in-use", used);
        part(".kept", cached);
        part(".missing", blocks - used - cached);
    }
}
