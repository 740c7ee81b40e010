"""The image encoder of the reference engine, in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.compute.arrays import FloatArray
from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import Part
from quire.compute.models.sublayers import Activation
from quire.compute.models.vision.spec import Matrix, VisionSpec
from quire.compute.reference.attention import TILE
from quire.compute.reference.decoder import ReferenceDecoder
from quire.compute.reference.operations import activate, linear
from quire.compute.vision.encoder import BLOCK_SIZE, SharedCache, TowerEncoder, cache_blocks, shared_cache
from quire.compute.vision.weights import VisionWeights, fitted
from quire.compute.weights.decoder_weights import DecoderWeights, PartWeights
from quire.compute.weights.weight_file import WeightFile
from quire.compute.worker.model_runner import NO_STATES, StepInputs


class ReferenceTower:
    """Implements `Tower` with a decoder for each layer: its rows are the states of the layer before it."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, cache: SharedCache) -> None:
        self._cache = cache
        self._states = NO_STATES
        self._layers: list[ReferenceDecoder] = []
        for index, layer in enumerate(spec.layers):
            ends = {Part.EMBEDDING_NORM: index == 0, Part.FINAL_NORM: index == len(spec.layers) - 1}
            parts = {part: piece for part, piece in weights.parts.items() if ends.get(part, True)}
            of_layer = DecoderWeights(parts, (weights.layers[index],), ((),))
            self._layers.append(ReferenceDecoder(replace(spec, layers=(layer,)), of_layer))

    def run(self, inputs: StepInputs, layer: int) -> FloatArray:
        """Compute a layer, right after the layer before it; return the states that the step asks for."""
        rows = inputs.given_rows if layer == 0 else self._states
        step = replace(inputs, given_rows=rows, state_indices=inputs.given)
        self._states = self._layers[layer].run(step, self._cache).states
        states: FloatArray = self._states[inputs.state_indices]
        return states


class ReferenceProducts:
    """Implements `Products`."""

    def __init__(self, weights: Mapping[str, PartWeights]) -> None:
        self._weights = weights

    def multiply(self, matrix: Matrix, rows: FloatArray) -> FloatArray:
        """Return the activation of a matrix times each row."""
        product = linear(rows, self._weights[matrix.weight])
        return product if matrix.activation is None else self.activate(product, matrix.activation)

    def activate(self, rows: FloatArray, activation: Activation) -> FloatArray:
        """Return the activation of each number."""
        return activate(rows, activation)


def reference_encoder(spec: VisionSpec, checkpoint: WeightFile) -> TowerEncoder:
    """Return the image encoder of a model, with memory for its largest image."""
    spec = fitted(spec, checkpoint)
    tower, weights = spec.tower, VisionWeights.load(spec, checkpoint, "float32")
    if not tower.layers:
        return TowerEncoder(spec, weights, None, ReferenceProducts(weights.matrices))
    layers = DecoderWeights.load(tower, checkpoint)
    cache = shared_cache(spec, tower.with_layers(1).kv_cache_spec(BLOCK_SIZE))
    return TowerEncoder(spec, weights, ReferenceTower(tower, layers, cache), ReferenceProducts(weights.matrices))


def reference_memory(spec: VisionSpec) -> int:
    """Return about the bytes that an image takes at most while it is encoded, without the weights."""
    tower, num_rows = spec.tower, spec.patches.max_rows
    per_row = 8 * tower.hidden_size + 3 * tower.mlp.intermediate_size + 2 * TILE * tower.attention.num_heads
    of_cache = 0
    if tower.layers:
        of_cache = cache_blocks(spec) * tower.with_layers(1).kv_cache_spec(BLOCK_SIZE).bytes_per_block
    of_products = (count * (each.num_inputs + each.num_outputs) for each, count in spec.products())
    return of_cache + 4 * max(num_rows * per_row, *of_products)
