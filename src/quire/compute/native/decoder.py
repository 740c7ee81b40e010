"""NativeDecoder: the compiled decoder as a `ModelRunner`. One call per step, which releases the GIL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from quire._native import Adapter as NativeAdapter
from quire._native import Decoder
from quire.compute.adapters.folder import Adapter, LowRank
from quire.compute.adapters.places import BY_HEAD
from quire.compute.arrays import BoolArray, FloatArray, IntArray, Logits
from quire.compute.models.base import DecoderSpec
from quire.compute.models.distances import biases_by_distance
from quire.compute.models.parts import STREAM_INS, STREAM_OUTS, Part
from quire.compute.models.recurrent import MambaSpec
from quire.compute.weights.bfloat16 import narrowed, widened
from quire.compute.weights.decoder_weights import Parts, PartWeights, WeightReader
from quire.compute.worker.cache_engine import CacheArray, CacheEngine
from quire.compute.worker.key_centres import key_centres, num_blocks
from quire.compute.worker.model_runner import NO_INDICES, StepInputs, StepOutputs
from quire.core.kv_spec import KVCacheSpec

PANEL_WIDTH = 16
VECTORS = frozenset(
    {Part.SINKS, Part.ROUTER_OFFSET, Part.EXPERT_FACTORS, Part.STREAM_PREDICT, Part.STREAM_CORRECT, Part.STREAM_SCALE}
)
NORMS = frozenset(
    {
        Part.ATTENTION_NORM,
        Part.AFTER_ATTENTION_NORM,
        Part.JOINED_ATTENTION_NORM,
        Part.MLP_NORM,
        Part.AFTER_MLP_NORM,
        Part.JOINED_MLP_NORM,
        Part.QUERY_NORM,
        Part.KEY_NORM,
        Part.EMBEDDING_NORM,
        Part.TOKEN_NORM,
        Part.STATE_NORM,
        Part.FINAL_NORM,
        Part.QUERY_DOWN_NORM,
        Part.LATENT_NORM,
        Part.DELTA_NORM,
        Part.MAMBA_NORM,
        Part.LAYER_INPUTS_NORM,
        Part.AFTER_INPUT_NORM,
        Part.STREAM_NORM,
        Part.LAUREL_NORM,
        Part.ROUTER_NORM,
        Part.EXPERTS_NORM,
        Part.AFTER_EXPERTS_NORM,
        Part.AFTER_SHARED_NORM,
    }
)
NOT_MATRICES: Final = frozenset(
    {Part.DELTA_FILTER, Part.DELTA_LOG_DECAY, Part.DELTA_DECAY_OFFSET}
    | {Part.MAMBA_FILTER, Part.MAMBA_LOG_DECAY, Part.MAMBA_STEP_OFFSET, Part.MAMBA_SKIP}
)
"""The weights of a recurrent layer that are not matrices or norms."""


class NativeDecoder:
    """A decoder in the compiled core; implements `ModelRunner`.

    The constructor packs the weights, layer by layer, and frees each layer's unpacked weights afterwards. Only the
    rows of an embedding that is not also the head stay unpacked.
    """

    def __init__(self, spec: DecoderSpec, decoder: Decoder, weights: WeightReader) -> None:
        self.spec = spec
        self._decoder = decoder
        self._cache: list[tuple[CacheArray, CacheArray]] = []
        self._logits = np.zeros((0, -(-spec.vocab_size // PANEL_WIDTH) * PANEL_WIDTH), np.float32)
        self._dtype = weights.dtype
        self._adapters: dict[str, NativeAdapter] = {}
        self._codes = {part: weights.codes_of(part) for part in Part}
        self._set_model(weights.model())
        for layer in range(len(spec.layers)):
            self._set_parts(weights.layer(layer), layer)
            for expert, parts in enumerate(weights.experts(layer)):
                self._set_parts(parts, layer, expert)
            weights.release()

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the model."""
        return self.spec.vocab_size

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weights in memory."""
        return self._decoder.weight_bytes()

    @property
    def num_unprepared(self) -> int:
        """The number of pieces of memory still to prepare; see `prepare_memory`."""
        return self._decoder.num_unprepared()

    def run(self, inputs: StepInputs, cache: CacheEngine, layers: tuple[int, int] = (0, -1)) -> StepOutputs:
        """Compute one step. Mutates the slots of its tokens in the cache; the logits are valid until the next step.

        `layers`: a range of them, after a call for those before it; only the call for the last one has outputs, and
        each has hidden states.
        """
        self._follow(cache)
        num_logits = len(inputs.logit_indices)
        logits = self._logits_for(num_logits)
        finite_logits = np.zeros(num_logits, np.bool_)
        finite = np.zeros(len(inputs.token_ids), np.bool_)
        size = self.spec.hidden_size
        states = np.zeros((len(inputs.state_indices), -(-size // PANEL_WIDTH) * PANEL_WIDTH), np.float32)
        self._decoder.run(
            inputs.query_starts,
            inputs.token_ids,
            inputs.positions,
            inputs.logit_indices,
            inputs.slots,
            inputs.block_tables,
            logits,
            finite_logits,
            finite,
            inputs.state_indices,
            states,
            *self._adapters_of(inputs),
            inputs.given,
            inputs.given_rows,
            inputs.coordinates,
            inputs.ends_seen,
            layers=layers,
        )
        return StepOutputs(logits[:num_logits], finite, finite_logits, states[:, :size])

    def embed(self, token_ids: IntArray) -> FloatArray:
        """Return the rows of the embedding for some tokens. Does not mutate."""
        rows = np.zeros((len(token_ids), self.spec.embedding_size or self.spec.hidden_size), np.float32)
        self._decoder.embed(token_ids, rows)
        return rows

    def logits_of(self, states: FloatArray) -> tuple[Logits, BoolArray]:
        """Return the logits of hidden states, valid until the next call, and which rows are finite."""
        logits = self._logits_for(len(states))
        finite = np.zeros(len(states), np.bool_)
        self._decoder.project(np.ascontiguousarray(states), logits, finite)
        return logits[: len(states)], finite

    def _logits_for(self, count: int) -> FloatArray:
        """Return memory for the logits of a step, at least this many rows."""
        if count > len(self._logits):
            self._logits = np.zeros((count, self._logits.shape[1]), np.float32)
        return self._logits

    def load_adapter(self, adapter: Adapter) -> None:
        """Load and pack an adapter for sequences to use, unless it is in memory. Mutates."""
        if adapter.digest in self._adapters:
            return
        packed = NativeAdapter(self._decoder)
        for each in adapter.read():
            heads = self._heads_of(each) if each.part in BY_HEAD else [(each.expert, each.a, each.b)]
            for index, *matrices in heads:
                a, b = (narrowed(rows) if self._dtype == "bfloat16" else rows for rows in matrices)
                packed.set(each.part.value, each.layer, index, a, b, each.scale)
        self._adapters[adapter.digest] = packed

    def _heads_of(self, low_rank: LowRank) -> Iterator[tuple[int, FloatArray, FloatArray]]:
        """Yield A and B of each head; a matrix that all heads share is yielded once, then an empty one instead.

        Queries are multiplied by the transpose of KEY_UP, so there A and B swap roles: B per head, then the shared A.
        """
        of_heads = low_rank.b.reshape(self.spec.attention.num_heads, -1, low_rank.b.shape[1])
        nothing = low_rank.a[:0]
        for head, b in enumerate(of_heads):
            if low_rank.part is Part.KEY_UP:
                yield head, np.ascontiguousarray(b.T), nothing if head else np.ascontiguousarray(low_rank.a.T)
            else:
                yield head, nothing if head else low_rank.a, b

    def has_adapter(self, digest: str) -> bool:
        """Whether an adapter is in memory."""
        return digest in self._adapters

    def drop_adapter(self, digest: str) -> None:
        """Free the memory of an adapter. Mutates."""
        self._adapters.pop(digest, None)

    def _adapters_of(self, inputs: StepInputs) -> tuple[list[NativeAdapter], IntArray]:
        """Return the adapters of a step, and the index of each sequence's adapter, -1 for none."""
        if not inputs.adapters:
            return [], NO_INDICES
        digests = [digest for digest in dict.fromkeys(inputs.adapters) if digest]
        index = {digest: place for place, digest in enumerate(digests)}
        of_sequences = np.array([index.get(digest, -1) for digest in inputs.adapters], np.int64)
        return [self._adapters[digest] for digest in digests], of_sequences

    def prepare_memory(self, cache: CacheEngine, touches_cache: bool) -> None:
        """Prepare the memory of activations, weights (in huge pages) and perhaps the cache between steps. Mutates."""
        caches = [cache] if cache.draft is None else [cache, cache.draft]
        arrays = [array for each in caches for pair in each.places() for array in pair] if touches_cache else []
        self._decoder.prepare_memory(arrays)

    def centre_keys(self, kv_spec: KVCacheSpec) -> None:
        """Subtract the centre of the keys from now on; see `quire.compute.worker.key_centres`. Mutates."""
        memory = CacheEngine(kv_spec, num_blocks=num_blocks(self.spec, kv_spec))
        for layer, centre in key_centres(self.spec, memory, self, self._read_keys).items():
            self._decoder.set_key_centre(layer, np.ascontiguousarray(centre.ravel(), np.float32))
        self._cache = []  # frees the temporary memory

    def _read_keys(self, cache: CacheEngine, layer: int) -> FloatArray:
        """Return the keys of a layer by slot, from float32 memory with blocks of 16 (see kernels.h)."""
        attention = self.spec.attention_of(self.spec.layers[layer])
        num_heads, head_dim = attention.num_kv_heads, attention.head_dim
        heads = cache.layer(layer).keys.reshape(cache.num_blocks, num_heads, -1)[..., : PANEL_WIDTH * head_dim]
        by_dimension = heads.reshape(*heads.shape[:2], head_dim, PANEL_WIDTH)
        rows: FloatArray = by_dimension.transpose(0, 3, 1, 2).reshape(-1, num_heads, head_dim)
        return rows

    def _follow(self, cache: CacheEngine) -> None:
        """Point the decoder to the KV memory, if the memory has changed."""
        places = cache.places()
        if places is not self._cache:
            self._decoder.set_cache(places, cache.spec.dtype, cache.spec.block_size)
            self._cache = places

    def _set_model(self, parts: Parts) -> None:
        if self.spec.tied_head and self.spec.vocab_size:
            self._set_matrix(Part.EMBEDDING, parts[Part.EMBEDDING], -1)
        elif self.spec.vocab_size:
            embedding = parts[Part.EMBEDDING]
            self._decoder.set_embedding(np.ascontiguousarray(embedding.weight), blocks=embedding.blocks)
        if Part.LAYER_EMBEDDING in parts:
            of_layers = parts[Part.LAYER_EMBEDDING]
            self._decoder.set_layer_embedding(np.ascontiguousarray(of_layers.weight), blocks=of_layers.blocks)
        if Part.POSITIONS in parts:
            self._decoder.set_positions(_as_float32(parts[Part.POSITIONS].weight))
        if Part.TOKEN_TYPES in parts:
            rows = parts[Part.TOKEN_TYPES].weight[: 1 if self.spec.separator is None else 2]
            self._decoder.set_vector(Part.TOKEN_TYPES.value, -1, _as_float32(rows.ravel()))
        if Part.DISTANCE_BIAS in parts:
            biases = biases_by_distance(_as_float32(parts[Part.DISTANCE_BIAS].weight), self.spec.context_length)
            self._decoder.set_vector(Part.DISTANCE_BIAS.value, -1, biases.ravel())
        rest = {Part.EMBEDDING_IN, Part.EMBEDDING_NORM, Part.EMBEDDING_OUT, Part.FINAL_NORM, Part.HEAD}
        rest |= {Part.LAYER_INPUTS, Part.LAYER_INPUTS_NORM, Part.TOKEN_NORM, Part.STATE_NORM, *STREAM_INS, *STREAM_OUTS}
        self._set_parts({part: piece for part, piece in parts.items() if part in rest}, -1)

    def _set_parts(self, parts: Parts, layer: int, expert: int = -1) -> None:
        if Part.DELTA_FILTER in parts:
            self._set_delta(parts, layer)
        if self.spec.mamba is not None and Part.MAMBA_FILTER in parts:
            self._set_mamba(self.spec.mamba, parts, layer)
        for part, piece in parts.items():
            if part in NOT_MATRICES:
                continue
            if part is Part.CONVOLUTION_FILTER:
                self._decoder.set_convolution(layer, np.ascontiguousarray(piece.weight[:, 0].T))
                continue
            if part in VECTORS:
                self._decoder.set_vector(part.value, layer, np.ascontiguousarray(piece.weight.ravel()))
            elif part is Part.XIELU:
                self._decoder.set_vector(part.value, layer, xielu_numbers(piece.weight))
            elif part is Part.LAYER_SCALE:
                self._decoder.set_layer_scale(layer, float(piece.weight[0]))
            elif part in (Part.KEY_UP, Part.VALUE_UP):
                self._set_heads(part, piece, layer)
            elif part in NORMS:
                self._decoder.set_norm(part.value, layer, np.ascontiguousarray(piece.weight))
                if piece.bias is not None:
                    self._decoder.set_norm_bias(part.value, layer, np.ascontiguousarray(piece.bias))
            else:
                self._set_matrix(part, piece, layer, expert)
                if piece.bounds is not None:
                    self._decoder.set_bounds(part.value, layer, np.array(piece.bounds, np.float32))
                if piece.bias is not None:
                    self._decoder.set_bias(part.value, layer, expert, np.ascontiguousarray(piece.bias))

    def _set_delta(self, parts: Parts, layer: int) -> None:
        """Set the filter of a recurrent layer, and what decides how fast its states decay."""
        self._decoder.set_delta(
            layer,
            np.ascontiguousarray(parts[Part.DELTA_FILTER].weight[:, 0].T),
            np.ascontiguousarray(parts[Part.DELTA_DECAY_OFFSET].weight),
            np.exp(parts[Part.DELTA_LOG_DECAY].weight, dtype=np.float64),
        )

    def _set_mamba(self, spec: MambaSpec, parts: Parts, layer: int) -> None:
        """Set the small weights of a state-space layer; the compiled core has queries first, then keys and values."""
        values = spec.num_heads * spec.value_dim
        ends = [values, values + spec.num_groups * spec.key_dim]
        filters = parts[Part.MAMBA_FILTER]

        def turned(numbers: FloatArray) -> FloatArray:
            return np.concatenate(np.split(numbers, ends)[::-1])

        bias = np.zeros(0, np.float32) if filters.bias is None else turned(filters.bias)
        self._decoder.set_mamba(layer, bias, np.ascontiguousarray(parts[Part.MAMBA_SKIP].weight))
        self._decoder.set_delta(
            layer,
            np.ascontiguousarray(turned(filters.weight[:, 0]).T),
            np.ascontiguousarray(parts[Part.MAMBA_STEP_OFFSET].weight),
            np.exp(parts[Part.MAMBA_LOG_DECAY].weight, dtype=np.float64),
        )

    def _set_heads(self, part: Part, piece: PartWeights, layer: int) -> None:
        """Set the matrix of each head, [out, in]; queries are multiplied by the columns of KEY_UP."""
        heads = piece.weight.reshape(self.spec.attention.num_heads, -1, piece.weight.shape[1])
        for head, rows in enumerate(heads.swapaxes(1, 2) if part is Part.KEY_UP else heads):
            self._decoder.set_matrix(part.value, layer, head, np.ascontiguousarray(rows))

    def _set_matrix(self, part: Part, piece: PartWeights, layer: int, expert: int = -1) -> None:
        # An embedding reaches this line only if it is also the head.
        name = (Part.HEAD if part is Part.EMBEDDING else part).value
        rows = np.ascontiguousarray(piece.weight)
        self._decoder.set_matrix(name, layer, expert, rows, blocks=piece.blocks, codes=self._codes[part])


def xielu_numbers(stored: FloatArray) -> FloatArray:
    """Return the factors above and below 0, the slope and the limit, from the numbers of a checkpoint."""
    above, below, slope, limit = stored.tolist()
    return np.array([np.logaddexp(0, above), slope + np.logaddexp(0, below), slope, limit], np.float32)


def _as_float32(rows: np.ndarray) -> FloatArray:
    return widened(rows) if rows.dtype == np.uint16 else np.ascontiguousarray(rows, np.float32)
