"""TowerEncoder: interprets a `VisionSpec`.

    pixels ─► normalised patches ─► × matrix ─► + positions ─► tower, layer by layer ─► connector ─► rows

Each engine has its own tower and its own products; the rest is common to them. An image is one step of the
tower, alone, so its rows have the same bits whatever else is computed. Every layer writes the keys and values of all
rows before it reads them, and no later step reads them: so all layers share the memory of one.

The work can stop after each layer, because steps of the text model must not wait for a large image. The states of a
layer stay in the memory of the tower. If the tower is given another image meanwhile, the first one begins again.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace
from typing import Final, Protocol

import numpy as np

from quire.compute.arrays import FloatArray, IntArray
from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import NormKind, NormSpec
from quire.compute.models.sublayers import Activation
from quire.compute.models.vision.spec import WINDOW_ROWS, Average, Gated, Join, Matrix, Norm, Scale, Step, VisionSpec
from quire.compute.vision.patches import joined_tiles, patch_rows, resized, tiles_of, tower_order
from quire.compute.vision.weights import VisionWeights
from quire.compute.weights.decoder_weights import PartWeights
from quire.compute.worker.cache_engine import CacheArray, CacheEngine, LayerCache
from quire.compute.worker.image_queue import room_for
from quire.compute.worker.model_runner import NO_COORDINATES, NO_INDICES, StepInputs
from quire.core.errors import InvariantError
from quire.core.images import Image
from quire.core.kv_spec import KVCacheSpec

BLOCK_SIZE: Final = WINDOW_ROWS


class Tower(Protocol):
    """The layers of an encoder."""

    def run(self, inputs: StepInputs, layer: int) -> FloatArray:
        """Compute a layer, right after the layer before it; return the states that the step asks for. Mutates."""
        ...


class Products(Protocol):
    """The matrices outside of the tower, and activations."""

    def multiply(self, matrix: Matrix, rows: FloatArray) -> FloatArray:
        """Return the activation of a matrix times each row. Does not mutate."""
        ...

    def activate(self, rows: FloatArray, activation: Activation) -> FloatArray:
        """Return the activation of each number. Does not mutate."""
        ...


class SharedCache(CacheEngine):
    """The keys and values of a tower: all layers have the same memory."""

    def __init__(self, spec: KVCacheSpec, num_layers: int, num_blocks: int) -> None:
        super().__init__(spec, num_blocks=num_blocks)
        self.allocate()
        self._shared = super().places() * num_layers

    def places(self) -> list[tuple[CacheArray, CacheArray]]:
        """Return the same keys and values for each layer, and the same list each time."""
        return self._shared

    def layer(self, layer: int) -> LayerCache:
        """Return the cache of the one layer. Does not mutate; the arrays are the memory itself."""
        return super().layer(0)


class EncoderWork:
    """Implements `ImageWork`."""

    def __init__(self, parts: Generator[None, None, FloatArray]) -> None:
        self._parts = parts

    def advance(self, budget_s: float) -> FloatArray | None:
        """Compute parts until this time is over, at least one; return the rows once they are complete. Mutates."""
        end_s = time.perf_counter() + budget_s
        try:
            next(self._parts)
            while time.perf_counter() < end_s:
                next(self._parts)
        except StopIteration as end:
            rows: FloatArray = end.value
            return rows
        return None


class TowerEncoder:
    """Implements `ImageEncoder`."""

    def __init__(self, spec: VisionSpec, weights: VisionWeights, tower: Tower | None, products: Products) -> None:
        """Make an encoder; `tower` None: it has no layers."""
        self.spec = spec
        self._weights = weights
        self._tower = tower
        self._products = products
        self._in_tower: object = None

    @property
    def placeholder(self) -> int:
        """The token whose places in a prompt take the rows."""
        return self.spec.placeholder

    @property
    def cell(self) -> int | None:
        """The pixels per side of a token's part of the image, if tokens have coordinates."""
        return self.spec.cell

    def begin(self, image: Image) -> EncoderWork:
        """Return the work of encoding an image. Several may be begun; does not mutate."""
        return EncoderWork(self._parts(image))

    def _parts(self, image: Image) -> Generator[None, None, FloatArray]:
        """Compute an image, with a pause after each part; return a row for each placeholder."""
        grid, tiled = self.spec.grid_of(image.height, image.width), self.spec.tiled
        if grid is None or tiled is None:
            return (yield from self._of_tile(image))
        rows = list[FloatArray]()
        for tile in tiles_of(image, self.spec.patches.image_size or 0):
            rows.append((yield from self._of_tile(tile)))
        return joined_tiles(np.stack(rows), grid, image.num_tokens, self._weights.vectors[tiled.newline])

    def _of_tile(self, image: Image) -> Generator[None, None, FloatArray]:
        """Compute an image that is one sequence of the tower."""
        patches = self.spec.patches
        grid = patches.grid(image.height, image.width)
        order = tower_order(grid, patches.merge, patches.window)
        whole = self._inputs(image, grid, order.order)
        in_windows = _in_windows(whole, order.window_starts) if patches.window is not None else whole
        yield
        connectors = {each.layer: each.steps for each in self.spec.deep}
        num_layers = len(self.spec.tower.layers)
        connectors[num_layers - 1] = self.spec.connector
        if self._tower is None:
            return self._connected(self.spec.connector, whole.given_rows)[
                _image_order(order.order, grid, patches.merge)
            ]
        this, layer = object(), 0
        rows: dict[int, FloatArray] = {}
        while layer < num_layers:
            layer = layer if self._in_tower is this else 0
            self._in_tower = this
            inputs = in_windows if layer in self.spec.in_windows else whole
            states = self._tower.run(
                inputs if layer in connectors else replace(inputs, state_indices=NO_INDICES), layer
            )
            if layer in connectors:
                rows[layer] = self._connected(connectors[layer], states)
            layer += 1
            yield
        *deep, last = (rows[layer] for layer in sorted(rows))
        return np.concatenate([last, *deep], axis=1)[_image_order(order.order, grid, patches.merge)]

    def _connected(self, steps: tuple[Step, ...], states: FloatArray) -> FloatArray:
        """Return the rows for the text model that come from the states of a layer."""
        rows = states[self.spec.patches.num_first :]
        for step in steps:
            rows = self._take(step, rows)
        return rows

    def _inputs(self, image: Image, grid: tuple[int, int], order: IntArray) -> StepInputs:
        """Return the step of the tower for an image, as one sequence."""
        patches = self.spec.patches
        rows = self._normed(patch_rows(image, self.spec)[order], patches.norm_before)
        rows = self._normed(self._products.multiply(patches.matrix, rows), patches.norm_after)
        rows = self._with_positions(rows, grid, order)
        count = len(rows)
        indices = np.arange(count)
        return StepInputs(
            entries=(0,),
            query_starts=np.array([0, count]),
            token_ids=np.zeros(count, np.int64),
            positions=indices,
            slots=(indices,),
            block_tables=(np.arange(-(-count // BLOCK_SIZE))[None],),
            logit_starts=np.zeros(2, np.int64),
            logit_indices=NO_INDICES,
            rows=np.zeros(1, np.int64),
            state_indices=indices,
            given=indices,
            given_rows=np.ascontiguousarray(rows, np.float32),
            coordinates=np.stack(np.divmod(order, grid[1])) if self.spec.tower_has_axes else NO_COORDINATES,
        )

    def _with_positions(self, rows: FloatArray, grid: tuple[int, int], order: IntArray) -> FloatArray:
        """Return the rows with that of the whole image first, if the tower has it, and with their positions."""
        patches, first, table = self.spec.patches, self._weights.first, self._weights.positions
        if first is not None:
            rows = np.concatenate([first[None], rows])
        if table is None:
            return rows
        if patches.positions_parts is not None:
            row, column = np.divmod(order, grid[1])
            by_column, by_row = np.moveaxis(table, patches.positions_axis, 0)
            of_both: FloatArray = rows + (by_column[column] + by_row[row])
            return of_both
        if patches.positions_side is not None:
            edges, cubic = patches.positions_reach_edges, patches.positions_cubic
            table = resized(table, patches.positions_side, grid, reaches_edges=edges, cubic=cubic)
        added: FloatArray = table[np.concatenate([np.arange(patches.num_first), order + patches.num_first])]
        return rows + added

    def _normed(self, rows: FloatArray, norm: Norm | None) -> FloatArray:
        if norm is None:
            return rows
        normed = _normalized(rows, self._weights.norms.get(norm.stem), norm.spec)
        return normed if norm.activation is None else self._products.activate(normed, norm.activation)

    def _take(self, step: Step, rows: FloatArray) -> FloatArray:
        """Return the rows after a step of the connector."""
        match step:
            case Matrix():
                return self._products.multiply(step, rows)
            case Gated(gate, up):
                return self._products.multiply(gate, rows) * self._products.multiply(up, rows)
            case Norm():
                return self._normed(rows, step)
            case Join(count, by_number):
                joined = rows.reshape(-1, count, rows.shape[1])
                joined = joined.swapaxes(1, 2) if by_number else joined
                return np.ascontiguousarray(joined.reshape(len(joined), -1))
            case Average(count):
                average: FloatArray = rows.reshape(-1, count, rows.shape[1]).sum(axis=1) / np.float32(count)
                return average
            case Scale(factor, offset, factors):
                rows = rows * np.float32(factor)
                rows = rows - self._weights.vectors[offset] if offset else rows
                return rows * self._weights.vectors[factors] if factors else rows
        raise InvariantError(f"no step of a connector: {step}")


def _normalized(rows: FloatArray, part: PartWeights | None, spec: NormSpec) -> FloatArray:
    count = np.float32(rows.shape[1])
    if spec.kind is NormKind.LAYER:
        rows = rows - rows.sum(axis=1, keepdims=True) / count
    length = np.sqrt((rows * rows).sum(axis=1, keepdims=True) / count + np.float32(spec.epsilon))
    if part is None:
        plain: FloatArray = rows / length
        return plain
    normed: FloatArray = (1 + part.weight if spec.unit_offset else part.weight) * (rows / length)
    return normed if part.bias is None else normed + part.bias


def _in_windows(whole: StepInputs, starts: IntArray) -> StepInputs:
    """Return the step with a sequence for each window; only the last window has a block that it does not fill."""
    count, sizes = len(starts) - 1, np.diff(starts)
    first_blocks = np.cumsum(np.append(0, -(-sizes // BLOCK_SIZE)))[:-1]
    positions = whole.positions - np.repeat(starts[:-1], sizes)
    tables = first_blocks[:, None] + np.arange(-(-int(sizes.max()) // BLOCK_SIZE))
    return replace(
        whole,
        entries=tuple(range(count)),
        query_starts=starts,
        positions=positions,
        slots=(np.repeat(first_blocks * BLOCK_SIZE, sizes) + positions,),
        block_tables=(np.ascontiguousarray(tables),),
        logit_starts=np.zeros(count + 1, np.int64),
        rows=np.zeros(count, np.int64),
    )


def _image_order(order: IntArray, grid: tuple[int, int], merge: int) -> IntArray:
    """Return the index of the tower's square for each square of an image, row by row."""
    row, column = np.divmod(order[:: merge**2], grid[1])
    return np.argsort(row // merge * (grid[1] // merge) + column // merge)


def cache_blocks(spec: VisionSpec) -> int:
    """Return the number of blocks that the largest image takes, and one more for the last window."""
    return -(-spec.patches.max_rows // BLOCK_SIZE) + (spec.patches.window is not None)


def shared_cache(spec: VisionSpec, kv_spec: KVCacheSpec) -> SharedCache:
    """Return the memory for the largest image; `kv_spec` is that of one layer."""
    return SharedCache(kv_spec, len(spec.tower.layers), cache_blocks(spec))


def row_bytes(text: DecoderSpec) -> int:
    """Return the bytes of a row of an image for the text model."""
    return text.hidden_size * (1 + text.deep_rows) * np.dtype(np.float32).itemsize


def rows_bytes(spec: VisionSpec, text: DecoderSpec) -> int:
    """Return the bytes for rows of encoded images, and for those of tiles that are being joined to one image."""
    joined = 0 if spec.tiled is None else 2 * spec.most_rows
    return (most_rows(spec, text) + joined) * row_bytes(text)


def most_rows(spec: VisionSpec, text: DecoderSpec) -> int:
    """Return the most rows of encoded images in memory."""
    return room_for(row_bytes(text), spec.most_rows, text.context_length)
