// Live plots, drawn by uPlot, that replace the still pictures: values under the cursor, zoom by dragging, a legend that
// hides series. Plots of one group share the cursor, and the mark of the film next to them.

import { showNumber } from "./format.mjs";
import { onTheme, readColours } from "./theme.mjs";

const HEIGHT = 260;
const BARS_SHARE = 0.8; // of the width of a place, as in svg.py
const FEW_DECADES = 2.5; // as in axis.py
const LONGEST_NAME = 21;
const TILT = -30; // degrees, for names that do not fit
const CHARACTER = 6.5; // px
const MARKED = 24; // a line with at most this many points shows them

/** Return the upper edges of stacked columns; hidden ones take no space. */
export function stacked(columns, isShown) {
    const sums = columns[0]?.map(() => 0) ?? [];
    return columns.map((column, index) => {
        if (isShown(index)) column.forEach((value, at) => (sums[at] += value ?? 0));
        return [...sums];
    });
}

/** Return 1, 2 and 5 of every power of ten from below a range to above it. */
function logSteps(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
        found.push(...[1, 2, 5].map((step) => step * 10 ** power));
    }
    return found;
}

/** Return round numbers within a range, about five of them. */
function linearTicks(low, high) {
    const least = (high - low) / 5;
    const step = logSteps(least, least).find((one) => one >= 0.999 * least);
    const first = Math.ceil(low / step - 1e-9);
    const last = Math.floor(high / step + 1e-9);
    return Array.from({ length: last - first + 1 }, (_, index) => (first + index) * step);
}

/** Return the ticks of a logarithmic axis: 1, 2 and 5; over many decades only 1; linear ones if too few fit. */
export function logTicks(low, high) {
    const isNarrow = Math.log10(high / low) <= FEW_DECADES;
    const steps = logSteps(low, high).filter((_, index) => isNarrow || index % 3 === 0);
    const found = steps.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    return found.length > 1 ? found : linearTicks(low, high);
}

const LOG_AXIS = { splits: (_, __, low, high) => logTicks(low, high), filter: (_, ticks) => ticks };
const shortened = (name) => (name.length > LONGEST_NAME ? `${name.slice(0, 10)}…${name.slice(-10)}` : name);

/** A chart in its figure. */
export class ChartView {
    constructor(figure, chart) {
        this.chart = chart;
        this.colours = readColours();
        this.mark = null; // the position of the film on the x axis
        this.order = chart.series.map((_, index) => index); // from the top of the plot's list; areas overpaint
        if (chart.kind === "areas") this.order.reverse();
        const host = figure.querySelector(".plot");
        figure.classList.add("is-live");
        this.plot = new uPlot(this.options(host.clientWidth), this.data(() => true), host);
        new ResizeObserver(() => this.plot.setSize({ width: host.clientWidth, height: HEIGHT })).observe(host);
        onTheme(() => {
            this.colours = readColours();
            this.plot.redraw();
        });
    }

    data(isShown) {
        const { chart, order } = this;
        const columns = chart.series.map((one) => one.values.map((value) => this.drawable(value)));
        const found = chart.kind === "areas" ? stacked(columns, isShown) : columns;
        return [chart.places, ...order.map((index) => found[index])];
    }

    drawable(value) {
        return this.chart.y.scale === "log" && value <= 0 ? null : value;
    }

    options(width) {
        const { chart } = this;
        const isBars = chart.kind === "bars";
        const last = chart.names.length - 0.5;
        return {
            width,
            height: HEIGHT,
            cursor: {
                ...(chart.group ? { sync: { key: chart.group, setSeries: false } } : {}),
                drag: { x: !isBars, y: false },
                points: { show: !isBars },
            },
            legend: { live: true },
            scales: {
                x: { time: false, ...(isBars ? { range: [-0.5, last] } : this.across(chart.x)) },
                y: { distr: chart.y.scale === "log" ? 3 : 1, range: (_, low, high) => this.around(low, high) },
            },
            axes: [this.axis(chart.x, 0), this.axis(chart.y, 1)],
            series: [
                { label: chart.x.label, value: (_, place) => this.showPlace(place) },
                ...this.order.map((index) => this.series(index)),
            ],
            hooks: {
                draw: [() => this.drawMark()],
                setSeries: [(plot, _, change) => change.show !== undefined && this.restack(plot)],
            },
        };
    }

    across(axis) {
        if (axis.scale !== "log") return {};
        return { distr: 3, range: (_, low, high) => (low < high ? [low, high] : [low / 2, 2 * high]) };
    }

    /** Return the range of the y axis: from 0, or between round numbers if it is logarithmic. */
    around(low, high) {
        if (this.chart.y.scale !== "log") return [Math.min(0, low ?? 0), (high ?? 0) > 0 ? high * 1.05 : 1];
        if (this.chart.kind === "bars") low /= 2; // so that the smallest bar is visible
        const ticks = logSteps(low || 1, high || 10);
        const below = ticks.findLast((tick) => tick <= low * 1.001);
        const above = ticks.find((tick) => tick >= high * 0.999);
        return [below ?? ticks[0], above ?? ticks.at(-1)];
    }

    axis(axis, side) {
        const { names } = this.chart;
        const unit = axis.unit === "s" ? "s" : "";
        const write = (value) => (value === null ? "" : showNumber(value, unit));
        const label = axis.unit && axis.unit !== "s" ? `${axis.label}, ${axis.unit}` : axis.label;
        const isNamed = side === 0 && names.length > 0;
        return {
            label,
            labelSize: 20,
            labelFont: "12px system-ui",
            font: "11px system-ui",
            size: (plot) => (side === 1 ? 58 : this.isCrowded(plot) ? 100 : 28),
            rotate: (plot) => (side === 0 && this.isCrowded(plot) ? TILT : 0),
            stroke: () => this.colours.faint,
            grid: { show: !isNamed, stroke: () => this.colours.line, width: 1 },
            ticks: { show: false },
            ...(isNamed ? { splits: () => this.chart.places } : {}),
            ...(axis.scale === "log" ? LOG_AXIS : {}),
            values: (_, splits) => splits.map(isNamed ? (place) => shortened(names[place] ?? "") : write),
        };
    }

    /** Whether the names on the x axis do not fit side by side. */
    isCrowded(plot) {
        const { names } = this.chart;
        return Math.max(0, ...names.map((name) => shortened(name).length)) * CHARACTER * names.length > plot.width - 80;
    }

    series(index) {
        const { chart } = this;
        const one = chart.series[index];
        const colour = () => this.colours[one.colour];
        const isFilled = chart.kind !== "lines";
        return {
            label: one.name,
            stroke: colour,
            fill: isFilled ? colour : undefined,
            width: isFilled ? 0 : 2,
            spanGaps: true,
            points: { show: !isFilled && chart.places.length <= MARKED, size: 6, fill: colour },
            value: (_, __, ___, at) => showNumber(at === null ? null : one.values[at], chart.y.unit),
            ...(chart.kind === "bars" ? { paths: this.bars(index) } : {}),
        };
    }

    bars(index) {
        const width = BARS_SHARE / this.chart.series.length;
        const lefts = this.chart.places.map((place) => place - BARS_SHARE / 2 + index * width);
        return uPlot.paths.bars({
            disp: { x0: { unit: 1, values: () => lefts }, size: { unit: 1, values: () => [width] } },
        });
    }

    showPlace(place) {
        const { names, x } = this.chart;
        return names.length && place !== null ? names[place] : showNumber(place, x.unit);
    }

    restack(plot) {
        if (this.chart.kind !== "areas") return;
        plot.setData(this.data((index) => plot.series[1 + this.order.indexOf(index)].show), false);
    }

    /** Show the position of a film; null: hide it. Mutates. */
    markAt(place) {
        this.mark = place;
        this.plot.redraw(false);
    }

    drawMark() {
        const { plot, mark } = this;
        if (mark === null || mark < plot.scales.x.min || mark > plot.scales.x.max) return;
        const { ctx: context, bbox } = plot;
        context.fillStyle = this.colours.ink;
        context.fillRect(Math.round(plot.valToPos(mark, "x", true)), bbox.top, devicePixelRatio, bbox.height);
    }
}

/** Add buttons that save the still picture of a figure, as SVG or as a PNG of twice its size. */
export function addButtons(figure, title) {
    const name = title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "chart";
    const row = document.createElement("span");
    row.className = "buttons";
    for (const [kind, save] of [
        ["PNG", savePng],
        ["SVG", saveSvg],
    ]) {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = kind;
        button.setAttribute("aria-label", `Save “${title}” as ${kind}`);
        button.addEventListener("click", () => save(figure.querySelector(".still svg"), name));
        row.append(button);
    }
    figure.querySelector("figcaption").append(row);
}

/** Return a picture on white as a URL: light in every theme, for use in other pages. */
function addressOf(svg) {
    const copy = svg.cloneNode(true);
    copy.querySelector("style").remove();
    const ground = document.createElementNS(svg.namespaceURI, "rect");
    for (const side of ["width", "height"]) ground.setAttribute(side, "100%");
    ground.setAttribute("fill", "#ffffff");
    copy.prepend(ground);
    return `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
}

function download(address, name) {
    const link = document.createElement("a");
    link.href = address;
    link.download = name;
    link.click();
}

function saveSvg(svg, name) {
    download(addressOf(svg), `${name}.svg`);
}

/** Return the picture as the URL of a PNG. */
export async function pngOf(svg) {
    const image = new Image();
    image.src = addressOf(svg);
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = 2 * svg.width.baseVal.value;
    canvas.height = 2 * svg.height.baseVal.value;
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return canvas.toDataURL("image/png");
}

async function savePng(svg, name) {
    download(await pngOf(svg), `${name}.png`);
}
