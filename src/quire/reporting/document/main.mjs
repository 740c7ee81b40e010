// Starts the page: a view for every chart and film, in the order of the page.

import { addButtons, ChartView } from "./charts.mjs";
import { FilmView } from "./film.mjs";

const content = JSON.parse(document.getElementById("content").textContent);
const figures = (kind) => document.querySelectorAll(`figure.${kind}`);
const charts = content.charts.map((chart, index) => {
    const figure = figures("chart")[index];
    addButtons(figure, chart.title);
    return new ChartView(figure, chart);
});
const films = content.films.map((film, index) => {
    const beside = charts.filter((view) => film.group && view.chart.group === film.group);
    return new FilmView(figures("film")[index], film, (time) => beside.forEach((view) => view.markAt(time)));
});
window.quire = { charts, films };
await Promise.all(films.map((film) => film.start()));
window.quire.isReady = true;
