"""The image encoder on a device: the tower is a decoder of the same layer walk, with torch's own attention.

    patches ─► product ─► host: + positions ─► layers, on the device ─► host: connector, with products on the device

A tower attends from all rows of an image to all others, or within windows. So its KV memory is one block with room for
the largest image, which all layers share, and a window is a range of rows in it. The layers use torch operations, not
the kernels of the text model: these would be compiled for the widths of each tower.

The host waits for each layer. Otherwise it would launch a whole image in the short time between two steps, and the next
step would wait for it on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional

from quire.compute.arrays import FloatArray
from quire.compute.models.sublayers import Activation
from quire.compute.models.vision.spec import Matrix, VisionSpec
from quire.compute.torch.attention.base import AttentionRule, KVPair
from quire.compute.torch.attention.plain import PlainAttention
from quire.compute.torch.decoder import Implementations, LayersOf, TorchDecoder, Waiting
from quire.compute.torch.experts import PlainExperts
from quire.compute.torch.operations import PlainOperations, activated
from quire.compute.torch.products import Matrix as DeviceMatrix
from quire.compute.torch.products import product
from quire.compute.torch.settings import TorchSettings
from quire.compute.torch.upload import on_device, together
from quire.compute.torch.weights import DTYPES, TorchWeights, tensor_of
from quire.compute.vision.encoder import TowerEncoder
from quire.compute.vision.weights import VisionWeights, fitted
from quire.compute.weights.decoder_weights import PartWeights, WeightReader
from quire.compute.weights.weight_file import WeightFile
from quire.compute.worker.model_runner import NO_STATES, StepInputs
from quire.core.config import AUTO
from quire.core.errors import InvalidConfigError, OutOfMemoryError
from quire.core.images import CHANNELS, Image

MOST_SCORES: Final = 1 << 28
"""The most scores of one call of attention, which may hold all of them."""

Windows = tuple[torch.Tensor, ...]
"""The rows of the windows of each size, `[num_windows, size]`; empty: all rows are one sequence."""


class TowerAttention(PlainAttention):
    """Attention among the rows of an image; their keys and values are the first rows of one block."""

    def write_kv(self, pair: KVPair, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the keys and values of all rows, `[num_rows, num_heads, head_dim]`. Mutates."""
        for place, rows in ((pair.keys, keys), (pair.values, values)):
            place[0, :, : len(rows)] = rows.transpose(0, 1)

    def run(self, queries: torch.Tensor, pair: KVPair, planned: Any, rule: AttentionRule) -> torch.Tensor:
        """Return the attention of each row, `[num_rows, num_heads, head_dim]`; `planned` are `Windows`."""
        heads = [queries.transpose(0, 1), *(place[0, :, : len(queries)] for place in (pair.keys, pair.values))]
        if not planned:
            return _attend([each[None] for each in heads], rule.scale)[0].transpose(0, 1)
        output = torch.empty_like(queries)
        for rows in planned:
            attended = _attend([each[:, rows].transpose(0, 1) for each in heads], rule.scale)
            output[rows.flatten()] = attended.transpose(1, 2).flatten(0, 1)
        return output


def _attend(heads: list[torch.Tensor], scale: float) -> torch.Tensor:
    """Return the attention of queries, with keys and values: each `[num_sequences, num_heads, num_rows, head_dim]`."""
    queries, keys, values = heads
    num_rows, shares = max(1, MOST_SCORES // math.prod(queries.shape[:3])), queries.shape[1] != keys.shape[1]
    parts = [
        functional.scaled_dot_product_attention(part, keys, values, scale=scale, enable_gqa=shares)
        for part in queries.split(num_rows, dim=2)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


class TorchTower:
    """Implements `Tower`. The state of the image that was computed last stays in memory."""

    def __init__(self, decoder: TorchDecoder, max_rows: int) -> None:
        self._decoder = decoder
        heads = decoder.spec.attention
        shape = (1, heads.num_kv_heads, max_rows, heads.head_dim)
        self._pair = KVPair(*(torch.empty(shape, dtype=decoder.dtype, device=decoder.device) for _ in range(2)))
        self._state: Waiting | None = None

    def run(self, inputs: StepInputs, layer: int) -> FloatArray:
        """Compute a layer, right after the layer before it, and wait for it; return the states that the step asks for.

        Raises `OutOfMemoryError` if the device has no room for the image.
        """
        try:
            with torch.inference_mode():
                return self._run(inputs, layer)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"an image does not fit into the memory of {self._decoder.device}") from error

    def _run(self, inputs: StepInputs, layer: int) -> FloatArray:
        decoder, device = self._decoder, self._decoder.device
        if layer == 0 or self._state is None:
            self._state = decoder.entered(on_device(inputs.given_rows, device).to(decoder.dtype))
        slots, *coordinates = together([inputs.positions, *inputs.coordinates], device)
        step = LayersOf(
            decoder.angles(slots, coordinates or None),
            {layer: self._pair},
            _windows(inputs, device),
            (slots,),
            decoder.without_adapters,
        )
        self._state = decoder.layer(layer, self._state, step)
        if len(inputs.state_indices):
            states = decoder.left(self._state, is_last=layer == len(decoder.spec.layers) - 1)
            found: FloatArray = states.to(torch.float32).cpu().numpy()
            return found
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return NO_STATES


def _windows(inputs: StepInputs, device: torch.device) -> Windows:
    """Return the windows of a step, those of one size together."""
    starts, sizes = inputs.query_starts[:-1], np.diff(inputs.query_starts)
    if len(sizes) == 1:
        return ()
    rows = [starts[sizes == size][:, None] + np.arange(size) for size in np.unique(sizes)]
    return tuple(together(rows, device))


class TorchProducts:
    """Implements `Products`: matrices on the device."""

    def __init__(self, weights: Mapping[str, PartWeights], dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        self._dtype = dtype
        self._matrices = {
            name: DeviceMatrix(
                tensor_of(each.weight).to(device, dtype),
                None if each.bias is None else tensor_of(each.bias).to(device, dtype),
            )
            for name, each in weights.items()
        }

    def multiply(self, matrix: Matrix, rows: FloatArray) -> FloatArray:
        """Return the activation of a matrix times each row."""
        with torch.inference_mode():
            moved = on_device(np.ascontiguousarray(rows), self._device).to(self._dtype)
            numbers = product(moved, self._matrices[matrix.weight]).to(torch.float32)
            numbers = numbers if matrix.activation is None else activated(numbers, matrix.activation)
            found: FloatArray = numbers.cpu().numpy()
            return found

    def activate(self, rows: FloatArray, activation: Activation) -> FloatArray:
        """Return the activation of each number."""
        with torch.inference_mode():
            found: FloatArray = activated(on_device(rows, self._device), activation).cpu().numpy()
            return found


def load_encoder(
    spec: VisionSpec, checkpoint: WeightFile, settings: TorchSettings, device: torch.device
) -> TowerEncoder:
    """Return the image encoder of a model, with matrices in the settings' dtype and memory for its largest image.

    Raises `OutOfMemoryError` for weights that do not fit.
    """
    spec, dtype = fitted(spec, checkpoint), DTYPES[settings.dtype]
    stored = "float32" if settings.dtype == "float16" else settings.dtype
    try:
        weights = VisionWeights.load(spec, checkpoint, stored)
        products = TorchProducts(weights.matrices, dtype, device)
        if not spec.tower.layers:
            return TowerEncoder(spec, weights.without_matrices(), None, products)
        layers = TorchWeights.load(spec.tower, WeightReader(spec.tower, checkpoint, stored), dtype, device)
        attention = TowerAttention(device)
        chosen = Implementations(attention, PlainOperations(attention), product, PlainExperts(product))
        tower = TorchTower(TorchDecoder(spec.tower, layers, chosen), spec.patches.max_rows)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"the image encoder does not fit into the memory of {device}") from error
    return TowerEncoder(spec, weights.without_matrices(), tower, products)


def largest_image(spec: VisionSpec) -> Image:
    """Return a black image with as many patches as an image can have, or nearly as many."""
    patches = spec.patches
    if patches.image_size is not None:
        height = width = patches.image_size
    else:
        squares, cell = patches.max_patches // patches.merge**2, patches.size * patches.merge
        height = math.isqrt(squares) * cell
        width = squares // math.isqrt(squares) * cell
    return Image.of(0, spec.num_placeholders(height, width), height, width, bytes(height * width * CHANNELS))


def rehearse(encoder: TowerEncoder) -> None:
    """Encode the largest image; its state then stays in memory. Mutates only that.

    Raises `InvalidConfigError` if the device has no room for it.
    """
    try:
        encoder.begin(largest_image(encoder.spec)).advance(math.inf)
    except OutOfMemoryError as error:
        allowed = "none, or a smaller max_image_patches: the largest image does not fit"
        raise InvalidConfigError("mmproj", AUTO, allowed) from error
