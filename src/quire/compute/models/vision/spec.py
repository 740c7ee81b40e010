"""VisionSpec: the image encoder of a model, as data.

    pixels ─► patches ─► × matrix ─► + positions ─► tower: layers of an encoder ─► connector ─► rows for the text model

The tower is a `DecoderSpec` without a vocabulary, whose tokens attend to each other: its rows are patches instead of
tokens. Everything around it is here: how an image is cut, and the steps of the connector. Families differ in these
facts only, so engines interpret one pipeline.

Patches that are joined later are adjacent rows: the tower's rows go through squares of `merge` × `merge` patches, each
row by row. A connector then joins `merge`² rows at a time, and their order needs no change in between. If some layers
attend within windows, rows go through one window after another; at the end, they are put in the order of the image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, TypeAlias

from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import NormSpec
from quire.compute.models.sublayers import Activation
from quire.core.errors import CheckpointError, InvariantError
from quire.core.images import CHANNELS

MAX_PATCHES: Final = 1 << 14
"""Of one image: the memory for it is allocated when the model is loaded."""
WINDOW_ROWS: Final = 16
"""A row of squares in a window has a multiple of this many patches: only the last window has an unfilled block."""
MAX_IMAGE_SIZE: Final = 1 << 13
MAX_PATCH_SIZE: Final = 256


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix as a checkpoint stores it, and the activation of its products; `bias`: the name of that, or empty.

    `shape`: outputs, then the dimensions of an input; of one that is `transposed`, inputs, then outputs.
    """

    weight: str
    shape: tuple[int, ...]
    bias: str = ""
    transposed: bool = False
    activation: Activation | None = None

    @classmethod
    def of(
        cls, stem: str, num_outputs: int, num_inputs: int, *, bias: bool, activation: Activation | None = None
    ) -> Matrix:
        """Return a matrix whose tensors have the usual names."""
        return cls(f"{stem}.weight", (num_outputs, num_inputs), f"{stem}.bias" if bias else "", activation=activation)

    @property
    def num_outputs(self) -> int:
        """The numbers of a row of the product."""
        return self.shape[-1] if self.transposed else self.shape[0]

    @property
    def num_inputs(self) -> int:
        """The numbers of a row that it multiplies."""
        return self.shape[0] if self.transposed else math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of each row, whose tensors begin with `stem`; empty: it has no weights. `activation`: of its results."""

    stem: str
    spec: NormSpec
    size: int
    activation: Activation | None = None


@dataclass(frozen=True, slots=True)
class Gated:
    """Products with two matrices of the same shape, number by number; that of `gate` has the activation."""

    gate: Matrix
    up: Matrix


@dataclass(frozen=True, slots=True)
class Join:
    """Each `count` rows become one: row after row, or with `by_number` their first numbers, then their second ones."""

    count: int
    by_number: bool = False


@dataclass(frozen=True, slots=True)
class Average:
    """Each `count` rows become their average."""

    count: int


@dataclass(frozen=True, slots=True)
class Scale:
    """Each row is multiplied by `factor`; then `offset` is subtracted, and the rest multiplied by `factors`.

    Both are the names of vectors; empty: none.
    """

    factor: float
    offset: str = ""
    factors: str = ""


Step: TypeAlias = Matrix | Gated | Norm | Join | Average | Scale


@dataclass(frozen=True, slots=True)
class Deep:
    """The steps from the states after a layer of the tower to more numbers of each row for the text model."""

    layer: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Patches:
    """How an image is cut into the rows of the tower.

    A patch has `size` × `size` pixels: for each colour, the pixels row by row, `frames` times; or with `colours_last`,
    for each pixel its colours. `matrix` turns it into a row. `positions`: the name of a table with a row for each patch
    of an image, to be added; empty: none. With `positions_side`, the table is a square with this many rows and columns,
    which is resized to the grid of an image; with `positions_reach_edges` so that its corners stay corners. With
    `positions_cubic`, a position is blended of four neighbours on each axis instead of two. With
    `positions_parts`, there are two tables, of this many rows: one for the column of a patch, one for its row; the
    dimension `positions_axis` of the tensor tells which. `norm_before` and `norm_after`: of the numbers of a patch, and
    of its row before positions. `first`:
    the name of a vector that is a row before all patches, with the first row of the table; empty: none. `image_size`:
    the height and width of every image, of which pixels after the last whole patch are left out; None: multiples of
    `merge` patches. An image has at most `max_patches`.
    `window`: the patches per side of a window, a multiple of `merge`; None: the tower has no windows.
    """

    size: int
    merge: int
    matrix: Matrix
    image_size: int | None
    max_patches: int
    positions: str = ""
    first: str = ""
    positions_side: int | None = None
    positions_reach_edges: bool = False
    positions_cubic: bool = False
    positions_parts: int | None = None
    positions_axis: int = 0
    norm_before: Norm | None = None
    norm_after: Norm | None = None
    window: int | None = None
    frames: int = 1
    colours_last: bool = False

    @property
    def num_numbers(self) -> int:
        """The numbers of a patch."""
        return CHANNELS * self.frames * self.size**2

    @property
    def positions_shape(self) -> tuple[int, ...]:
        """The shape of the table of positions."""
        size = self.matrix.num_outputs
        if self.positions_parts is not None:
            return (2, self.positions_parts, size) if self.positions_axis == 0 else (self.positions_parts, 2, size)
        return self.max_rows if self.positions_side is None else self.positions_side**2, size

    @property
    def num_first(self) -> int:
        """The rows of the tower before the patches."""
        return 1 if self.first else 0

    @property
    def max_rows(self) -> int:
        """The most rows of the tower for one image."""
        return self.max_patches + self.num_first

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of patches of an image; raises unless its size is allowed."""
        unit = self.size * self.merge
        rows, columns = height // self.size, width // self.size
        fits = height % unit == 0 == width % unit if self.image_size is None else height == width == self.image_size
        if not fits or not 0 < rows * columns <= self.max_patches:
            raise InvariantError(f"an image of {height} × {width} pixels is not one of those that the model takes")
        return rows, columns


@dataclass(frozen=True, slots=True)
class Tiled:
    """Larger images than a tile, which has the height and width of all others; the rows of tiles form a grid.

    `grids`: the rows and columns of tiles that an image may have. The same number of lines is left out at both ends of
    the grid of rows, or of columns at both sides, so that those are left for which the text has placeholders. At the
    end of each line, the vector `newline` is a row of its own.
    """

    grids: tuple[tuple[int, int], ...]
    newline: str


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """The image encoder of a model.

    `placeholder`: the token that stands for a row of an image in a text. `mean` and `deviation`: of the colours, by
    which they are normalised after a multiplication with `rescale`. The checkpoint's tensors of all this have
    `prefixes`. Some checkpoints lack the last part of `optional_prefix` in their names. `has_axes`: in the text, the
    tokens of an image have coordinates. `deep`: where more numbers of each row come from; see `DecoderSpec.deep_rows`.
    `in_windows`: the layers of the tower whose rows attend to those of their window only. A tower may have no layers.
    `tiled`: the larger images that an encoder of tiles takes; None: none.
    """

    placeholder: int
    patches: Patches
    tower: DecoderSpec
    connector: tuple[Step, ...]
    rescale: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    prefixes: tuple[str, ...]
    optional_prefix: str = ""
    has_axes: bool = False
    deep: tuple[Deep, ...] = ()
    in_windows: tuple[int, ...] = ()
    tiled: Tiled | None = None

    def __post_init__(self) -> None:
        size, patches = self.tower.hidden_size, self.patches
        if patches.matrix.num_outputs != size or patches.matrix.num_inputs != patches.num_numbers:
            raise CheckpointError("patches", patches.matrix.shape, f"a matrix from pixels to {size} numbers")
        for steps in (self.connector, *(each.steps for each in self.deep)):
            _check_steps(steps, size, patches.merge)
        for grid in () if self.tiled is None else self.tiled.grids:
            _check_grid(grid, (patches.image_size or 0) // patches.size // patches.merge)
        if not self.tower.attention.bidirectional or self.tower.vocab_size:
            raise CheckpointError("image tower", "a decoder", "an encoder without a vocabulary")

    def num_placeholders(self, height: int, width: int, wanted: int | None = None) -> int:
        """Return the rows of an image for the text model; raises unless its size is allowed.

        `wanted`: a number of rows that remain of a grid of tiles; without it, or if there is no such part, all remain.
        """
        grid = self.grid_of(height, width)
        if grid is None:
            rows, columns = self.patches.grid(height, width)
            return rows * columns // self.patches.merge**2
        rows, columns = grid
        return wanted if wanted is not None and cropped(grid, wanted) is not None else rows * (columns + 1)

    def grid_of(self, height: int, width: int) -> tuple[int, int] | None:
        """Return the lines and columns of rows for an image of several tiles; None for any other."""
        tile, tiled = self.patches.image_size, self.tiled
        if tile is None or tiled is None or height % tile or width % tile:
            return None
        grid, side = (height // tile, width // tile), tile // self.patches.size // self.patches.merge
        return (grid[0] * side, grid[1] * side) if grid in tiled.grids else None

    @property
    def most_rows(self) -> int:
        """The most rows of an image for the text model."""
        tiles = () if self.tiled is None or self.patches.image_size is None else self.tiled.grids
        side, usual = self.patches.image_size or 0, self.patches.max_patches // self.patches.merge**2
        return max(usual, *(self.num_placeholders(rows * side, columns * side) for rows, columns in tiles), 0)

    def with_limit(self, max_patches: int) -> VisionSpec:
        """Return the spec for images of at most this many patches, if their size is not fixed."""
        patches = replace(self.patches, max_patches=min(max_patches, self.patches.max_patches))
        if patches.image_size is not None:
            return self
        return replace(self, patches=patches, tower=replace(self.tower, context_length=patches.max_rows))

    def without_optional_prefix(self) -> VisionSpec:
        """Return the spec for a checkpoint that lacks the last part of that prefix in its names."""
        outer = self.optional_prefix[: self.optional_prefix.rstrip(".").rfind(".") + 1]

        def renamed(name: str) -> str:
            inner = name.removeprefix(self.optional_prefix)
            return name if inner == name else outer + inner

        tower, patches, matrix = self.tower, self.patches, self.patches.matrix
        sources = {part: replace(source, stem=renamed(source.stem)) for part, source in tower.sources.items()}
        return replace(
            self,
            tower=replace(
                tower,
                sources=MappingProxyType(sources),
                ignored_tensors=frozenset(map(renamed, tower.ignored_tensors)),
                ignored_prefixes=tuple(map(renamed, tower.ignored_prefixes)),
            ),
            patches=replace(
                patches,
                matrix=replace(matrix, weight=renamed(matrix.weight), bias=renamed(matrix.bias)),
                positions=renamed(patches.positions),
                first=renamed(patches.first),
            ),
        )

    def products(self) -> Iterator[tuple[Matrix, int]]:
        """Yield the matrices outside of the tower, that of the patches first, and the most rows of each product."""
        yield self.patches.matrix, self.patches.max_patches
        for steps in (self.connector, *(each.steps for each in self.deep)):
            num_rows = self.patches.max_patches
            for step in steps:
                if isinstance(step, Join | Average):
                    num_rows //= step.count
                for each in _matrices(step):
                    yield each, num_rows

    def norms(self) -> Iterator[Norm]:
        """Yield the norms outside of the tower."""
        yield from (each for each in (self.patches.norm_before, self.patches.norm_after) if each is not None)
        for steps in (self.connector, *(each.steps for each in self.deep)):
            yield from (step for step in steps if isinstance(step, Norm) and step.stem)

    def vectors(self) -> Iterator[tuple[str, int]]:
        """Yield the vectors outside of the tower that are no norms, and their sizes."""
        size = self.tower.hidden_size
        for step in self.connector:
            if isinstance(step, Scale):
                yield from ((name, size) for name in (step.offset, step.factors) if name)
            else:
                size = next((each.num_outputs for each in _matrices(step)), size)
        if self.tiled is not None:
            yield self.tiled.newline, size

    @property
    def cell(self) -> int | None:
        """The pixels per side of the part of an image that a row stands for, if its tokens have coordinates."""
        return self.patches.size * self.patches.merge if self.has_axes else None

    @property
    def tower_has_axes(self) -> bool:
        """Whether the rows of the tower have rotary positions by row and column."""
        return any(layer.rope is not None and layer.rope.axes for layer in self.tower.layers)


def _matrices(step: Step) -> tuple[Matrix, ...]:
    """Return the matrices of a step, all of one shape."""
    if isinstance(step, Gated):
        return step.gate, step.up
    return (step,) if isinstance(step, Matrix) else ()


def _size_of(step: Step) -> int:
    """Return the numbers of a row that a norm takes; 0 for other steps."""
    return step.size if isinstance(step, Norm) else 0


def cropped(grid: tuple[int, int], num_rows: int) -> tuple[int, int] | None:
    """Return the lines and columns that are left of a grid with this many rows; None if no part has as many.

    >>> cropped((4, 6), 28), cropped((4, 6), 14), cropped((4, 6), 12), cropped((4, 6), 13)
    ((4, 6), (2, 6), (4, 2), None)
    """
    lines, columns = grid
    left, rest = divmod(num_rows, columns + 1)
    if not rest and 0 < left <= lines and (lines - left) % 2 == 0:
        return left, columns
    left, rest = divmod(num_rows, lines)
    if not rest and 0 < left <= columns and (columns + 1 - left) % 2 == 0:
        return lines, left - 1
    return None


def _check_grid(tiles: tuple[int, int], side: int) -> None:
    """Raise if two parts of a grid of tiles have the same number of rows, which has to tell the part that is left."""
    lines, columns = (count * side for count in tiles)
    fewer_lines = {left * (columns + 1) for left in range(lines, 0, -2)}
    fewer_columns = {lines * (left + 1) for left in range(columns - 2, -1, -2)}
    if tiles == (1, 1) or fewer_lines & fewer_columns:
        raise CheckpointError("image tiles", tiles, "several, of whose parts no two have the same number of rows")


def _check_steps(steps: tuple[Step, ...], size: int, merge: int) -> None:
    """Raise unless each step takes rows of the size that those before it give, and squares become one row."""
    joined = 1
    for step in steps:
        found = size
        if isinstance(step, Join | Average):
            joined *= step.count
            size *= step.count if isinstance(step, Join) else 1
            continue
        if isinstance(step, Scale):
            continue
        matrices = _matrices(step)
        size, wanted = (matrices[0].num_outputs, matrices[0].num_inputs) if matrices else (size, _size_of(step))
        if found != wanted:
            raise CheckpointError("image connector", wanted, f"{found}, the numbers of a row before it")
    if joined != merge**2:
        raise CheckpointError("image connector", joined, f"{merge}² patches for each row")
