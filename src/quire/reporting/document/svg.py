"""Charts as SVG: a picture without scripts, for a README, for print, and for a document before its scripts run.

    title
    ── one  ── two            the legend, in one or more rows
    rate, tok/s               the title of the y axis
    20 ┤
    10 ┤      plot
     0 ┼──────┬──────┬
       0      1      2   users

Colours are attributes for a light background, which every SVG reader supports; a rule of a style sheet replaces them on
a dark background. A separate picture has its own background, one in a document that of the document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape as escape_markup

from quire.reporting.document.axis import Range, show_number
from quire.reporting.document.content import AREAS, BARS, LINEAR, LOG, Chart
from quire.reporting.document.theme import Theme, colour_names

WIDTH, HEIGHT = 760, 300  # the width of the picture, and the height of the plot
EDGE, LEFT, RIGHT = 12.0, 72, 20
FOOT, TILTED_FOOT = 52, 110
ROW = 22
MARKED = 24  # a line with at most this many points shows them
MAX_LABELLED_BARS = 24
LONGEST_NAME = 21
FONT = "system-ui, 'DejaVu Sans', 'Noto Sans', sans-serif"
CHARACTER = 7.0  # px, the width of a character in labels
END, MIDDLE = "text-anchor='end'", "text-anchor='middle'"
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def chart_svg(chart: Chart, *, on_ground: bool = True) -> str:
    """Return a chart as an SVG picture. Does not mutate."""
    return _Picture(chart).render(on_ground)


class _Picture:
    """Renders one chart as a picture."""

    def __init__(self, chart: Chart) -> None:
        self._chart = chart
        self._theme = Theme.read()
        columns = stacked(chart) if chart.kind == AREAS else [one.values for one in chart.series]
        self._columns = [[chart.y_axis.drawable(value) for value in column] for column in columns]
        self._drawn = list(zip(self._columns, colour_names(chart), strict=True))
        self._legend, self._top = self._make_legend()
        self._bottom = self._top + HEIGHT
        self._x = self._x_range()
        values = [value for column in self._columns for value in column if value is not None]
        if chart.kind == BARS and chart.y_axis.scale == LOG and values:
            values.append(min(values) / 2)  # so that the smallest bar is visible
        self._y = Range.around(chart.y_axis, values)

    def _x_range(self) -> Range:
        if self._chart.kind == BARS:
            return Range(-0.5, max(len(self._chart.x), 1) - 0.5, LINEAR)
        places = map(self._chart.x_axis.drawable, self._chart.places)
        return Range.of(self._chart.x_axis, [place for place in places if place is not None])

    def render(self, on_ground: bool) -> str:
        title = self._chart.title
        draw = {BARS: self._bars, AREAS: self._areas}.get(self._chart.kind, self._lines)
        body = [self._text(EDGE, 22, title, "font-weight='600' font-size='16'"), *self._legend]
        body += [*self._y_ticks(), *self._x_ticks(), *draw()]
        size = f"width='{WIDTH}' height='{self._bottom + self._foot}'"
        if on_ground:
            body.insert(0, f"<rect {size} {self._paint('fill', 'panel')}/>")
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' {size} viewBox='0 0 {WIDTH} {self._bottom + self._foot}' "
            f"font-family=\"{FONT}\" font-size='12' role='img' aria-label=\"{escape(title)}\">\n"
            + "\n".join([self._style(), *body, "</svg>\n"])
        )

    def _style(self) -> str:
        names = sorted({"ink", "faint", "line", "panel", *(colour for _, colour in self._drawn)})
        kinds = ("fill", "stroke")
        rules = (f".{kind}-{name}{{{kind}:{self._theme.dark[name]}}}" for name in names for kind in kinds)
        return f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"

    def _paint(self, kind: str, name: str) -> str:
        return f"class='{kind}-{name}' {kind}='{self._theme.light[name]}'"

    def _text(self, x: float, y: float, words: str, attributes: str = "", colour: str = "ink") -> str:
        return f"<text x='{x:.1f}' y='{y:.1f}' {self._paint('fill', colour)} {attributes}>{escape(words)}</text>"

    # ---- legend and axes ----------------------------------------------------------------------------------------

    def _make_legend(self) -> tuple[list[str], int]:
        """Return the parts of the legend, and the top of the plot below it."""
        parts, x, y = [], EDGE, 44
        for one, (_, colour) in zip(self._chart.series, self._drawn, strict=True):
            width = 34 + CHARACTER * len(one.name)
            if x > EDGE and x + width > WIDTH:
                x, y = EDGE, y + ROW
            parts.append(f"<rect x='{x:.1f}' y='{y - 8}' width='14' height='8' {self._paint('fill', colour)}/>")
            parts.append(self._text(x + 20, y, one.name))
            x += width
        return parts, y + 34

    def _y_ticks(self) -> Iterator[str]:
        axis = self._chart.y_axis
        yield self._text(EDGE, self._top - 10, axis.title, colour="faint")
        for tick in self._y.ticks():
            y = self._down(tick)
            yield f"<path d='M{LEFT} {y:.1f}H{WIDTH - RIGHT}' {self._paint('stroke', 'line')}/>"
            yield self._text(LEFT - 8, y + 4, show_number(tick, axis.tick_unit), END, "faint")

    @property
    def _is_crowded(self) -> bool:
        """Whether the names on the x axis do not fit side by side."""
        names = self._chart.names
        return max(map(len, names), default=0) * CHARACTER * len(names) > WIDTH - RIGHT - LEFT

    @property
    def _foot(self) -> int:
        return TILTED_FOOT if self._is_crowded else FOOT

    def _x_ticks(self) -> Iterator[str]:
        chart = self._chart
        ticks = self._x.ticks() if chart.kind != BARS else ()
        labels = [(tick, show_number(tick, chart.x_axis.tick_unit)) for tick in ticks]
        for place, label in [*labels, *zip(chart.places, chart.names, strict=False)]:
            x, y = self._right(place), self._bottom + 18
            how = f"{END} transform='rotate(-25 {x:.1f} {y})'" if self._is_crowded else MIDDLE
            yield self._text(x, y, shortened(label), how, "faint")
        middle = (LEFT + WIDTH - RIGHT) / 2
        yield self._text(middle, self._bottom + self._foot - 12, chart.x_axis.title, MIDDLE, "faint")

    def _right(self, place: float) -> float:
        return LEFT + (WIDTH - RIGHT - LEFT) * self._x.share(place)

    def _down(self, value: float) -> float:
        return self._bottom - HEIGHT * self._y.share(value)

    # ---- lines, areas and bars ----------------------------------------------------------------------------------

    def _spots(self, column: Sequence[float | None]) -> list[tuple[float, float]]:
        places = map(self._chart.x_axis.drawable, self._chart.places)
        found = ((x, y) for x, y in zip(places, column, strict=True) if x is not None and y is not None)
        return [(self._right(x), self._down(y)) for x, y in found]

    def _lines(self) -> Iterator[str]:
        for column, colour in self._drawn:
            spots = self._spots(column)
            if len(spots) > 1:
                yield f"<path d='M{_path(spots)}' fill='none' stroke-width='2' {self._paint('stroke', colour)}/>"
            if len(spots) <= MARKED:
                for x, y in spots:
                    yield f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' {self._paint('fill', colour)}/>"

    def _areas(self) -> Iterator[str]:
        for column, colour in reversed(self._drawn):
            if spots := self._spots(column):
                corners = [(spots[0][0], self._bottom), *spots, (spots[-1][0], self._bottom)]
                yield f"<path d='M{_path(corners)}Z' {self._paint('fill', colour)}/>"

    def _bars(self) -> Iterator[str]:
        labelled = len(self._drawn) * len(self._chart.x) <= MAX_LABELLED_BARS
        unit = self._chart.y_axis.tick_unit
        base = self._bottom if self._y.low > 0 else self._down(0.0)
        for index, (column, colour) in enumerate(self._drawn):
            for place, value in zip(self._chart.places, column, strict=True):
                if value is None:
                    continue
                left, right = (self._right(edge) for edge in bar_edges(place, index, len(self._drawn)))
                y = self._down(value)
                box = f"x='{left:.1f}' y='{min(y, base):.1f}' width='{right - left:.1f}' height='{abs(base - y):.1f}'"
                yield f"<rect {box} {self._paint('fill', colour)}/>"
                if labelled:
                    yield self._text((left + right) / 2, y - 5, show_number(value, unit), f"{MIDDLE} font-size='10'")


def _path(spots: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)


def stacked(chart: Chart) -> list[tuple[float | None, ...]]:
    """Return the upper edges of stacked areas; a missing value counts as 0."""
    sums = [0.0] * len(chart.x)
    found: list[tuple[float | None, ...]] = []
    for one in chart.series:
        sums = [below + (value or 0.0) for below, value in zip(sums, one.values, strict=True)]
        found.append(tuple(sums))
    return found


def bar_edges(place: float, index: int, num_series: int) -> tuple[float, float]:
    """Return the left and right edges of a bar; the bars of a place together take four fifths of its width.

    >>> bar_edges(1.0, 0, 2), bar_edges(1.0, 1, 2)
    ((0.6, 1.0), (1.0, 1.4))
    """
    width = 0.8 / num_series
    left = place - 0.4 + index * width
    return left, left + width


def shortened(name: str) -> str:
    """Return a name; if it is long, without its middle.

    >>> shortened("prefix_index=none block_size=16")
    'prefix_ind…ck_size=16'
    """
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}…{name[-half:]}"


def escape(words: str) -> str:
    """Return text escaped for XML, without control characters, which XML does not allow."""
    return escape_markup(_NO_XML.sub("\ufffd", words))
