"""Charts as SVG: a picture that needs no script, for a README, for paper, and for a page before its scripts run.

    title
    ── one  ── two            the legend, in as many rows as it needs
    rate, tok/s               what the y axis shows
    20 ┤
    10 ┤      plot
     0 ┼──────┬──────┬
       0      1      2   users

Colours are attributes, those of a light ground, so that every reader of SVG knows them; a rule of a style sheet takes
the others where the ground is dark. A picture on its own has a ground, one in a page has that of the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape as escape_markup

from quire.simulate.page.axis import Range, show_number
from quire.simulate.page.content import AREAS, BARS, Axis, Chart
from quire.simulate.page.theme import Theme, colour_names

WIDTH, HEIGHT = 760, 300  # of the picture, and of what is plotted
LEFT, RIGHT, BOTTOM = 72, 20, 52
ROW = 22
MARKED = 24  # a line of at most so many points shows them
MAX_LABELLED_BARS = 24
FONT = "system-ui, 'DejaVu Sans', 'Noto Sans', sans-serif"
CHARACTER = 7.0  # px, of the size that the labels have
END, MIDDLE = "text-anchor='end'", "text-anchor='middle'"
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def chart_svg(chart: Chart, *, on_ground: bool = True) -> str:
    """Return a chart as a picture, well-formed XML. Does not mutate."""
    return _Picture(chart).render(on_ground)


@dataclass(frozen=True, slots=True)
class _Spot:
    x: float
    y: float

    def __str__(self) -> str:
        return f"{self.x:.1f} {self.y:.1f}"


class _Picture:
    """One chart on its way to being a picture."""

    def __init__(self, chart: Chart) -> None:
        self._chart = chart
        self._theme = Theme.read()
        self._colours = colour_names(chart)
        self._used = {"ink", "faint", "line", *self._colours}
        self._legend = list(self._legend_places())
        num_rows = self._legend[-1][1] + 1 if self._legend else 0
        self._top = 34 + ROW * num_rows + ROW
        self._height = self._top + HEIGHT + BOTTOM
        columns = stacked(chart) if chart.kind == AREAS else [one.values for one in chart.series]
        self._columns = [[chart.y_axis.drawable(value) for value in column] for column in columns]
        self._x = self._x_range()
        self._y = Range.around(chart.y_axis, [v for column in self._columns for v in column if v is not None])

    def _x_range(self) -> Range:
        if self._chart.kind == BARS:
            return Range(-0.5, max(len(self._chart.x), 1) - 0.5, "linear")
        places = map(self._chart.x_axis.drawable, self._chart.places)
        return Range.of(self._chart.x_axis, [place for place in places if place is not None])

    def render(self, on_ground: bool) -> str:
        chart, width, height = self._chart, WIDTH, self._height
        body = [self._text(LEFT - 60, 22, chart.title, "font-weight='600' font-size='16'")]
        body += [part for index in range(len(chart.series)) for part in self._legend_entry(index)]
        body += [*self._y_ticks(), *self._x_ticks()]
        draw = {BARS: self._bars, AREAS: self._areas}.get(chart.kind, self._lines)
        body += draw()
        if on_ground:
            self._used.add("panel")
            body.insert(0, f"<rect width='{width}' height='{height}' {self._paint('fill', 'panel')}/>")
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
            f"viewBox='0 0 {width} {height}' font-family=\"{FONT}\" font-size='12' role='img' "
            f'aria-label="{escape(chart.title)}">'
        )
        return "\n".join([head, self._style(), *body, "</svg>"]) + "\n"

    def _style(self) -> str:
        rules = "".join(
            f".{kind}-{name}{{{kind}:{self._theme.dark[name]}}}"
            for name in sorted(self._used)
            for kind in ("fill", "stroke")
        )
        return f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"

    def _paint(self, kind: str, name: str) -> str:
        return f"class='{kind}-{name}' {kind}='{self._theme.light[name]}'"

    def _text(self, x: float, y: float, words: str, attributes: str = "", colour: str = "ink") -> str:
        return f"<text x='{x:.1f}' y='{y:.1f}' {self._paint('fill', colour)} {attributes}>{escape(words)}</text>"

    # ---- legend and axes ----------------------------------------------------------------------------------------

    def _legend_places(self) -> Iterator[tuple[float, int]]:
        """Yield where each entry of the legend stands: x and row."""
        x, row = 12.0, 0
        for one in self._chart.series:
            width = 34 + CHARACTER * len(one.name)
            if x > 12.0 and x + width > WIDTH:
                x, row = 12.0, row + 1
            yield x, row
            x += width

    def _legend_entry(self, index: int) -> list[str]:
        x, row = self._legend[index]
        y = 34 + ROW * row + 10
        return [
            f"<rect x='{x:.1f}' y='{y - 8}' width='14' height='8' {self._paint('fill', self._colours[index])}/>",
            self._text(x + 20, y, self._chart.series[index].name),
        ]

    def _y_ticks(self) -> Iterator[str]:
        axis = self._chart.y_axis
        yield self._text(12, self._top - 10, _axis_title(axis), colour="faint")
        for tick in self._y.ticks():
            y = self._down(tick)
            yield f"<path d='M{LEFT} {y:.1f}H{WIDTH - RIGHT}' {self._paint('stroke', 'line')}/>"
            yield self._text(LEFT - 8, y + 4, show_number(tick, axis.unit if axis.unit == "s" else ""), END, "faint")

    def _x_ticks(self) -> Iterator[str]:
        chart, bottom = self._chart, self._top + HEIGHT
        if chart.kind == BARS:
            labels = list(zip(chart.places, chart.names, strict=True))
        else:
            unit = chart.x_axis.unit if chart.x_axis.unit == "s" else ""
            labels = [(tick, show_number(tick, unit)) for tick in self._x.ticks()]
        for place, label in labels:
            yield self._text(self._right(place), bottom + 18, label, MIDDLE, "faint")
        title = _axis_title(chart.x_axis)
        yield self._text((LEFT + WIDTH - RIGHT) / 2, bottom + 40, title, MIDDLE, "faint")

    def _right(self, place: float) -> float:
        return LEFT + (WIDTH - RIGHT - LEFT) * self._x.share(place)

    def _down(self, value: float) -> float:
        return self._top + HEIGHT * (1 - self._y.share(value))

    # ---- what is plotted ----------------------------------------------------------------------------------------

    def _spots(self, column: list[float | None]) -> list[_Spot]:
        chart, found = self._chart, []
        for place, value in zip(chart.places, column, strict=True):
            x = chart.x_axis.drawable(place)
            if x is not None and value is not None:
                found.append(_Spot(self._right(x), self._down(value)))
        return found

    def _lines(self) -> list[str]:
        parts = []
        for column, colour in zip(self._columns, self._colours, strict=True):
            spots = self._spots(column)
            if len(spots) > 1:
                path = "L".join(map(str, spots))
                parts.append(f"<path d='M{path}' fill='none' stroke-width='2' {self._paint('stroke', colour)}/>")
            if len(spots) <= MARKED:
                dots = (f"<circle cx='{spot.x:.1f}' cy='{spot.y:.1f}' r='3' " for spot in spots)
                parts += [f"{dot}{self._paint('fill', colour)}/>" for dot in dots]
        return parts

    def _areas(self) -> list[str]:
        parts = []
        for column, colour in reversed(list(zip(self._columns, self._colours, strict=True))):
            spots = self._spots(column)
            if spots:
                path = "L".join(map(str, spots))
                base = self._top + HEIGHT
                corners = f"M{spots[0].x:.1f} {base}L{path}L{spots[-1].x:.1f} {base}Z"
                parts.append(f"<path d='{corners}' {self._paint('fill', colour)}/>")
        return parts

    def _bars(self) -> list[str]:
        parts = []
        labelled = len(self._columns) * len(self._chart.x) <= MAX_LABELLED_BARS
        base = self._top + HEIGHT if self._y.low > 0 else self._down(0.0)
        for index, (column, colour) in enumerate(zip(self._columns, self._colours, strict=True)):
            for place, value in zip(self._chart.places, column, strict=True):
                if value is None:
                    continue
                left, right = (self._right(edge) for edge in bar_edges(place, index, len(self._columns)))
                y = self._down(value)
                box = f"x='{left:.1f}' y='{min(y, base):.1f}' width='{right - left:.1f}' height='{abs(base - y):.1f}'"
                parts.append(f"<rect {box} {self._paint('fill', colour)}/>")
                if labelled:
                    middle = (left + right) / 2
                    parts.append(self._text(middle, y - 5, show_number(value), f"{MIDDLE} font-size='10'"))
        return parts


def stacked(chart: Chart) -> list[tuple[float | None, ...]]:
    """Return the upper edges of areas that lie on one another; what is missing is nothing."""
    sums = [0.0] * len(chart.x)
    found: list[tuple[float | None, ...]] = []
    for one in chart.series:
        sums = [below + (value or 0.0) for below, value in zip(sums, one.values, strict=True)]
        found.append(tuple(sums))
    return found


def bar_edges(place: float, index: int, num_series: int) -> tuple[float, float]:
    """Return from where to where a bar of a series goes: all bars of a place take four fifths of it.

    >>> bar_edges(1.0, 0, 2), bar_edges(1.0, 1, 2)
    ((0.6, 1.0), (1.0, 1.4))
    """
    width = 0.8 / num_series
    left = place - 0.4 + index * width
    return left, left + width


def escape(words: str) -> str:
    """Return words as they can stand in XML, which knows no control characters."""
    return escape_markup(_NO_XML.sub("\ufffd", words))


def _axis_title(axis: Axis) -> str:
    return f"{axis.label}, {axis.unit}" if axis.unit and axis.unit != "s" else axis.label
