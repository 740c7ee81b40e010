"""ReferenceDecoder: interprets a `DecoderSpec` in float32, one layer after another.

    embed ─┬─ norm ─ attention ─ norm ─ + ─ norm ─┬─ norm ─ MLP ─ norm ─ + ─ norm ─► norm ─► head
           └────────────────────────────┘         └──────────────────────┘
           └─────────────────────────── × layers ───────────────────────────┘

In a parallel layer, attention and MLP start from the same rows. The spec determines the norms and all other differences
between families. This decoder is written for reading, and every other engine must return the same results. All
operations work row by row (see `operations` and `attention`), so a row's bits do not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from quire.compute.arrays import BoolArray, FloatArray, IntArray
from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import Part
from quire.compute.models.sublayers import AttentionSpec, RopeSpec
from quire.compute.reference.attention import AttentionRule, paged_attention, write_kv
from quire.compute.reference.convolution import Convolution
from quire.compute.reference.delta import DeltaAttention
from quire.compute.reference.latent import LatentAttention
from quire.compute.reference.mamba import Mamba
from quire.compute.reference.mlp import DENSE, experts_output, mlp_output, sigmoid
from quire.compute.reference.operations import (
    Angles,
    gated,
    linear,
    looked_up,
    normalize,
    normalize_heads,
    rope_angles,
    rotate,
    soft_cap,
)
from quire.compute.reference.streams import Streams
from quire.compute.weights.decoder_weights import DecoderWeights, Parts, PartWeights
from quire.compute.weights.int4 import KV_ROUNDINGS
from quire.compute.worker.cache_engine import CacheEngine, LayerCache
from quire.compute.worker.key_centres import BLOCK, key_centres, num_blocks
from quire.compute.worker.model_runner import StepInputs, StepOutputs


class ReferenceDecoder:
    """A decoder over numpy arrays; implements `ModelRunner`. Immutable.

    Keys and values are rounded as `kv_dtype` stores them, but stay floats.
    """

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, *, kv_dtype: str = "float32") -> None:
        self.spec = spec
        self.weights = weights
        self.kv_dtype = kv_dtype
        self._centres: Mapping[int, FloatArray] = {}
        if kv_dtype == "int4":
            exact, kv_spec = ReferenceDecoder(spec, weights), spec.kv_cache_spec(BLOCK)
            memory = CacheEngine(kv_spec, num_blocks=num_blocks(spec, kv_spec))
            self._centres = key_centres(spec, memory, exact, _read_keys)

    def with_weights(self, weights: DecoderWeights) -> ReferenceDecoder:
        """Return the decoder with other weights of the same shapes."""
        made = copy(self)
        made.weights = weights
        return made

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the model."""
        return self.spec.vocab_size

    def run(self, inputs: StepInputs, cache: CacheEngine) -> StepOutputs:
        """Compute one step. Mutates the slots of its tokens in the cache, and nothing else."""
        # A row that overflows is detected in the outputs and fails alone, so numpy need not warn.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            hidden = self._embed(inputs)  # [num_tokens, hidden_size]
            layer_inputs = self._layer_inputs(hidden, inputs)
            angles = self._angles(inputs)
            streams = None if self.spec.streams is None else Streams(hidden, self.weights.parts, self.spec.norm)
            before = hidden
            for index, layer in enumerate(self.spec.layers):
                parts = self.weights.layers[index]
                hidden = hidden if streams is None else streams.predict(parts)
                source = before if layer.skips_previous else hidden
                update = self._attend(source, index, None if layer.rope is None else angles[layer.rope], cache, inputs)
                before, attended = hidden, hidden if update is None else hidden + update
                if self.spec.laurel_rank:
                    attended = self._with_laurel(attended, source, parts)
                if self.spec.parallel:
                    hidden = attended + self._transform(hidden, index)
                else:
                    hidden = self._norm(attended, parts, Part.JOINED_ATTENTION_NORM)
                    if layer.transforms:
                        hidden = self._norm(hidden + self._transform(hidden, index), parts, Part.JOINED_MLP_NORM)
                if streams is not None:
                    streams.add(self._input_update(streams.correct(hidden, parts), parts, layer_inputs[:, index]))
                    continue
                hidden = self._finish_layer(hidden, parts, layer_inputs[:, index])
                hidden = self._with_deep_rows(hidden, index, inputs)
            hidden = hidden if streams is None else streams.merged(self.weights.parts)
            hidden = self._norm(hidden, self.weights.parts, Part.FINAL_NORM)
            logits = self._logits(hidden[inputs.logit_indices])
        finite: BoolArray = np.all(np.isfinite(hidden), axis=1)
        return StepOutputs(logits, finite, np.all(np.isfinite(logits), axis=1), hidden[inputs.state_indices])

    def _embed(self, inputs: StepInputs) -> FloatArray:
        hidden = self._rows(inputs)
        if self.spec.embedding_size is not None:
            hidden = linear(hidden, self.weights.parts[Part.EMBEDDING_IN])
        if self.spec.token_types:
            hidden = hidden + self.weights.parts[Part.TOKEN_TYPES].weight[self._token_types(inputs)]
        if self.spec.learned_positions is not None:
            rows = inputs.positions + self.spec.learned_positions
            hidden = hidden + self.weights.parts[Part.POSITIONS].weight[rows]
        return self._norm(hidden, self.weights.parts, Part.EMBEDDING_NORM)

    def _rows(self, inputs: StepInputs) -> FloatArray:
        """Return the embedding of each token, or the row that it has instead."""
        if self.spec.vocab_size == 0:
            rows: FloatArray = inputs.given_rows[inputs.given]
            return self._normed_halves(rows) if self.spec.joins_states else rows
        rows = self.embed(inputs.token_ids)
        if len(inputs.given):
            is_given = inputs.given >= 0
            rows[is_given] = inputs.given_rows[inputs.given[is_given], : rows.shape[1]]
        return rows

    def embed(self, token_ids: IntArray) -> FloatArray:
        """Return the rows of the embedding for some tokens. Does not mutate."""
        rows = looked_up(self.weights.parts[Part.EMBEDDING], token_ids)
        return rows * np.float32(self.spec.embedding_scale)

    def logits_of(self, states: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Return the logits of hidden states after the final norm, and which rows are finite. Does not mutate."""
        logits = self._logits(states)
        return logits, np.all(np.isfinite(logits), axis=1)

    def _normed_halves(self, rows: FloatArray) -> FloatArray:
        """Return given rows of tokens and hidden states, each half normalised."""
        halves = np.split(rows, 2, axis=1)
        norms = [self.weights.parts[part] for part in (Part.TOKEN_NORM, Part.STATE_NORM)]
        return np.concatenate(
            [normalize(half, norm, self.spec.norm) for half, norm in zip(halves, norms, strict=True)], axis=1
        )

    def _with_deep_rows(self, hidden: FloatArray, index: int, inputs: StepInputs) -> FloatArray:
        """Return the output of a layer with the part of given rows that is for it."""
        if index >= self.spec.deep_rows or not len(inputs.given):
            return hidden
        first, is_given = (index + 1) * self.spec.hidden_size, inputs.given >= 0
        hidden = hidden.copy()
        hidden[is_given] += inputs.given_rows[inputs.given[is_given], first : first + self.spec.hidden_size]
        return hidden

    def _token_types(self, inputs: StepInputs) -> IntArray:
        """Return the type of each token: 1 behind the first separator of its text."""
        types = np.zeros(len(inputs.token_ids), np.int64)
        for tokens in map(inputs.tokens_of, range(len(inputs.entries))):
            types[tokens][1:] = np.cumsum(inputs.token_ids[tokens] == self.spec.separator)[:-1] > 0
        return types

    def _layer_inputs(self, embedded: FloatArray, inputs: StepInputs) -> FloatArray:
        """Return the input of each layer for each token, `[num_tokens, num_layers, size]`; of size 0 without inputs."""
        spec, parts, shape = self.spec.layer_inputs, self.weights.parts, (len(embedded), len(self.spec.layers), -1)
        if spec is None:
            return np.zeros((*shape[:2], 0), np.float32)
        token_ids = inputs.token_ids
        if len(inputs.given):
            token_ids = np.where(inputs.given >= 0, spec.given_token, token_ids)
        if spec.num_tokens is not None:
            token_ids = np.where(token_ids < spec.num_tokens, token_ids, 0)
        projected = linear(embedded, parts[Part.LAYER_INPUTS]) * np.float32(spec.input_scale)
        normed = normalize(projected.reshape(shape), parts[Part.LAYER_INPUTS_NORM], self.spec.norm)
        rows = looked_up(parts[Part.LAYER_EMBEDDING], token_ids) * np.float32(spec.embedding_scale)
        of_layers: FloatArray = (normed + rows.reshape(shape)) * np.float32(spec.scale)
        return of_layers

    def _finish_layer(self, hidden: FloatArray, parts: Parts, layer_input: FloatArray) -> FloatArray:
        """Return the residual stream after a layer's own input and scale, if the model has them."""
        if Part.INPUT_GATE in parts:
            hidden = hidden + self._input_update(hidden, parts, layer_input)
        return hidden * parts[Part.LAYER_SCALE].weight if Part.LAYER_SCALE in parts else hidden

    def _input_update(self, hidden: FloatArray, parts: Parts, layer_input: FloatArray) -> FloatArray:
        """Return what a layer makes of its own input."""
        inner = gated(linear(hidden, parts[Part.INPUT_GATE]), layer_input, self.spec.mlp.activation)
        return self._norm(linear(inner, parts[Part.INPUT_OUTPUT]), parts, Part.AFTER_INPUT_NORM)

    def _with_laurel(self, attended: FloatArray, hidden: FloatArray, parts: Parts) -> FloatArray:
        """Return the residual stream after attention, which has read `hidden`, and LAuReL."""
        rows = self._norm(hidden, parts, Part.ATTENTION_NORM)
        update = linear(linear(rows, parts[Part.LAUREL_IN]), parts[Part.LAUREL_OUT])
        both = attended + (rows + self._norm(update, parts, Part.LAUREL_NORM))
        return both * np.float32(0.5**0.5)

    def _angles(self, inputs: StepInputs) -> dict[RopeSpec, Angles]:
        """Return the angles of each kind of rotary positions in the model, once for all layers."""
        ropes = {layer.rope for layer in self.spec.layers if layer.rope is not None}
        return {rope: rope_angles(inputs.positions, rope, inputs.coordinates) for rope in ropes}

    def _attention(self, index: int, angles: Angles | None) -> _Attention | LatentAttention:
        """Return the attention of a layer."""
        layer, parts = self.spec.layers[index], self.weights.layers[index]
        shape = self.spec.attention_of(layer)
        if shape.latent is not None:
            return LatentAttention(shape, shape.latent, layer.window, parts, angles)
        if shape.distance_bias:
            parts = {**parts, Part.DISTANCE_BIAS: self.weights.parts[Part.DISTANCE_BIAS]}
        return _Attention(shape, layer.window, parts, angles, _Rounding(self.kv_dtype, self._centres.get(index)))

    def _attend(
        self, hidden: FloatArray, index: int, angles: Angles | None, cache: CacheEngine, inputs: StepInputs
    ) -> FloatArray | None:
        """Return what a layer's attention adds to the residual stream; None without attention. Mutates the cache."""
        parts, spec = self.weights.layers[index], self.spec
        if not spec.layers[index].attends:
            return None
        rows = self._norm(hidden, parts, Part.ATTENTION_NORM)
        if spec.layers[index].recurrent and spec.delta is not None:
            states = cache.states(index, spec.delta.num_key_heads)
            update = DeltaAttention(spec.delta, parts).attend(rows, states, inputs)
        elif spec.layers[index].recurrent and spec.mamba is not None:
            states = cache.states(index, spec.mamba.states.num_records)
            update = Mamba(spec.mamba, parts).attend(rows, states, inputs)
        elif spec.layers[index].recurrent and spec.convolution is not None:
            update = Convolution(spec.convolution, parts).attend(rows, cache.states(index, 2), inputs)
        else:
            owner = spec.layers[index].keys_of
            update = self._attention(index, angles).attend(rows, cache.layer(index if owner is None else owner), inputs)
        return self._norm(update, parts, Part.AFTER_ATTENTION_NORM) * np.float32(self.spec.residual_scale)

    def _transform(self, hidden: FloatArray, index: int) -> FloatArray:
        """Return the output of the MLP or the experts, for the residual stream."""
        parts, layer = self.weights.layers[index], self.spec.layers[index]
        rows = self._norm(hidden, parts, Part.ATTENTION_NORM if self.spec.shared_norm else Part.MLP_NORM)
        if layer.sparse and self.spec.experts is not None:
            update = experts_output(rows, hidden, self.spec, parts, self.weights.experts[index])
        else:
            update = mlp_output(rows, self.spec.mlp, parts, DENSE, layer.gate_threshold)
        return self._norm(update, parts, Part.AFTER_MLP_NORM) * np.float32(self.spec.residual_scale)

    def _norm(self, hidden: FloatArray, parts: Parts, part: Part) -> FloatArray:
        """Return the normalised rows, or the rows themselves if the model has no norm here."""
        return normalize(hidden, parts[part], self.spec.norm) if part in parts else hidden

    def _logits(self, hidden: FloatArray) -> FloatArray:
        if self.spec.vocab_size == 0:
            return np.zeros((0, 0), np.float32)
        if self.spec.embedding_size is not None:
            hidden = linear(hidden, self.weights.parts[Part.EMBEDDING_OUT])
        head = Part.EMBEDDING if self.spec.tied_head else Part.HEAD
        logits = linear(hidden, self.weights.parts[head]) * np.float32(self.spec.logit_scale)
        return soft_cap(logits, self.spec.logit_soft_cap)


@dataclass(frozen=True, slots=True)
class _Rounding:
    """The rounding of a layer's keys and values before they are stored."""

    kv_dtype: str
    key_centre: FloatArray | None

    def round(self, keys: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the keys, centred and rounded, and the rounded values, `[num_tokens, heads, head_dim]`."""
        if self.kv_dtype not in KV_ROUNDINGS:
            return keys, values
        round_keys, round_values = KV_ROUNDINGS[self.kv_dtype]
        return round_keys(keys if self.key_centre is None else keys - self.key_centre), round_values(values)


def _read_keys(cache: CacheEngine, layer: int) -> FloatArray:
    """Return the keys of a layer by slot, `[num_slots, num_kv_heads, head_dim]`."""
    keys = cache.layer(layer).keys
    return keys.reshape(-1, *keys.shape[2:])


class _Attention:
    """The attention sublayer of one layer."""

    def __init__(
        self,
        shape: AttentionSpec,
        window: int | None,
        parts: Parts,
        angles: Angles | None,
        rounding: _Rounding,
    ) -> None:
        self.parts = parts
        self._rounding = rounding
        self._shape = shape
        self._angles = angles
        sinks = parts[Part.SINKS].weight if shape.sinks else None
        biases = parts[Part.DISTANCE_BIAS].weight if shape.distance_bias else None
        ahead = window is not None or not shape.ahead_in_windows
        how = shape.scale, window, shape.score_soft_cap, sinks, shape.bidirectional, ahead, biases, shape.chunked
        self._rule = AttentionRule(*how)

    def attend(self, hidden: FloatArray, cache: LayerCache, inputs: StepInputs) -> FloatArray:
        """Store the step's keys and values and return the attention: `[num_tokens, hidden_size]`. Mutates."""
        query = self._heads(hidden, Part.QUERY, Part.QUERY_NORM)
        if self._angles is not None and self._angles.query_factors is not None:
            query = query * self._angles.query_factors[:, None, None]
        if Part.KEY in self.parts:
            keys, values = self._rounding.round(*self._keys_and_values(hidden))
            write_kv(cache, inputs.slots[cache.group], keys, values)
        output = paged_attention(query, cache, inputs, self._rule).reshape(len(hidden), -1)
        if self._shape.gated:
            output = output * sigmoid(linear(hidden, self.parts[Part.ATTENTION_GATE]))
        return linear(output, self.parts[Part.OUTPUT])

    def _keys_and_values(self, hidden: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the keys and the values of the tokens, `[num_tokens, heads, head_dim]`."""
        shape = self._shape
        keys = self._heads(hidden, Part.KEY, Part.KEY_NORM)
        values = linear(hidden, self.parts[Part.VALUE if Part.VALUE in self.parts else Part.KEY]).reshape(keys.shape)
        if shape.value_norm and shape.qk_norm is not None:
            plain = replace(shape.qk_norm, unit_offset=False)
            values = normalize(values, PartWeights(np.ones(shape.head_dim, np.float32)), plain)
        return keys, values

    def _heads(self, hidden: FloatArray, part: Part, norm: Part) -> FloatArray:
        """Return queries or keys, normalised and rotated: `[num_tokens, heads, head_dim]`."""
        shape, angles = self._shape, self._angles
        heads = linear(hidden, self.parts[part]).reshape(len(hidden), -1, shape.head_dim)
        if angles is not None and shape.rotates_first:
            heads = rotate(heads, angles)
        if shape.qk_norm is not None:
            heads = normalize_heads(heads, self.parts[norm], shape.qk_norm, shape.qk_norm_scope)
        return heads if angles is None or shape.rotates_first else rotate(heads, angles)
