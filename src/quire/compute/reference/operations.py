"""The operations of a decoder on rows of numbers.

Every function maps each row (a token) separately: no sum runs over more than one row, and the order of every
sum depends only on the length of a row. So the bits of a row cannot depend on its neighbours in a batch.
The trap is the matrix product: BLAS picks its kernel by the number of rows and by the processor, and
another kernel adds in another order. Products here therefore use `np.einsum` without `optimize`: numpy's
own loops, which are the same on every processor.

Elementary functions have the same trap: numpy has a different `exp` for each generation of vector
instructions. They are computed in float64 and rounded, which hides a different last bit.

numpy also chooses its vector loops by memory layout, so inputs here are always contiguous.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from quire.compute.activations import ACTIVATIONS
from quire.compute.arrays import FloatArray, IntArray
from quire.compute.models.parts import NormKind, NormScope, NormSpec
from quire.compute.models.sublayers import Activation, RopeSpec
from quire.compute.weights.codes import GROUP, INNER, Codes
from quire.compute.weights.decoder_weights import PartWeights
from quire.compute.weights.quantize import quantized

SWIGLU_LIMIT: Final = np.float32(7)


class Angles(NamedTuple):
    """The cosine and sine of each position and pair, and the factor of each position's queries, if it has one."""

    cosines: FloatArray  # [num_tokens, rotary_dim / 2]
    sines: FloatArray
    query_factors: FloatArray | None = None  # [num_tokens]


def linear(rows: FloatArray, part: PartWeights) -> FloatArray:
    """Return weight @ row + bias, plus an adapter's part, for each row: `[num_rows, in]` to `[num_rows, out]`."""
    if part.bounds is not None:
        low, high, lowest, highest = map(np.float32, part.bounds)
        found: FloatArray = linear(rows.clip(low, high), replace(part, bounds=None)).clip(lowest, highest)
        return found
    product: FloatArray
    product = np.einsum("ri,oi->ro", rows, part.weight) if part.codes is None else _coded_product(rows, part.codes)
    product = product if part.bias is None else product + part.bias
    if part.change is None:
        return product
    a, b = part.change
    added: FloatArray = np.einsum("ri,oi->ro", np.einsum("ri,oi->ro", rows, a), b)
    return product + added


def _coded_product(rows: FloatArray, codes: Codes) -> FloatArray:
    """Return codes @ row with each group of 32 numbers of a row rounded to int8; groups are added in order.

    Adding the products of a group as floats is exact: every sum of 32 of them is an integer below 2^24. Minimums are
    added after each 256 inputs.
    """
    total = np.zeros((len(rows), len(codes.codes)), np.float32)
    per_chunk = INNER // GROUP
    groups = [_rounded(rows[:, start : start + GROUP]) for start in range(0, rows.shape[1], GROUP)]
    for first in range(0, len(groups), per_chunk):
        chunk = list(enumerate(groups))[first : first + per_chunk]
        for g, (numbers, scales) in chunk:
            columns = codes.codes[:, g * GROUP : (g + 1) * GROUP].astype(np.float32)
            total += np.einsum("ri,oi->ro", numbers, columns) * (scales[:, None] * codes.scales[:, g])
        if codes.minimums is not None:
            for g, (numbers, scales) in chunk:
                total += (scales * numbers.sum(axis=1))[:, None] * codes.minimums[:, g]
    return total


def _rounded(rows: FloatArray) -> tuple[FloatArray, FloatArray]:
    numbers, scales = quantized(rows)
    return numbers.astype(np.float32), scales


def looked_up(part: PartWeights, ids: IntArray) -> FloatArray:
    """Return the rows of an embedding: `[num_rows, size]`."""
    rows: FloatArray = part.weight[ids] if part.codes is None else part.codes.rows(ids)
    return rows


def normalize(rows: FloatArray, part: PartWeights, spec: NormSpec) -> FloatArray:
    """Return the rows normalised over their last dimension."""
    if spec.kind is NormKind.LAYER:
        rows = rows - _mean(rows)
    scale = 1 + part.weight if spec.unit_offset else part.weight
    length: FloatArray = np.sqrt(mean_square(rows) + np.float32(spec.epsilon))
    normed: FloatArray = scale * (rows / length)
    return normed if part.bias is None else normed + part.bias


def normalize_heads(heads: FloatArray, part: PartWeights, spec: NormSpec, scope: NormScope) -> FloatArray:
    """Return queries or keys normalised, `[num_tokens, num_heads, head_dim]`."""
    if scope is NormScope.ALL_HEADS:
        return normalize(heads.reshape(len(heads), -1), part, spec).reshape(heads.shape)
    if scope is NormScope.EACH_HEAD:
        part = PartWeights(part.weight.reshape(heads.shape[1:]))
    return normalize(heads, part, spec)


def above(rows: FloatArray, deviations: float) -> FloatArray:
    """Return by how much each number is above the mean of its row plus this many standard deviations, at least 0."""
    mean = _mean(rows)
    limit = mean + np.sqrt(mean_square(rows - mean)) * np.float32(deviations)
    found: FloatArray = np.maximum(rows - limit, np.float32(0))
    return found


def mean_square(rows: FloatArray) -> FloatArray:
    """Return the mean of the squares of each row, `[…, 1]`."""
    return _mean(rows * rows)


def _mean(rows: FloatArray) -> FloatArray:
    total: FloatArray = np.sum(rows, axis=-1, keepdims=True)
    return total / np.float32(rows.shape[-1])


def exponential(numbers: FloatArray) -> FloatArray:
    """Return e to the power of each number."""
    return np.exp(numbers, dtype=np.float64).astype(np.float32)


def activate(rows: FloatArray, activation: Activation) -> FloatArray:
    """Return the activation of each number."""
    active: FloatArray = ACTIVATIONS[activation](rows.astype(np.float64)).astype(np.float32)
    return active


def gated(gate: FloatArray, up: FloatArray, activation: Activation) -> FloatArray:
    """Return activation(gate) × up, number by number."""
    if activation is Activation.CLAMPED_SWIGLU:
        gate, up = np.minimum(gate, SWIGLU_LIMIT), np.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT) + np.float32(1)
        return activate(gate, Activation.QUICK_GELU) * up
    return activate(gate, activation) * up


def xielu(rows: FloatArray, numbers: FloatArray) -> FloatArray:
    """Return the activation of each number by the four numbers of a layer; see `MLPSpec`."""
    positive, negative, slope, limit = numbers.astype(np.float64)
    x = rows.astype(np.float64)
    above = np.log1p(np.exp(positive)) * x * x
    below = (slope + np.log1p(np.exp(negative))) * (np.expm1(np.minimum(x, limit)) - x)
    active: FloatArray = (slope * x + np.where(x > 0, above, below)).astype(np.float32)
    return active


def soft_cap(rows: FloatArray, cap: float | None) -> FloatArray:
    """Return cap × tanh(rows / cap), which stays within ±cap; without a cap, the rows themselves."""
    if cap is None:
        return rows
    shares: FloatArray = np.tanh(rows / np.float32(cap), dtype=np.float64).astype(np.float32)
    return np.float32(cap) * shares


def rope_angles(positions: IntArray, rope: RopeSpec, coordinates: IntArray) -> Angles:
    """Return the angles of positions; `coordinates` are [num_axes, num_tokens], or empty: each is the position."""
    turning = positions[:, None]
    if rope.axes and len(coordinates):
        turning = coordinates[list(rope.axes)].T
    # Models are trained with angles rounded to float32, so the oracle rounds them too.
    angles = turning.astype(np.float32) * np.array(rope.inverse_frequencies, np.float32)
    exact, scale = angles.astype(np.float64), np.float32(rope.scale)
    factors = None
    if rope.query_growth:
        times = (1 + (positions + rope.growth_offset) // rope.growth_length).astype(np.float64)
        factors = (1 + rope.query_growth * np.log(times)).astype(np.float32)
    return Angles(np.cos(exact).astype(np.float32) * scale, np.sin(exact).astype(np.float32) * scale, factors)


def rotate(heads: FloatArray, angles: Angles) -> FloatArray:
    """Rotate the pairs (i, i + half) of each head, `[num_tokens, num_heads, head_dim]`."""
    cosine, sine = angles.cosines[:, None, :], angles.sines[:, None, :]  # [num_tokens, 1, half]
    half = cosine.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    turned = [
        first * cosine - second * sine,
        second * cosine + first * sine,
        heads[..., 2 * half :],
    ]
    return np.concatenate(turned, axis=-1)
