// The page: connects the stream, the model of the server and the views.
//
//     Live ──► Model.apply ──► Change ──► block map, requests, events      with every frame
//                   └──► History ──► plots                                once a second
//                   └──► replicas, prefix tree, the summary in words                at most once a second
//
// Frames are applied as they arrive; drawing waits for the next animation frame.

import { BlockMap } from "./block_map.mjs";
import { Chat } from "./chat.mjs";
import { applyTheme } from "./colours.mjs";
import { Events } from "./events.mjs";
import { age, bytes, count, counted, milliseconds, percent, rate, requestName } from "./format.mjs";
import { History } from "./history.mjs";
import { Live } from "./live.mjs";
import { Plots } from "./plots.mjs";
import { PrefixTree } from "./prefix_tree.mjs";
import { Replicas } from "./replicas.mjs";
import { Requests } from "./requests.mjs";
import { Model, ROOT, UNPUBLISHED, usage } from "./state.mjs";

const KEY_NAME = "quire-key";
const THEME_NAME = "quire-theme";
const SPEAK_EVERY_MS = 20_000;
const WHOSE = ["num_blocks", "scope", "tenant"]; // fields of the hello that identify the memory shown
const find = (id) => document.getElementById(id);

const STATES = {
    unloaded: "The model is not loaded; the next request loads it.",
    starting: "The model is being loaded.",
    draining: "The server is shutting down: running requests may finish, new ones are refused.",
    unresponsive: "The engine has not responded for some seconds. The data shown is out of date.",
    restarting: "The engine was lost and is restarting.",
    failed: "The engine could not be restarted; see the server's log.",
    closed: "The engine has been shut down.",
};

class Page {
    constructor() {
        this.model = null;
        this.history = new History();
        this.wallOffset = 0; // time of day minus the engine's time, in seconds
        this.lastSlow = 0;
        this.spokenAt = -SPEAK_EVERY_MS;
        this.isAsked = false;
        this.marked = null; // the highlighted request; null: none
        this.live = new Live(`live${location.search}`, {
            onObject: (object) => this.take(object),
            onPhase: (...phase) => this.showPhase(...phase),
        });
        this.live.key = sessionStorage.getItem(KEY_NAME) ?? "";
        this.map = new BlockMap(find("map"), { onPoint: (...point) => this.showBlock(...point) });
        this.requests = new Requests(find("request-rows"), find("requests-note"), {
            onMark: (id) => this.markRequest(id),
        });
        this.replicas = new Replicas(find("replicas"), { onShow: (index) => this.showReplica(index) });
        this.events = new Events(find("event-list"), find("event-voice"), find("event-filter"));
        this.tree = new PrefixTree(find("tree"), find("tree-note"), { onMark: (blocks) => this.map.highlight(blocks) });
        this.chat = new Chat(find("chat-form"), find("transcript"), {
            headers: () => this.live.headers(),
            onCall: (id) => this.requests.own.add(id),
        });
        this.plots = new Plots(find("plots"), this.history);
        this.listen();
        this.live.connect();
    }

    listen() {
        const theme = find("theme");
        theme.addEventListener("change", () => {
            localStorage.setItem(THEME_NAME, theme.value);
            this.recolour();
        });
        theme.value = localStorage.getItem(THEME_NAME) ?? "auto";
        matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
        applyTheme(theme.value);
        find("retry").addEventListener("click", () => this.live.connect());
        find("key-button").addEventListener("click", () => this.askForKey(""));
        find("key-form").addEventListener("submit", (event) => this.takeKey(event));
        find("key-cancel").addEventListener("click", () => find("key-dialog").close());
        for (const button of document.querySelectorAll("[data-copies]"))
            button.addEventListener("click", () => this.copy(button));
        setInterval(() => this.countDown(), 500);
    }

    recolour() {
        applyTheme(find("theme").value);
        this.map.redraw();
        this.plots.recolour();
    }

    // ---- lines of the stream ------------------------------------------------------------------------------------

    take(object) {
        if (object.type === "hello") this.greet(object);
        else if (object.type === "frame" && this.model) this.apply(object);
    }

    greet(hello) {
        const before = this.model?.hello;
        this.model = new Model(hello);
        this.chat.model = hello.model;
        this.chat.attached.allow(hello.reads_images);
        document.title = `${hello.model} · quire`;
        find("model-name").textContent = hello.model;
        this.offerModels(hello);
        this.replicas.list(hello.num_replicas, hello.replica);
        find("scope").textContent = hello.scope === "operator" ? "operator" : `tenant ${hello.tenant}`;
        find("scope").title =
            hello.scope === "operator" ? "Everything is shown." : "Only your own requests and blocks are shown.";
        document.body.dataset.scope = hello.scope;
        find("memory-size").textContent =
            `${counted(hello.num_blocks, "block")} of ${counted(hello.block_size, "token")}, ` +
            `${bytes(hello.bytes_per_block)} each`;
        for (const span of document.querySelectorAll(".of-replica"))
            span.textContent = hello.num_replicas > 1 ? ` · replica ${hello.replica}` : "";
        this.describeModel(hello);
        find("no-chat").hidden = hello.generates;
        for (const id of ["chat-form", "transcript"]) find(id).hidden = !hello.generates;
        if (!before || WHOSE.some((name) => before[name] !== hello[name])) {
            this.history = this.plots.history = new History();
            this.history.fill(hello.history, hello.num_blocks * hello.num_replicas, Date.now() / 1000);
            this.isSampled = true; // drawn with the first frame
        }
        this.map.show(this.model.memory, (id) => this.model.lookOf(id));
    }

    /** Offer the server's models; the URL keeps the choice. Mutates. */
    offerModels({ model, models }) {
        const select = find("model-select");
        select.replaceChildren(...models.map((name) => new Option(name, name, false, name === model)));
        select.onchange = () => {
            location.search = `?${new URLSearchParams({ model: select.value })}`;
        };
        find("model-choice").hidden = models.length < 2;
    }

    /** Show the memory of another engine; the URL keeps the choice. Mutates. */
    showReplica(index) {
        const query = new URLSearchParams(location.search);
        query.set("replica", index);
        history.replaceState(null, "", `?${query}`);
        this.live.url = `live?${query}`;
        this.live.connect();
    }

    /** Show example calls of the model, and its facts. Mutates. */
    describeModel({ calls, facts }) {
        for (const [id, where] of Object.entries({ "call-terminal": "terminal", "call-python": "Python" }))
            find(id).textContent = calls[where].replaceAll("{address}", location.origin);
        const pairs = facts.map(([label, text]) => {
            const pair = document.createElement("div");
            for (const [tag, words] of [
                ["dt", label],
                ["dd", text],
            ])
                pair.append(Object.assign(document.createElement(tag), { textContent: words }));
            return pair;
        });
        find("facts").replaceChildren(...pairs);
    }

    async copy(button) {
        const text = find(button.dataset.copies).textContent;
        try {
            await navigator.clipboard.writeText(text);
            find("call-note").textContent = "Copied.";
        } catch {
            getSelection().selectAllChildren(find(button.dataset.copies));
            find("call-note").textContent =
                "The browser does not allow copying here. The text is selected: press Ctrl-C.";
        }
    }

    apply(frame) {
        const change = this.model.apply(frame);
        const now = Date.now() / 1000;
        if (frame.full) this.wallOffset = now - frame.t;
        this.map.update(change.blocks);
        this.events.add(change.events, (time) => time + this.wallOffset);
        if (change.isRestart) this.requests.pin(null);
        const isSampled = this.history.add(frame, now);
        this.later(isSampled);
    }

    later(isSampled) {
        this.isSampled ||= isSampled;
        if (this.isAsked) return;
        this.isAsked = true;
        requestAnimationFrame(() => {
            this.isAsked = false;
            this.draw();
        });
    }

    draw() {
        const { model } = this;
        if (model.numFrames === 0) return; // after a reconnect: the hello has arrived, the first frame has not
        this.requests.update(model.listRequests(), model.ended, model.numEnded);
        this.showFigures();
        this.summarise();
        this.showState();
        const now = performance.now();
        if (this.isSampled) this.plots.update();
        this.isSampled = false;
        if (now < this.lastSlow) return;
        this.tree.update(model.memory, model.hello.block_size, (id) => model.lookOf(id));
        this.speak(now);
        if (this.marked !== null) this.markRequest(this.marked);
        this.lastSlow = now + Math.max(900, 20 * (performance.now() - now));
    }

    // ---- figures and text ---------------------------------------------------------------------------------------

    showFigures() {
        const { ledger, totals, running, waiting } = this.model;
        const { history } = this;
        const set = (name, text) => (find(`figure-${name}`).textContent = text);
        set("running", count(running));
        set("waiting", count(waiting));
        const { used, cached, free } = usage(this.model);
        const numBlocks = Math.max(used + cached + free, 1);
        set("used", percent(used / numBlocks));
        set("cached", percent(cached / numBlocks));
        set("rate", rate(history.newest("generated")));
        set("ttft", milliseconds(history.ttft));
        set("itl", milliseconds(history.itl));
        set("hits", totals.queried_tokens ? percent(totals.hit_tokens / totals.queried_tokens) : "–");
        find("tile-guesses").hidden = find("tile-pace").hidden = totals.verified_guesses === 0;
        if (totals.verified_guesses > 0) {
            set("guesses", percent(totals.right_guesses / totals.verified_guesses));
            set("pace", (1 + totals.right_guesses / totals.drafts).toFixed(1));
        }
        const { disk_slots: slots, disk_blocks: kept, disk_tokens: hits } = totals;
        find("tile-disk").hidden = find("key-disk").hidden = slots === 0;
        if (slots > 0) {
            set("disk", count(kept));
            find("tile-disk").title = `${count(kept)} of ${count(slots)} blocks; ${count(hits)} tokens from disk`;
        }
        const { host_blocks: room, host_cached: copies, host_tokens: moved } = totals;
        find("tile-host").hidden = find("key-host").hidden = moved === 0 && copies === 0;
        if (room > 0) {
            set("host", count(copies));
            find("tile-host").title = `${count(copies)} of ${count(room)} blocks; ${count(moved)} tokens from host`;
        }
        const { replicas } = this.model;
        find("tile-engines").hidden = replicas.length < 2;
        set("engines", `${replicas.filter(({ state }) => state === "ready").length} of ${replicas.length}`);
        this.replicas.update(replicas);
        set("saved", count(ledger.saved));
        set("evictions", count(totals.evictions));
        set("preemptions", count(totals.preemptions));
        set("rejected", count(totals.rejected));
        const isIdle = this.model.requests.size === 0;
        document.body.classList.remove("is-blank");
        document.body.classList.toggle("is-idle", isIdle && this.model.ended.length === 0);
        document.body.classList.toggle("is-new", isIdle && totals.prompt_tokens === 0);
    }

    summarise() {
        const { memory, hello } = this.model;
        const [free, one, shared, cached] = memory.counts.map(count);
        const rest = hello.scope === "operator" ? "free" : "free or others'";
        const { state, failure } = this.model.replicas[hello.replica] ?? { state: "ready" };
        const trouble = state === "ready" ? "" : `Replica ${hello.replica} is ${state}: ${failure}. `;
        find("map-summary").textContent =
            `${trouble}${one} held by one request, ${shared} shared by several, ${cached} cached, ${free} ${rest}.`;
        const perCell = Number(find("map").querySelector("canvas").dataset.perCell ?? 1);
        find("map-note").textContent =
            perCell > 1 ? `Each cell shows ${perCell} blocks: the more of them are held, the stronger its colour.` : "";
    }

    /** Announce the summary to screen readers, not too often. Mutates. */
    speak(now) {
        if (now < this.spokenAt + SPEAK_EVERY_MS) return;
        this.spokenAt = now;
        find("map-voice").textContent = `Memory: ${find("map-summary").textContent}`;
    }

    showBlock(first, numBlocks, byKey) {
        const details = find("block-details");
        details.ariaLive = byKey ? "polite" : "off";
        if (first < 0) {
            details.replaceChildren("Point at a block, or select one with the arrow keys.");
            details.classList.add("hint");
            return;
        }
        details.classList.remove("hint");
        details.replaceChildren(numBlocks === 1 ? this.describe(first) : this.describeMany(first, numBlocks));
    }

    describe(id) {
        const { memory, time } = this.model;
        const block = memory.block(id);
        const since = `for ${age(Math.max(0, time - block.time))}`;
        const parent =
            { [ROOT]: "first block of its prompt", [UNPUBLISHED]: "not published" }[block.parent] ??
            `after block ${block.parent}`;
        const hasEnded = block.owner >= 0 && this.model.lookOf(block.owner) === null;
        const owner = `taken by ${requestName(block.owner)}${hasEnded ? ", which has ended" : ""}`;
        const words = {
            free: this.model.hello.scope === "operator" ? ["free"] : ["free, or another's"],
            one: ["held by one", "1 reference", owner, since, parent],
            shared: ["shared", `${block.refs} references`, owner, since, parent],
            cached: ["cached", "no references", owner, since, parent],
        }[block.kind];
        return `Block ${id}: ${words.join(" · ")}`;
    }

    describeMany(first, numBlocks) {
        const counts = [0, 0, 0, 0];
        for (let id = first; id < first + numBlocks; id += 1) counts[this.model.memory.kind(id)] += 1;
        const [free, one, shared, cached] = counts;
        const where = `Blocks ${count(first)} to ${count(first + numBlocks - 1)}`;
        return `${where}: ${one} held by one · ${shared} shared · ${cached} cached · ${free} free`;
    }

    // ---- requests -----------------------------------------------------------------------------------------------

    markRequest(id) {
        const blocks = id === null ? null : this.model.memory.blocksOf(id);
        this.marked = id;
        this.map.highlight(blocks?.size ? blocks : null); // an ended request holds no blocks
    }

    // ---- state of the connection --------------------------------------------------------------------------------

    showPhase(phase, text, retryAt) {
        if (phase === this.phase && phase === "live") return;
        if (phase === "connecting" && this.phase === "lost") {
            this.retryAt = 0; // the data is still out of date: the banner stays until the connection is back
            this.countDown();
            return;
        }
        this.phase = phase;
        this.phaseText = text;
        this.retryAt = retryAt;
        if (phase === "locked") this.askForKey(this.live.key ? text : "");
        this.showState();
        this.countDown();
    }

    showState() {
        const state = this.model?.state ?? "ready";
        const isTold =
            this.phase === "live" && state in STATES && this.model.step !== undefined && this.model.numFrames > 0;
        const labels = {
            connecting: "connecting",
            live: isTold ? state : "live",
            lost: "connection lost",
            locked: "key needed",
        };
        const label = labels[this.phase] ?? "";
        document.body.dataset.phase = isTold ? "troubled" : this.phase;
        if (find("phase").textContent !== label) find("phase").textContent = label;
        find("banner").hidden = !(isTold || this.phase === "lost" || this.phase === "locked");
        find("retry").hidden = this.phase !== "lost";
        if (isTold) find("banner-text").textContent = STATES[state];
        if (this.phase === "locked")
            find("banner-text").textContent = "This server needs an API key.";
        if (this.phase === "lost")
            find("banner-text").textContent = `Connection lost: ${this.phaseText}. The data shown is out of date.`;
    }

    countDown() {
        const seconds = Math.max(0, Math.ceil((this.retryAt - Date.now()) / 1000));
        find("banner-countdown").textContent =
            this.phase !== "lost" ? "" : seconds ? `Trying again in ${seconds} s.` : "Trying again.";
    }

    askForKey(message) {
        find("key-error").textContent = message;
        if (!find("key-dialog").open) find("key-dialog").showModal();
        find("key-input").value = "";
        find("key-input").focus();
    }

    takeKey(event) {
        event.preventDefault();
        const key = find("key-input").value.trim();
        if (key) sessionStorage.setItem(KEY_NAME, key);
        else sessionStorage.removeItem(KEY_NAME);
        this.live.key = key;
        find("key-dialog").close();
        this.live.connect();
    }
}

window.quire = new Page(); // for the curious, and for the tests
