"""AdaptedDecoder: the reference decoder with LoRA adapters, one decoder for each, over the same weights.

    step ──► adjacent sequences with the same adapter, as a separate step ──► the decoder of that adapter
                                                                                      ──► outputs, joined in order

A product with a matrix W that an adapter changes is W x + B ((scale A) x); see `operations.linear`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np

from quire.compute.adapters.folder import Adapter, LowRank
from quire.compute.adapters.places import OF_EXPERTS
from quire.compute.arrays import BoolArray, FloatArray, IntArray
from quire.compute.reference.decoder import ReferenceDecoder
from quire.compute.weights.decoder_weights import DecoderWeights, PartWeights
from quire.compute.worker.cache_engine import CacheEngine
from quire.compute.worker.model_runner import StepInputs, StepOutputs


class AdaptedDecoder:
    """Implements `ModelRunner` and `AdapterShelf`."""

    def __init__(self, base: ReferenceDecoder) -> None:
        self._base = base
        self._adapted: dict[str, ReferenceDecoder] = {}

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the model."""
        return self._base.vocab_size

    def run(self, inputs: StepInputs, cache: CacheEngine) -> StepOutputs:
        """Compute one step. Mutates the slots of its tokens in the cache."""
        if not inputs.adapters:
            return self._base.run(inputs, cache)
        found = []
        for digest, sequences in groupby(range(len(inputs.entries)), key=inputs.adapters.__getitem__):
            first, *others = sequences
            decoder = self._adapted[digest] if digest else self._base
            found.append(decoder.run(inputs.part(first, first + len(others) + 1), cache))
        return StepOutputs(
            np.concatenate([np.asarray(each.logits) for each in found]),
            np.concatenate([each.finite for each in found]),
            np.concatenate([each.finite_logits for each in found]),
            np.concatenate([each.states for each in found]),
        )

    def embed(self, token_ids: IntArray) -> FloatArray:
        """Return the rows of the embedding, which no adapter changes, for some tokens. Does not mutate."""
        return self._base.embed(token_ids)

    def logits_of(self, states: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Return the logits of hidden states, by the head, which no adapter changes. Does not mutate."""
        return self._base.logits_of(states)

    def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter for sequences to use, unless it is in memory. Mutates."""
        if adapter.digest in self._adapted:
            return
        weights = self._base.weights
        layers = [dict(parts) for parts in weights.layers]
        experts = [[dict(parts) for parts in of_layer] for of_layer in weights.experts]
        for each in adapter.read():
            parts = experts[each.layer][each.expert] if each.part in OF_EXPERTS else layers[each.layer]
            parts[each.part] = _changed(parts[each.part], each)
        adapted = DecoderWeights(weights.parts, tuple(layers), tuple(map(tuple, experts)))
        self._adapted[adapter.digest] = self._base.with_weights(adapted)

    def has_adapter(self, digest: str) -> bool:
        """Return whether an adapter is in memory. Does not mutate."""
        return digest in self._adapted

    def drop_adapter(self, digest: str) -> None:
        """Free the memory of an adapter. Mutates."""
        self._adapted.pop(digest, None)


def _changed(part: PartWeights, low_rank: LowRank) -> PartWeights:
    return replace(part, change=(low_rank.a * np.float32(low_rank.scale), low_rank.b))
