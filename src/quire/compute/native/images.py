"""The image encoder of the compiled core: a tower in a decoder of its own, on the threads of the text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from quire._native import Decoder, RowProduct, activate
from quire._native import activation_bytes as step_bytes
from quire.compute.arrays import FloatArray
from quire.compute.models.base import DecoderSpec
from quire.compute.models.sublayers import Activation
from quire.compute.models.vision.spec import Matrix, VisionSpec
from quire.compute.native.decoder import PANEL_WIDTH, NativeDecoder
from quire.compute.native.shape import decoder_shape
from quire.compute.vision.encoder import BLOCK_SIZE, SharedCache, TowerEncoder, cache_blocks, shared_cache
from quire.compute.vision.weights import VisionWeights, fitted
from quire.compute.weights.decoder_weights import PartWeights, WeightReader
from quire.compute.weights.weight_file import WeightFile
from quire.compute.worker.model_runner import StepInputs
from quire.core.kv_spec import KVCacheSpec

if TYPE_CHECKING:
    from quire._native import Kernels, ThreadTeam

INPUT_BYTES: Final = 12
"""The bytes of a number of a product's input: as float, and rounded for the instructions of a machine."""


class NativeTower:
    """Implements `Tower`."""

    def __init__(self, decoder: NativeDecoder, cache: SharedCache) -> None:
        self.decoder = decoder
        self._cache = cache

    def run(self, inputs: StepInputs, layer: int) -> FloatArray:
        """Compute a layer, right after the layer before it; return the states that the step asks for."""
        return self.decoder.run(inputs, self._cache, layers=(layer, layer + 1)).states


class NativeProducts:
    """Implements `Products`: matrices in panels, multiplied by a team of threads."""

    def __init__(self, weights: Mapping[str, PartWeights], kernels: Kernels, team: ThreadTeam) -> None:
        self._kernels = kernels
        self._matrices = {name: RowProduct(kernels, team, each.weight, each.bias) for name, each in weights.items()}

    @property
    def num_bytes(self) -> int:
        """The bytes of the matrices in memory."""
        return sum(each.num_bytes for each in self._matrices.values())

    def multiply(self, matrix: Matrix, rows: FloatArray) -> FloatArray:
        """Return the activation of a matrix times each row."""
        product = self._matrices[matrix.weight]
        output = np.zeros((len(rows), product.output_stride), np.float32)
        activation = "" if matrix.activation is None else matrix.activation.value
        product.run(np.ascontiguousarray(rows, np.float32), output, activation)
        return output[:, : matrix.num_outputs]

    def activate(self, rows: FloatArray, activation: Activation) -> FloatArray:
        """Return the activation of each number."""
        numbers = np.zeros(-(-rows.size // PANEL_WIDTH) * PANEL_WIDTH, np.float32)
        numbers[: rows.size] = rows.reshape(-1)
        activate(self._kernels, numbers, activation.value)
        return numbers[: rows.size].reshape(rows.shape)


def native_encoder(
    spec: VisionSpec,
    checkpoint: WeightFile,
    dtype: str,
    block_types: Mapping[str, str],
    kernels: Kernels,
    team: ThreadTeam,
) -> TowerEncoder:
    """Return the image encoder of a model, with matrices in `dtype` and memory for its largest image."""
    spec = fitted(spec, checkpoint)
    tower = spec.tower
    weights = VisionWeights.load(spec, checkpoint, dtype)
    products = NativeProducts(weights.matrices, kernels, team)
    if not tower.layers:
        return TowerEncoder(spec, weights.without_matrices(), None, products)
    reader = WeightReader(tower, checkpoint, dtype, block_types=block_types)
    decoder = Decoder(decoder_shape(tower, _kv_spec(tower, dtype)), kernels, team)
    runner = NativeDecoder(tower, decoder, reader)
    decoder.reserve(spec.patches.max_rows, 0)
    cache = shared_cache(spec, _one_layer(tower, dtype))
    return TowerEncoder(spec, weights.without_matrices(), NativeTower(runner, cache), products)


def native_memory(spec: VisionSpec, dtype: str, num_threads: int) -> int:
    """Return the bytes that an image takes at most while it is encoded, without the weights."""
    of_products = max(count * (INPUT_BYTES * each.num_inputs + 8 * each.num_outputs) for each, count in spec.products())
    if not spec.tower.layers:
        return of_products
    shape = decoder_shape(spec.tower, _kv_spec(spec.tower, dtype))
    of_cache = cache_blocks(spec) * _one_layer(spec.tower, dtype).bytes_per_block
    return step_bytes(shape, spec.patches.max_rows, 0, num_threads) + of_cache + of_products


def _kv_spec(tower: DecoderSpec, dtype: str) -> KVCacheSpec:
    return tower.kv_cache_spec(BLOCK_SIZE, dtype).with_padded_heads(PANEL_WIDTH)


def _one_layer(tower: DecoderSpec, dtype: str) -> KVCacheSpec:
    return _kv_spec(tower.with_layers(1), dtype)
