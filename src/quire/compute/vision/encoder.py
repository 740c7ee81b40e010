"""TowerEncoder: interprets a `VisionSpec`.

    pixels ─► normalised patches ─► × matrix ─► + positions ─► tower, in one step ─► connector ─► rows

Each engine has its own `Tower` and its own products; the rest is the same in all engines. An image is one step of the
tower, alone, so its rows have the same bits whatever else is computed. Every layer writes the keys and
values of all rows before it reads them, and no later step reads them: so all layers share the memory of one.
"""

from __future__ import annotations

import math
import time
from typing import Any, Final, Protocol

import numpy as np

from quire.compute.arrays import FloatArray
from quire.compute.models.parts import NormKind, NormSpec
from quire.compute.models.vision.spec import Average, Join, Matrix, Norm, Step, VisionSpec
from quire.compute.vision.patches import block_order, patch_rows
from quire.compute.vision.weights import VisionWeights
from quire.compute.weights.decoder_weights import PartWeights
from quire.compute.worker.cache_engine import CacheArray, CacheEngine, LayerCache
from quire.compute.worker.model_runner import StepInputs, StepOutputs
from quire.core.errors import InvariantError
from quire.core.images import Image
from quire.core.kv_spec import KVCacheSpec

BLOCK_SIZE: Final = 64


class Products(Protocol):
    """The matrices outside of the tower."""

    def multiply(self, matrix: Matrix, rows: FloatArray) -> FloatArray:
        """Return the activation of a matrix times each row. Does not mutate."""
        ...


class Tower(Protocol):
    """The layers of an encoder, a few of which can be computed at a time."""

    @property
    def layers_at_once(self) -> int:
        """The layers to compute in one call."""
        ...

    def run_layers(self, inputs: StepInputs, cache: Any, layers: range) -> StepOutputs:
        """Compute some layers, after a call with those before them. The outputs of the last layer are complete."""
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


class TowerEncoder:
    """Implements `ImageEncoder`."""

    def __init__(
        self, spec: VisionSpec, weights: VisionWeights, tower: Tower, cache: SharedCache, products: Products
    ) -> None:
        self.spec = spec
        self.layers_at_once = tower.layers_at_once
        self.owner: TowerWork | None = None  # the work whose states the tower holds
        self._weights = weights
        self._tower = tower
        self._cache = cache
        self._products = products

    @property
    def placeholder(self) -> int:
        """The token whose places in a prompt take the rows."""
        return self.spec.placeholder

    @property
    def cell(self) -> int | None:
        """The pixels per side of a token's part of the image, if tokens have coordinates."""
        return self.spec.cell

    @property
    def num_layers(self) -> int:
        """The number of the tower's layers."""
        return len(self.spec.tower.layers)

    def begin(self, image: Image) -> TowerWork:
        """Return the work of encoding an image."""
        return TowerWork(self, image)

    def encode(self, image: Image) -> FloatArray:
        """Return a row for each placeholder of an image, `[num_rows, hidden_size]`."""
        rows = self.begin(image).advance(math.inf)
        if rows is None:
            raise InvariantError("an image is not encoded, although there was time")
        return rows

    def rows_of(self, image: Image) -> FloatArray:
        """Return the rows of an image that the tower reads."""
        patches = self.spec.patches
        grid = patches.grid(image.height, image.width)
        return self._with_positions(self._products.multiply(patches.matrix, patch_rows(image, self.spec)), grid)

    def connected(self, states: FloatArray) -> FloatArray:
        """Return the rows for the text model, from the states of the tower."""
        states = states[self.spec.patches.num_first :]
        for step in self.spec.connector:
            states = self._take(step, states)
        return states

    def _with_positions(self, rows: FloatArray, grid: tuple[int, int]) -> FloatArray:
        """Return the rows with that of the whole image first, if the tower has it, and with their positions."""
        patches, first = self.spec.patches, self._weights.first
        if first is not None:
            rows = np.concatenate([first[None], rows])
        if self._weights.positions is not None:
            order = block_order(*grid, patches.merge) + patches.num_first
            rows = rows + self._weights.positions[np.concatenate([np.arange(patches.num_first), order])]
        return rows

    def run(self, rows: FloatArray, layers: range) -> FloatArray:
        """Compute some layers, after a call with those before them; return the states of all rows, if these are all."""
        count, empty = len(rows), np.zeros(0, np.int64)
        indices = np.arange(count)
        inputs = StepInputs(
            entries=(0,),
            query_starts=np.array([0, count]),
            token_ids=np.zeros(count, np.int64),
            positions=indices,
            slots=(indices,),
            block_tables=(np.arange(-(-count // BLOCK_SIZE))[None],),
            logit_starts=np.zeros(2, np.int64),
            logit_indices=empty,
            rows=np.zeros(1, np.int64),
            state_indices=indices,
            given=indices,
            given_rows=np.ascontiguousarray(rows, np.float32),
        )
        return self._tower.run_layers(inputs, self._cache, layers).states

    def _take(self, step: Step, rows: FloatArray) -> FloatArray:
        """Return the rows after a step of the connector."""
        match step:
            case Matrix():
                return self._products.multiply(step, rows)
            case Norm():
                return _normalized(rows, self._weights.norms[step.stem], step.spec)
            case Join(count, by_number):
                joined = rows.reshape(-1, count, rows.shape[1])
                joined = joined.swapaxes(1, 2) if by_number else joined
                return np.ascontiguousarray(joined.reshape(len(joined), -1))
            case Average(count):
                average: FloatArray = rows.reshape(-1, count, rows.shape[1]).sum(axis=1) / np.float32(count)
                return average
        raise InvariantError(f"no step of a connector: {step}")


class TowerWork:
    """The encoding of one image, layer after layer; begins again if the tower encoded another image in between."""

    def __init__(self, encoder: TowerEncoder, image: Image) -> None:
        self._encoder = encoder
        self._image = image
        self._rows: FloatArray | None = None
        self._num_done = 0  # layers

    def advance(self, budget_s: float) -> FloatArray | None:
        """Compute at least one layer, and others for about this long; return the rows after the last one. Mutates."""
        encoder, end_s = self._encoder, time.perf_counter() + budget_s
        if self._rows is None or encoder.owner is not self:
            encoder.owner, self._rows, self._num_done = self, encoder.rows_of(self._image), 0
        while True:
            layers = range(self._num_done, min(self._num_done + encoder.layers_at_once, encoder.num_layers))
            states = encoder.run(self._rows, layers)
            self._num_done = layers.stop
            if self._num_done == encoder.num_layers:
                encoder.owner = None
                return encoder.connected(states)
            if time.perf_counter() >= end_s:
                return None


def _normalized(rows: FloatArray, part: PartWeights, spec: NormSpec) -> FloatArray:
    count = np.float32(rows.shape[1])
    if spec.kind is NormKind.LAYER:
        rows = rows - rows.sum(axis=1, keepdims=True) / count
    length = np.sqrt((rows * rows).sum(axis=1, keepdims=True) / count + np.float32(spec.epsilon))
    normed: FloatArray = (1 + part.weight if spec.unit_offset else part.weight) * (rows / length)
    return normed if part.bias is None else normed + part.bias


def cache_blocks(spec: VisionSpec) -> int:
    """Return the number of blocks that the largest image takes."""
    return -(-spec.patches.max_rows // BLOCK_SIZE)


def shared_cache(spec: VisionSpec, kv_spec: KVCacheSpec) -> SharedCache:
    """Return the memory for the largest image; `kv_spec` is that of one layer."""
    return SharedCache(kv_spec, len(spec.tower.layers), cache_blocks(spec))
