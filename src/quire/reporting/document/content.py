"""A document as frozen values: text, tables, charts, films. `html` and `svg` determine its appearance.

Text is plain; parts between two backticks are set as code. No text is interpreted as markup, so it can contain names of
models and lines of traces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.core.errors import InvariantError

LINES, AREAS, BARS = "lines", "areas", "bars"
"""Kinds of charts. Areas are stacked, the first at the bottom; the bars of one place are side by side."""
LINEAR, LOG = "linear", "log"
BYTES_PER_CELL = 6


@dataclass(frozen=True, slots=True)
class Axis:
    """The quantity of an axis. Short times in seconds (unit "s") are written as milliseconds."""

    label: str
    unit: str = ""
    scale: str = LINEAR

    @property
    def title(self) -> str:
        """The label of the axis, with its unit; for times, the numbers have the unit."""
        return f"{self.label}, {self.unit}" if self.unit and self.unit != "s" else self.label

    @property
    def tick_unit(self) -> str:
        """The unit after the number of each tick."""
        return "s" if self.unit == "s" else ""

    def drawable(self, value: float | None) -> float | None:
        """Return a value, or None if this axis cannot show it: not a number, or without a logarithm."""
        if value is None or not math.isfinite(value) or (self.scale == LOG and value <= 0):
            return None
        return value


@dataclass(frozen=True, slots=True)
class Series:
    """A name, and a number for each place of the x axis; None for a missing one."""

    name: str
    values: tuple[float | None, ...]
    colour: str = ""
    """A colour name of `assets/theme.css`, such as "accent"; empty: the next colour of the owners."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Series over common places: ascending numbers, or names for bars.

    >>> chart = Chart("Speed", (1.0, 2.0), (Series("quire", (3.0, None)),), Axis("users"), Axis("rate", "tok/s"))
    >>> chart.kind, chart.names
    ('lines', ())
    """

    title: str
    x: tuple[float | str, ...]
    series: tuple[Series, ...]
    x_axis: Axis
    y_axis: Axis
    kind: str = LINES
    note: str = ""
    group: str = ""
    """Charts and films of one group share a cursor on their x axis."""

    def __post_init__(self) -> None:
        if any(len(one.values) != len(self.x) for one in self.series):
            raise InvariantError(f"chart {self.title!r}: each series needs a value for each of {len(self.x)} places")
        if len(self.names) != (len(self.x) if self.kind == BARS else 0):
            raise InvariantError(f"chart {self.title!r}: bars need names as places, other charts numbers")
        if any(after <= before for before, after in zip(self.places, self.places[1:], strict=False)):
            raise InvariantError(f"chart {self.title!r}: places must ascend")

    @property
    def names(self) -> tuple[str, ...]:
        """The names on the x axis; empty if it has numbers."""
        return tuple(place for place in self.x if isinstance(place, str))

    @property
    def places(self) -> tuple[float, ...]:
        """The positions of the values on the x axis; names are at 0, 1, 2 and so on."""
        return tuple(float(index) if isinstance(place, str) else place for index, place in enumerate(self.x))


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under a header; the first cell of a row is its label, the others are numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.header) for row in self.rows):
            raise InvariantError(f"table {self.title!r}: each row needs {len(self.header)} cells")


@dataclass(frozen=True, slots=True)
class Film:
    """The block map at some moments, in cells of one block or more.

    A picture has three planes, one after another. The holder of each cell, in 32 bits: 0 for none, else as in
    `simulate/holders.py`. The share that is held, in 8 bits, where 255 is the whole cell. The share that is only
    cached, likewise.
    """

    title: str
    times_s: tuple[float, ...]
    pictures: tuple[bytes, ...]
    captions: tuple[str, ...]
    num_blocks: int
    blocks_per_cell: int = 1
    group: str = ""

    def __post_init__(self) -> None:
        if not len(self.times_s) == len(self.pictures) == len(self.captions):
            raise InvariantError(f"film {self.title!r}: each picture needs a time and a caption")
        if any(len(picture) != BYTES_PER_CELL * self.num_cells for picture in self.pictures):
            raise InvariantError(f"film {self.title!r}: each picture needs {BYTES_PER_CELL} bytes a cell")

    @property
    def num_cells(self) -> int:
        """The number of cells of a picture."""
        return -(-self.num_blocks // self.blocks_per_cell)


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and its parts: text, tables, charts and films."""

    title: str
    parts: tuple[str | Table | Chart | Film, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A document. `facts` are pairs that are needed to repeat it: the machine, the command, the seed."""

    title: str
    sections: tuple[Section, ...]
    lead: str = ""
    facts: tuple[tuple[str, str], ...] = ()
