"""The second sublayer: an MLP, or the experts that a router picks for each token.

With experts, every row has its own order of sums: softmax over the router's row, choose the best experts
by weight and then by id, add their outputs in the order of ids, then the output of the shared MLP, which
can have a weight for each row. Rows with the same expert go through it together, but each row is computed
separately, as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from quire.compute.arrays import FloatArray
from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import Part
from quire.compute.models.sublayers import Activation, ExpertsSpec, MLPSpec, Scoring
from quire.compute.reference.operations import above, activate, exponential, gated, linear, normalize, xielu
from quire.compute.weights.decoder_weights import Parts


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of the parts of an MLP."""

    gate: Part
    up: Part
    down: Part


DENSE: Final = _Names(Part.GATE, Part.UP, Part.DOWN)
SHARED: Final = _Names(Part.SHARED_GATE, Part.SHARED_UP, Part.SHARED_DOWN)
EXPERT: Final = _Names(Part.EXPERT_GATE, Part.EXPERT_UP, Part.EXPERT_DOWN)


def mlp_output(
    rows: FloatArray, spec: MLPSpec, parts: Parts, names: _Names, threshold: float | None = None
) -> FloatArray:
    """Return the MLP of each row: `[num_rows, hidden_size]`; `threshold`: see `LayerSpec.gate_threshold`."""
    up = linear(rows, parts[names.up])  # [num_rows, intermediate_size]
    if spec.gated:
        gates = linear(rows, parts[names.gate])
        inner = gated(gates if threshold is None else above(gates, threshold), up, spec.activation)
    elif spec.activation is Activation.XIELU:
        inner = xielu(up, parts[Part.XIELU].weight)
    else:
        inner = activate(up, spec.activation)
    return linear(inner, parts[names.down])


def experts_output(
    rows: FloatArray, hidden: FloatArray, spec: DecoderSpec, parts: Parts, experts: Sequence[Parts]
) -> FloatArray:
    """Return the weighted sum of each row's experts: `[num_rows, hidden_size]`.

    `rows` are the normalised rows of `hidden`, unless the experts have norms of their own.
    """
    assert spec.experts is not None  # a layer is sparse only if the model has experts

    def normed(inputs: FloatArray, part: Part) -> FloatArray:
        return normalize(inputs, parts[part], spec.norm)

    own = spec.experts.own_norms
    to_router, to_experts = [normed(hidden, part) if own else rows for part in (Part.ROUTER_NORM, Part.EXPERTS_NORM)]
    offset = parts[Part.ROUTER_OFFSET].weight if spec.experts.offset else None
    weights = routing_weights(linear(to_router, parts[Part.ROUTER]), spec.experts, offset)
    weights = weights * parts[Part.EXPERT_FACTORS].weight if spec.experts.factors else weights
    output = np.zeros_like(rows)
    for expert, each in enumerate(experts):
        chosen = np.flatnonzero(weights[:, expert])
        if len(chosen):
            of_rows, inputs = weights[chosen, expert, None], to_experts[chosen]
            if spec.experts.weighs_inputs:
                output[chosen] += mlp_output(of_rows * inputs, spec.mlp, each, EXPERT)
            else:
                output[chosen] += of_rows * mlp_output(inputs, spec.mlp, each, EXPERT)
    output = normed(output, Part.AFTER_EXPERTS_NORM) if own else output
    if not spec.experts.shared_size:
        return output
    shared = _shared_output(rows, spec, parts)
    return output + (normed(shared, Part.AFTER_SHARED_NORM) if own else shared)


def _shared_output(rows: FloatArray, spec: DecoderSpec, parts: Parts) -> FloatArray:
    """Return the output of the MLP next to the experts for each row."""
    output = mlp_output(rows, spec.mlp, parts, SHARED)
    if Part.SHARED_ROUTER not in parts:
        return output
    return output * sigmoid(linear(rows, parts[Part.SHARED_ROUTER]))


def sigmoid(scores: FloatArray) -> FloatArray:
    """Return 1 / (1 + e^-x) of each number."""
    weights: FloatArray = np.float32(1) / (1 + exponential(-scores))
    return weights


def routing_weights(scores: FloatArray, spec: ExpertsSpec, offset: FloatArray | None = None) -> FloatArray:
    """Return the weight of each expert for each row, 0 if it is not picked: `[num_rows, num_experts]`."""
    weights: FloatArray
    scores = scores * np.float32(spec.score_scale)
    if spec.scoring is Scoring.SPARSE_MIXER:
        return _mixed(scores, spec)
    if spec.scoring is Scoring.SIGMOID:
        weights = sigmoid(scores)
    else:
        exponents = exponential(scores - scores.max(axis=-1, keepdims=True))
        weights = exponents / exponents.sum(axis=-1, keepdims=True)
    chosen_by = _in_best_groups(weights if offset is None else weights + offset, spec)
    # A stable sort: among equal weights the lowest id comes first.
    order = np.argsort(-chosen_by, axis=-1, kind="stable")[:, : spec.experts_per_token]
    best = np.take_along_axis(weights, order, axis=-1)
    if spec.normalize_weights:
        best = best / best.sum(axis=-1, keepdims=True)
    picked = np.zeros(weights.shape, np.float32)
    np.put_along_axis(picked, order, best * np.float32(spec.scale), axis=-1)
    return picked


def _mixed(scores: FloatArray, spec: ExpertsSpec) -> FloatArray:
    """Return the weights of experts that are chosen one after another, each among those with a similar score."""
    left, picked, rows = scores.copy(), np.zeros(scores.shape, np.float32), np.arange(len(scores))
    for _ in range(spec.experts_per_token):
        best = left.argmax(axis=-1)  # among equal ones the lowest id
        highest = left[rows, best][:, None]
        is_near = highest - left <= np.float32(spec.margin) * np.maximum(np.abs(scores), highest)
        sums = np.where(is_near, exponential(left - highest), np.float32(0)).sum(axis=-1)
        picked[rows, best] = np.float32(spec.scale) / sums
        left[rows, best] = -np.inf
    return picked


def _in_best_groups(numbers: FloatArray, spec: ExpertsSpec) -> FloatArray:
    """Return the numbers for choosing experts, minus infinity in the groups that are not chosen for a row."""
    groups = numbers.reshape(len(numbers), spec.num_groups, -1)
    ranks = np.sort(groups, axis=-1)[..., -spec.group_best :].sum(axis=-1)
    others = np.argsort(-ranks, axis=-1, kind="stable")[:, spec.groups_per_token :]
    kept = groups.copy()
    np.put_along_axis(kept, others[..., None], np.float32(-np.inf), axis=1)
    return kept.reshape(numbers.shape)
