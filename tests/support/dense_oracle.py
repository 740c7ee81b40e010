"""A second reading of `DecoderSpec`: whole sequences, dense masked attention, float64, no paging.

It shares no code with the reference decoder, so that a mistake in paging, tiles or windows cannot
be in both. It follows the formulas, not the engine: one matrix product per line, the whole score
matrix at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.parts import STREAM_INS, STREAM_OUTS, NormKind, NormScope, NormSpec, Part
from quire.compute.models.recurrent import DeltaSpec, MambaSpec
from quire.compute.models.sublayers import Activation, ExpertsSpec, LatentSpec, Scoring

Array: TypeAlias = NDArray[np.float64]


class DenseOracle:
    """Computes the logits of every position of a sequence at once."""

    def __init__(self, spec: DecoderSpec, tensors: Mapping[str, NDArray[np.float32]]) -> None:
        self.spec = spec
        self.tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        self._keys_and_values: dict[int, tuple[Array, Array]] = {}  # of each layer, for those that share them

    def logits(self, tokens: Sequence[int]) -> Array:
        """Return `[num_tokens, vocab_size]`."""
        spec = self.spec
        x = self._matrix(Part.EMBEDDING)[list(tokens)] * spec.embedding_scale
        if spec.embedding_size is not None:
            x = x @ self._matrix(Part.EMBEDDING_IN).T
        if spec.learned_positions is not None:
            first = spec.learned_positions
            x = x + self._matrix(Part.POSITIONS)[first : first + len(tokens)]
        if spec.token_types:
            behind = np.arange(len(tokens)) > (
                list(tokens).index(spec.separator) if spec.separator in tokens else len(x)
            )
            x = x + self._matrix(Part.TOKEN_TYPES)[behind.astype(int)]
        x = self._norm(x, Part.EMBEDDING_NORM, 0)
        inputs = self._inputs(x, tokens)
        streams = self._opened(x) if spec.streams is not None else None
        entered = x
        for index, layer in enumerate(spec.layers):
            if streams is not None:
                x = (streams := self._predicted(streams, index))[0]
            rows = self._norm(entered if layer.skips_previous else x, Part.ATTENTION_NORM, index)
            entered = x
            update = self._attention(rows, layer, index) if layer.attends else np.zeros(1)
            x = x + spec.residual_scale * self._norm(update, Part.AFTER_ATTENTION_NORM, index)
            x = self._norm(self._with_laurel(x, rows, index), Part.JOINED_ATTENTION_NORM, index)
            if not spec.shared_norm:
                rows = self._norm(entered if spec.parallel else x, Part.MLP_NORM, index)
            if layer.sparse and spec.experts:
                update = self._experts_and_mlp(rows, x, index, spec.experts)
            else:
                update = self._mlp(rows, index, layer.gate_threshold) if layer.transforms else np.zeros(1)
            x = x + spec.residual_scale * self._norm(update, Part.AFTER_MLP_NORM, index)
            x = self._norm(x, Part.JOINED_MLP_NORM, index)
            if streams is not None:
                streams = self._corrected(streams, x, index)
                x = streams[0] * (self._weight(Part.STREAM_SCALE, index) if spec.streams and spec.streams.scales else 1)
            if spec.layer_inputs is not None:
                inner = self._activate(self._linear(x, Part.INPUT_GATE, index)) * inputs[:, index]
                update = self._norm(self._linear(inner, Part.INPUT_OUTPUT, index), Part.AFTER_INPUT_NORM, index)
                x = x + update
                if streams is not None:
                    streams[1:] += update
            if spec.layer_scale:
                x = x * float(self._weight(Part.LAYER_SCALE, index)[0])
        if streams is not None:
            x = self._merged(streams)
        x = self._norm(x, Part.FINAL_NORM, 0)
        if spec.embedding_size is not None:
            x = x @ self._matrix(Part.EMBEDDING_OUT).T
        logits = self._linear(x, Part.EMBEDDING if spec.tied_head else Part.HEAD, 0)
        return _cap(logits * spec.logit_scale, spec.logit_soft_cap)

    def _inputs(self, x: Array, tokens: Sequence[int]) -> Array:
        """Return the input of each layer, `[num_tokens, num_layers, size]`."""
        spec = self.spec.layer_inputs
        if spec is None:
            return np.zeros((len(x), len(self.spec.layers), 0))
        of_layers = (len(x), len(self.spec.layers), spec.size)
        projected = (spec.input_scale * x @ self._matrix(Part.LAYER_INPUTS).T).reshape(of_layers)
        table = self._matrix(Part.LAYER_EMBEDDING)
        rows = spec.embedding_scale * table[[token if token < len(table) else 0 for token in tokens]].reshape(of_layers)
        return spec.scale * (rows + self._norm(projected, Part.LAYER_INPUTS_NORM, 0))

    def _with_laurel(self, x: Array, rows: Array, index: int) -> Array:
        if not self.spec.laurel_rank:
            return x
        low = self._linear(self._linear(rows, Part.LAUREL_IN, index), Part.LAUREL_OUT, index)
        found: Array = (x + rows + self._norm(low, Part.LAUREL_NORM, index)) / math.sqrt(2)
        return found

    def _opened(self, x: Array) -> Array:
        """Return the streams, `[4, num_tokens, hidden_size]`."""
        return np.stack([x, *(_as_long(x @ self._matrix(part).T, x) for part in STREAM_INS)])

    def _predicted(self, streams: Array, index: int) -> Array:
        mixing = self._linear(self._modes(streams[0], index), Part.STREAM_PREDICT, index).reshape(-1, 4, 4)
        return streams + np.einsum("tji,ith->jth", mixing, streams)

    def _corrected(self, streams: Array, x: Array, index: int) -> Array:
        shares = 1 + self._linear(self._modes(x, index), Part.STREAM_CORRECT, index)
        return streams + shares.T[:, :, None] * (x - streams[0])

    def _merged(self, streams: Array) -> Array:
        others = [
            _as_long(x @ self._matrix(part).T, streams[0]) for x, part in zip(streams[1:], STREAM_OUTS, strict=True)
        ]
        return np.mean([streams[0], *others], axis=0, dtype=np.float64)

    def _modes(self, x: Array, index: int) -> Array:
        routed = self._linear(self._norm(x, Part.STREAM_NORM, index), Part.STREAM_ROUTER, index)
        return np.tanh(routed / self.spec.hidden_size)

    def _rows(self, part: Part) -> slice | NDArray[np.int64]:
        """Return which rows of its tensor are the part's."""
        shape, hidden = self.spec.attention, self.spec.hidden_size
        heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        sizes = {Part.QUERY: heads, Part.KEY: kv_heads, Part.VALUE: kv_heads, Part.OUTPUT: hidden}
        sizes |= {Part.GATE: self.spec.mlp.intermediate_size, Part.UP: self.spec.mlp.intermediate_size}
        if shape.latent is not None:
            sizes[Part.KEY_UP] = shape.num_heads * shape.latent.plain_dim
            sizes[Part.VALUE_UP] = shape.num_heads * shape.latent.value_dim
            sizes[Part.QUERY] = shape.num_heads * shape.latent.query_dim
            sizes[Part.OUTPUT] = hidden
        source = self.spec.sources[part]
        first = source.first_row
        if [each.stem for each in self.spec.sources.values()].count(source.stem) == 1:
            return slice(None) if source.repeats == 1 else np.arange(heads) // source.repeats
        if source.run:
            turns = np.arange(sizes[part] // source.run)[:, None] * source.period
            return (turns + np.arange(first, first + source.run)).ravel()
        return slice(first, first + sizes[part]) if part in sizes else slice(None)

    def _matrix(self, part: Part, layer: int = 0, expert: int = 0) -> Array:
        source = self.spec.sources[part]
        tensor = self.tensors[source.stem.format(layer=layer, expert=expert) + ".weight"]
        return (tensor.T if source.transposed else tensor)[self._rows(part)]

    def _linear(self, x: Array, part: Part, layer: int, expert: int = 0) -> Array:
        bias = self.tensors.get(self.spec.sources[part].stem.format(layer=layer, expert=expert) + ".bias")
        product = np.einsum("ti,oi->to", x, self._matrix(part, layer, expert))
        return product if bias is None else product + bias[self._rows(part)]

    def _norm(self, x: Array, part: Part, layer: int, norm: NormSpec | None = None) -> Array:
        norm = norm or self.spec.norm
        stem = self.spec.sources[part].stem.format(layer=layer) if part in self.spec.sources else "none"
        if stem + ".weight" not in self.tensors:
            return x
        scale = self.tensors[stem + ".weight"] + float(norm.unit_offset)
        if norm.kind is NormKind.LAYER:
            spread = np.sqrt(x.var(-1, keepdims=True) + norm.epsilon)
            return (x - x.mean(-1, keepdims=True)) / spread * scale + self.tensors.get(stem + ".bias", 0.0)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.epsilon) * scale

    def _weight(self, part: Part, layer: int) -> Array:
        return self.tensors[self.spec.sources[part].stem.format(layer=layer) + ".weight"]

    def _delta(self, x: Array, index: int, delta: DeltaSpec) -> Array:
        """Return what the states give: each a product of one matrix for every token, and a sum of outer products."""
        parts = (Part.DELTA_QUERY, Part.DELTA_KEY, Part.DELTA_VALUE)
        before = np.concatenate([self._linear(x, part, index) for part in parts], axis=1)
        padded = np.concatenate([np.zeros((delta.filter_width - 1, before.shape[1])), before])
        filters = self._weight(Part.DELTA_FILTER, index)[:, 0]
        columns = [np.correlate(padded[:, place], filters[place]) for place in range(before.shape[1])]
        filtered = np.stack(columns, axis=1)
        filtered = filtered / (1 + np.exp(-filtered))
        keys = delta.num_key_heads * delta.key_dim
        query, key, value = np.split(filtered, [keys, 2 * keys], axis=1)
        shared = delta.num_heads // delta.num_key_heads
        query, key = (each.reshape(len(x), -1, delta.key_dim).repeat(shared, axis=1) for each in (query, key))
        query, key = (each / np.sqrt((each * each).sum(-1, keepdims=True) + 1e-6) for each in (query, key))
        value = value.reshape(len(x), delta.num_heads, delta.value_dim)
        rate = delta.rate_scale / (1 + np.exp(-self._linear(x, Part.DELTA_RATE, index)))
        steps = np.log1p(
            np.exp(self._linear(x, Part.DELTA_DECAY, index) + self._weight(Part.DELTA_DECAY_OFFSET, index))
        )
        decay = np.exp(-np.exp(self._weight(Part.DELTA_LOG_DECAY, index)) * steps)
        outputs = np.zeros(value.shape)
        for head in range(delta.num_heads):
            state = np.zeros((delta.key_dim, delta.value_dim))
            for token in range(len(x)):
                k, b = key[token, head], rate[token, head]
                forgets = decay[token, head] * (np.eye(delta.key_dim) - b * np.outer(k, k))
                state = forgets @ state + b * np.outer(k, value[token, head])
                outputs[token, head] = query[token, head] @ state / math.sqrt(delta.key_dim)
        if delta.outputs_in_turns:
            order = [key * shared + turn for turn in range(shared) for key in range(delta.num_key_heads)]
            outputs = outputs[:, order]
        gate = self._linear(x, Part.DELTA_GATE, index)
        normed = self._norm(outputs, Part.DELTA_NORM, index, delta.norm).reshape(gate.shape)
        return self._linear(normed * gate / (1 + np.exp(-gate)), Part.DELTA_OUTPUT, index)

    def _mamba(self, x: Array, index: int, mamba: MambaSpec) -> Array:
        """Return what the sum over earlier tokens gives: each value, weighed by all decays since."""
        parts = (Part.MAMBA_VALUE, Part.MAMBA_KEY, Part.MAMBA_QUERY)
        before = np.concatenate([self._linear(x, part, index) for part in parts], axis=1)
        padded = np.concatenate([np.zeros((mamba.filter_width - 1, before.shape[1])), before])
        filters = self._weight(Part.MAMBA_FILTER, index)[:, 0]
        columns = [np.correlate(padded[:, place], filters[place]) for place in range(before.shape[1])]
        filtered = np.stack(columns, axis=1)
        if mamba.filter_bias:
            filtered = filtered + self.tensors[self.spec.sources[Part.MAMBA_FILTER].stem.format(layer=index) + ".bias"]
        filtered = filtered / (1 + np.exp(-filtered))
        values, keys = mamba.num_heads * mamba.value_dim, mamba.num_groups * mamba.key_dim
        value, key, query = np.split(filtered, [values, values + keys], axis=1)
        value = value.reshape(len(x), mamba.num_heads, mamba.value_dim)
        shared = mamba.num_heads // mamba.num_groups
        key, query = (each.reshape(len(x), -1, mamba.key_dim).repeat(shared, axis=1) for each in (key, query))
        offset = self._weight(Part.MAMBA_STEP_OFFSET, index)
        steps = np.log1p(np.exp(self._linear(x, Part.MAMBA_STEP, index) + offset))
        speeds = np.cumsum(np.exp(self._weight(Part.MAMBA_LOG_DECAY, index)) * steps, axis=0)
        since = speeds[:, None] - speeds[None]  # of query and key tokens
        weights = np.where(np.tri(len(x), dtype=bool)[..., None], np.exp(-np.maximum(since, 0.0)), 0.0)
        scores = np.einsum("qhd,khd->qkh", query, key) * weights * steps[None]
        outputs = np.einsum("qkh,khv->qhv", scores, value)
        outputs += self._weight(Part.MAMBA_SKIP, index)[:, None] * value
        gate = self._linear(x, Part.MAMBA_GATE, index)
        gated = (outputs.reshape(gate.shape) * gate / (1 + np.exp(-gate))).reshape(len(x), mamba.num_groups, -1)
        normed = gated / np.sqrt((gated * gated).mean(-1, keepdims=True) + mamba.norm.epsilon)
        return self._linear(normed.reshape(gate.shape) * self._weight(Part.MAMBA_NORM, index), Part.MAMBA_OUTPUT, index)

    def _convolution(self, x: Array, index: int, width: int) -> Array:
        inputs = self._linear(x, Part.CONVOLUTION_GATE, index) * self._linear(x, Part.CONVOLUTION_VALUE, index)
        filters = self._weight(Part.CONVOLUTION_FILTER, index)[:, 0]
        padded = np.concatenate([np.zeros((width - 1, inputs.shape[1])), inputs])
        columns = [np.correlate(padded[:, place], filters[place]) for place in range(inputs.shape[1])]
        gated = self._linear(x, Part.CONVOLUTION_OUTPUT_GATE, index) * np.stack(columns, axis=1)
        return self._linear(gated, Part.CONVOLUTION_OUTPUT, index)

    def _attention(self, x: Array, layer: LayerSpec, index: int) -> Array:
        shape = self.spec.attention_of(layer)
        if layer.recurrent and self.spec.delta is not None:
            return self._delta(x, index, self.spec.delta)
        if layer.recurrent and self.spec.mamba is not None:
            return self._mamba(x, index, self.spec.mamba)
        if layer.recurrent and self.spec.convolution is not None:
            return self._convolution(x, index, self.spec.convolution.filter_width)
        if shape.latent is not None:
            query, key, value = self._of_latents(x, layer, index, shape.latent)
        else:
            query = self._heads(x, layer, index, (Part.QUERY, Part.QUERY_NORM))
            if layer.rope is not None:
                turns = np.floor((np.arange(len(x)) + layer.rope.growth_offset) / layer.rope.growth_length)
                query *= 1 + layer.rope.query_growth * np.log1p(turns)[:, None, None]
            if layer.keys_of is None:
                self._keys_and_values[index] = self._of_tokens(x, layer, index)
            key, value = self._keys_and_values[index if layer.keys_of is None else layer.keys_of]
            group = shape.num_heads // shape.num_kv_heads
            key, value = key.repeat(group, axis=1), value.repeat(group, axis=1)
        scores = np.einsum("qhd,khd->hqk", query, key) * shape.scale
        distance = np.arange(len(x))[:, None] - np.arange(len(x))
        if shape.distance_bias:
            starts = [*range(1, 9), 12, 16, 23, 32, 46, 64, 91]  # of the buckets after the first one
            buckets = np.searchsorted(starts, np.abs(distance), side="right") + 16 * (distance < 0)
            scores = scores + self._matrix(Part.DISTANCE_BIAS)[buckets].transpose(2, 0, 1)
        scores = _cap(scores, shape.score_soft_cap)
        distance = np.abs(distance) if shape.bidirectional else distance
        hidden = (distance < 0) | (distance >= (layer.window or len(x)))
        if shape.chunked and layer.window is not None:
            chunks = np.repeat(np.arange(len(x)), layer.window)[: len(x)]
            hidden = (distance < 0) | (chunks[:, None] != chunks)
        scores[:, hidden] = -np.inf
        if shape.sinks:
            sinks = self.tensors[self.spec.sources[Part.SINKS].stem.format(layer=index) + ".weight"]
            scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], axis=-1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights[..., : len(x)], value).reshape(len(x), -1)
        if shape.gated:
            mixed = mixed / (1 + np.exp(-self._linear(x, Part.ATTENTION_GATE, index)))
        return self._linear(mixed, Part.OUTPUT, index)

    def _of_latents(self, x: Array, layer: LayerSpec, index: int, latent: LatentSpec) -> tuple[Array, Array, Array]:
        """Return what the definition says: queries, keys and values of each head, the latter two made of latents."""
        rows, heads, plain = x, self.spec.attention.num_heads, latent.plain_dim
        if latent.query_rank is not None:
            rows = self._norm(self._linear(x, Part.QUERY_DOWN, index), Part.QUERY_DOWN_NORM, index, latent.norm)
        query = self._linear(rows, Part.QUERY, index).reshape(len(x), heads, -1)
        both = self._linear(x, Part.LATENT, index)
        normed = self._norm(both[:, : latent.rank], Part.LATENT_NORM, index, latent.norm)
        key = self._linear(normed, Part.KEY_UP, index).reshape(len(x), heads, -1)
        value = self._linear(normed, Part.VALUE_UP, index).reshape(len(x), heads, -1)
        is_paired = self.spec.sources[Part.QUERY].adjacent is not None
        turned = _turned(both[:, None, latent.rank :], layer, is_paired).repeat(heads, axis=1)
        query = np.concatenate([query[..., :plain], _turned(query[..., plain:], layer, is_paired)], axis=-1)
        return query, np.concatenate([key, turned], axis=-1), value

    def _of_tokens(self, x: Array, layer: LayerSpec, index: int) -> tuple[Array, Array]:
        """Return keys and values, `[num_tokens, heads, numbers]`."""
        key = self._heads(x, layer, index, (Part.KEY, Part.KEY_NORM))
        value = self._linear(x, Part.KEY if layer.keys_are_values else Part.VALUE, index).reshape(key.shape)
        norm = self.spec.attention.qk_norm
        if self.spec.attention.value_norm and norm is not None:
            value = value / np.sqrt((value * value).mean(-1, keepdims=True) + norm.epsilon)
        return key, value

    def _heads(self, x: Array, layer: LayerSpec, index: int, parts: tuple[Part, Part]) -> Array:
        shape = self.spec.attention_of(layer)
        heads = self._linear(x, parts[0], index)
        if shape.qk_norm is not None and shape.qk_norm_scope is NormScope.ALL_HEADS:
            heads = self._norm(heads, parts[1], index, shape.qk_norm)
        heads = heads.reshape(len(x), -1, shape.head_dim)
        is_paired = self.spec.sources[parts[0]].adjacent is not None
        if shape.rotates_first:
            return self._norm(_turned(heads, layer, is_paired), parts[1], index, shape.qk_norm)
        if shape.qk_norm is not None and shape.qk_norm_scope is not NormScope.ALL_HEADS:
            heads = self._norm(heads, parts[1], index, shape.qk_norm)
        return _turned(heads, layer, is_paired)

    def _mlp(self, x: Array, layer: int, threshold: float | None) -> Array:
        up = self._linear(x, Part.UP, layer)
        if self.spec.mlp.gated:
            gate = self._linear(x, Part.GATE, layer)
            if threshold is not None:
                gate = (gate - gate.mean(-1, keepdims=True) - threshold * gate.std(-1, keepdims=True)).clip(min=0)
            return self._linear(self._gate(gate, up), Part.DOWN, layer)
        if self.spec.mlp.activation is Activation.XIELU:
            p, n, s, limit = self._weight(Part.XIELU, layer)
            below = (s + np.log(1 + np.exp(n))) * (np.exp(np.minimum(up, limit)) - 1 - up)
            return self._linear(s * up + np.where(up > 0, np.log(1 + np.exp(p)) * up**2, below), Part.DOWN, layer)
        return self._linear(self._activate(up), Part.DOWN, layer)

    def _experts_and_mlp(self, x: Array, residual: Array, layer: int, spec: ExpertsSpec) -> Array:
        """Return the sum of both; `residual` goes through other norms than `x` if the experts have their own."""
        routed = self._norm(residual, Part.ROUTER_NORM, layer) if spec.own_norms else x
        given = self._norm(residual, Part.EXPERTS_NORM, layer) if spec.own_norms else x
        output = self._norm(self._experts(routed, given, layer, spec), Part.AFTER_EXPERTS_NORM, layer)
        if not spec.shared_size:
            return output
        return output + self._norm(self._shared(x, layer), Part.AFTER_SHARED_NORM, layer)

    def _experts(self, routed: Array, x: Array, layer: int, spec: ExpertsSpec) -> Array:
        if spec.scoring is Scoring.SPARSE_MIXER:
            return self._mixed_experts(x, layer, spec)
        factors = self._weight(Part.EXPERT_FACTORS, layer) if spec.factors else np.ones(spec.num_experts)
        scores = np.exp(spec.score_scale * self._linear(routed, Part.ROUTER, layer))
        scores = scores / (1 + scores if spec.scoring is Scoring.SIGMOID else scores.sum(-1, keepdims=True))
        offset = np.zeros(spec.num_experts)
        if spec.offset:
            offset = self.tensors[self.spec.sources[Part.ROUTER_OFFSET].stem.format(layer=layer) + ".weight"]
        output = np.zeros_like(x)
        for token, row in enumerate(scores):
            by = row + offset
            groups: list[list[int]] = np.arange(len(row)).reshape(spec.num_groups, -1).tolist()
            groups.sort(key=lambda group: -sum(sorted(by[group])[-spec.group_best :]))
            allowed = sorted(expert for group in groups[: spec.groups_per_token] for expert in group)
            best = sorted(allowed, key=lambda expert: -by[expert])[: spec.experts_per_token]
            total = row[best].sum() if spec.normalize_weights else 1.0
            for expert in best:
                weight = spec.scale * factors[expert] * row[expert] / total
                given, factor = (weight, 1.0) if spec.weighs_inputs else (1.0, weight)
                output[token] += factor * self._expert(given * x[token : token + 1], layer, expert)[0]
        return output

    def _mixed_experts(self, x: Array, layer: int, spec: ExpertsSpec) -> Array:
        output = np.zeros_like(x)
        for token, scores in enumerate(self._linear(x, Part.ROUTER, layer).tolist()):
            left = dict(enumerate(scores))
            for _ in range(spec.experts_per_token):
                best = max(left, key=lambda expert: left[expert])
                top = left[best]
                near = [score for score in left.values() if top - score <= spec.margin * max(top, abs(score))]
                weight = spec.scale / sum(np.exp(score - top) for score in near)
                output[token] += weight * self._expert(x[token : token + 1], layer, best)[0]
                del left[best]
        return output

    def _shared(self, x: Array, layer: int) -> Array:
        up = self._linear(x, Part.SHARED_UP, layer)
        gated = self.spec.mlp.gated
        inner = self._gate(self._linear(x, Part.SHARED_GATE, layer), up) if gated else self._activate(up)
        output = self._linear(inner, Part.SHARED_DOWN, layer)
        if self.spec.experts is None or not self.spec.experts.shared_router:
            return output
        return output / (1 + np.exp(-self._linear(x, Part.SHARED_ROUTER, layer)))

    def _expert(self, x: Array, layer: int, expert: int) -> Array:
        up = self._linear(x, Part.EXPERT_UP, layer, expert)
        if self.spec.mlp.gated:
            up = self._gate(self._linear(x, Part.EXPERT_GATE, layer, expert), up)
        else:
            up = self._activate(up)
        return self._linear(up, Part.EXPERT_DOWN, layer, expert)

    def _gate(self, gate: Array, up: Array) -> Array:
        if self.spec.mlp.activation is Activation.CLAMPED_SWIGLU:
            gate, up = gate.clip(max=7), up.clip(-7, 7)
            return (up + 1) * gate / (1 + np.exp(-1.702 * gate))
        return self._activate(gate) * up

    def _activate(self, x: Array) -> Array:
        kind = self.spec.mlp.activation
        if kind is Activation.RELU:
            return x.clip(min=0)
        if kind is Activation.RELU_SQUARED:
            return np.where(x > 0, x * x, 0.0)
        if kind is Activation.SILU:
            return x / (1 + np.exp(-x))
        if kind is Activation.GELU:
            return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _turned(heads: Array, layer: LayerSpec, is_paired: bool) -> Array:
    """Rotate the first numbers of each head, `[num_tokens, heads, numbers]`."""
    if layer.rope is None:
        return heads
    half = layer.rope.rotary_dim // 2
    angle = np.arange(len(heads))[:, None] * np.array(layer.rope.inverse_frequencies)
    turned = heads.copy()
    turn = layer.rope.scale * np.exp(1j * angle)[:, None]
    first, second = slice(half), slice(half, 2 * half)
    if is_paired:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    pairs = (heads[..., first] + 1j * heads[..., second]) * turn
    turned[..., first], turned[..., second] = pairs.real, pairs.imag
    return turned


def _as_long(x: Array, other: Array) -> Array:
    """Return the rows of x, scaled to the mean squares of those of the other."""
    squares = [(each * each).mean(-1, keepdims=True) for each in (other, x)]
    return x * np.sqrt(squares[0] / np.maximum(squares[1], 1e-5))


def _cap(x: Array, cap: float | None) -> Array:
    return x if cap is None else cap * np.tanh(x / cap)
