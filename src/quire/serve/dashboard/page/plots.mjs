// Four plots of the last minutes, drawn by uPlot: memory, throughput, and two latencies.
//
// Every plot marks a preemption with a line, and evictions with a tick at the bottom. Each plot has its newest value as
// text next to its heading, which screen readers read instead of the plot.

import { readColours } from "./colours.mjs";
import { count, milliseconds, rate } from "./format.mjs";

const HEIGHT = 150;
const TICK = 4; // px
const SYNC = "minutes";
const WINDOWS = [60, 120, 300]; // s: use the shortest that contains all samples
const STEPS = { 60: 15, 120: 30, 300: 60 };

/** The plots: their columns, how to draw them, and how to describe the newest value. */
const PLOTS = {
    memory: {
        series: [
            ["free", "free", { fill: "free" }],
            ["cached", "cached", { fill: "cached" }],
            ["used", "accent", { fill: "accent" }],
        ],
        stacked: true,
        value: count,
        now: (history) =>
            history.newest("used") === null
                ? ""
                : ["used", "cached", "free"].map((name) => `${count(history.newest(name))} ${name}`).join(", "),
    },
    throughput: {
        series: [
            ["generated", "accent", {}],
            ["prompt", "faint", {}],
        ],
        value: rate,
        now: (history) =>
            history.newest("generated") === null
                ? ""
                : `${rate(history.newest("generated"))} new, ${rate(history.newest("prompt"))} prompt`,
    },
    ttft: {
        series: [
            ["ttftSlow", "faint", { points: true }],
            ["ttftMiddle", "accent", { points: true }],
        ],
        value: milliseconds,
        now: (history) => (history.ttft === null ? "" : `median ${milliseconds(history.ttft)}`),
    },
    itl: {
        series: [
            ["itlSlow", "faint", {}],
            ["itlMiddle", "accent", {}],
        ],
        value: milliseconds,
        now: (history) => (history.itl === null ? "" : `median ${milliseconds(history.itl)}`),
    },
};

/** Add columns up, the last at the bottom, so that areas are stacked. */
export function stack(columns) {
    const found = [];
    for (const column of [...columns].reverse()) {
        const below = found[0];
        found.unshift(below ? column.map((value, at) => value + below[at]) : column);
    }
    return found;
}

/** The plots in their figures: `[data-plot=NAME]` within `root`. */
export class Plots {
    constructor(root, history) {
        this.history = history;
        this.colours = readColours();
        this.plots = [];
        for (const [name, plan] of Object.entries(PLOTS)) {
            const figure = root.querySelector(`[data-plot=${name}]`);
            const host = figure.querySelector(".plot");
            const plot = new uPlot(this.options(plan, host.clientWidth), [[], ...plan.series.map(() => [])], host);
            this.plots.push({ plan, plot, host, now: figure.querySelector(".now") });
            new ResizeObserver(() => plot.setSize({ width: host.clientWidth, height: HEIGHT })).observe(host);
        }
    }

    options(plan, width) {
        const series = plan.series.map(([label, colour, more]) => ({
            label,
            stroke: () => this.colours[colour],
            fill: more.fill ? () => this.colours[more.fill] : undefined,
            width: more.fill ? 0 : colour === "accent" ? 1.75 : 1,
            points: { show: Boolean(more.points), size: 4, fill: () => this.colours[colour], width: 0 },
            spanGaps: true,
        }));
        const axis = {
            stroke: () => this.colours.faint,
            grid: { stroke: () => this.colours.line, width: 1 },
            ticks: { show: false },
            font: "11px system-ui",
        };
        return {
            width: width || 300,
            height: HEIGHT,
            padding: [6, 14, 0, 0],
            legend: { show: false },
            cursor: { sync: { key: SYNC }, drag: { x: false, y: false }, points: { show: false } },
            scales: {
                x: { range: () => this.window() },
                y: { range: (_, low, high) => [0, high > 0 ? high * (plan.stacked ? 1 : 1.1) : 1] },
            },
            axes: [
                {
                    ...axis,
                    size: 22,
                    splits: () => this.splits(),
                    values: (_, splits) => this.labels(splits, (time) => this.ago(time)),
                    grid: { show: false },
                },
                { ...axis, size: 52, space: 30, values: (_, splits) => this.labels(splits, plan.value) },
            ],
            series: [{}, ...series],
            hooks: { draw: [(plot) => this.drawMarks(plot)] },
        };
    }

    labels(splits, write) {
        return splits.map((value) => (this.history.columns.time.length ? write(value) : ""));
    }

    window() {
        const times = this.history.columns.time;
        const end = times.at(-1) ?? 0;
        const known = end - (times[0] ?? 0);
        return [end - (WINDOWS.find((seconds) => seconds >= known) ?? this.history.windowS), end];
    }

    splits() {
        const [start, end] = this.window();
        const step = STEPS[Math.round(end - start)] ?? 60;
        const found = [];
        for (let time = end; time > start + step / 2; time -= step) found.unshift(time);
        return found;
    }

    ago(time) {
        const seconds = Math.round(this.window()[1] - time);
        if (seconds <= 0) return "now";
        return seconds % 60 ? `−${seconds} s` : `−${seconds / 60} min`;
    }

    drawMarks(plot) {
        const { ctx: context, bbox } = plot;
        const [start, end] = this.window();
        const scale = window.devicePixelRatio || 1;
        context.save();
        context.fillStyle = this.colours.warn;
        for (const { time, kind } of this.history.marks) {
            if (time < start || time > end) continue;
            const x = Math.round(plot.valToPos(time, "x", true));
            const height = kind === "preempted" ? bbox.height : TICK * scale;
            context.globalAlpha = kind === "preempted" ? 0.8 : 0.6;
            context.fillRect(x, bbox.top + bbox.height - height, scale, height);
        }
        context.restore();
    }

    /** Draw the present history. Mutates. */
    update() {
        const { columns } = this.history;
        for (const { plan, plot, now } of this.plots) {
            const values = plan.series.map(([name]) => columns[name]);
            plot.setData([columns.time, ...(plan.stacked ? stack(values) : values)]);
            now.textContent = plan.now(this.history);
        }
    }

    /** Use the colours of a new theme. Mutates. */
    recolour() {
        this.colours = readColours();
        for (const { plot } of this.plots) plot.redraw();
    }
}
