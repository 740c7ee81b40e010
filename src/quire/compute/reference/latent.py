"""Attention of a layer with latents (MLA): one vector per token is the key and the value of all heads.

    query of a head ─┬─ plain numbers ─ × its rows of KEY_UP ─┐
                     └─ numbers that rotate ──────────────────┴─► attention to latents ─ × its rows of VALUE_UP ─►

A score of a query q and a latent c is q · (KEY_UP c), which is (KEY_UPᵀ q) · c. So a token's keys and values are never
computed, and memory holds latents only. All heads read the same latent, as in attention with one key-value head.
"""

from __future__ import annotations

import numpy as np

from quire.compute.arrays import FloatArray
from quire.compute.models.parts import Part
from quire.compute.models.sublayers import AttentionSpec, LatentSpec
from quire.compute.reference.attention import AttentionRule, paged_attention, write_kv
from quire.compute.reference.operations import Angles, linear, normalize, rotate
from quire.compute.weights.decoder_weights import Parts, PartWeights
from quire.compute.worker.cache_engine import LayerCache
from quire.compute.worker.model_runner import StepInputs


class LatentAttention:
    """The attention sublayer of one layer."""

    def __init__(
        self,
        attention: AttentionSpec,
        latent: LatentSpec,
        window: int | None,
        parts: Parts,
        angles: Angles | None,
    ) -> None:
        self.parts = parts
        self._num_heads = attention.num_heads
        self._latent = latent
        self._angles = angles
        self._rule = AttentionRule(attention.scale, window, attention.score_soft_cap)

    def attend(self, hidden: FloatArray, cache: LayerCache, inputs: StepInputs) -> FloatArray:
        """Store the step's latents and return the attention: `[num_tokens, hidden_size]`. Mutates."""
        keys = self._latents(hidden)
        write_kv(cache, inputs.slots[cache.group], keys, keys[..., : self._latent.rank])
        mixed = paged_attention(self._queries(hidden), cache, inputs, self._rule)
        values = self._by_head(mixed, Part.VALUE_UP)
        return linear(values.reshape(len(hidden), -1), self.parts[Part.OUTPUT])

    def _latents(self, hidden: FloatArray) -> FloatArray:
        """Return the latents of the tokens, normalised and rotated: `[num_tokens, 1, rank + rope_dim]`."""
        rank, numbers = self._latent.rank, linear(hidden, self.parts[Part.LATENT])[:, None]
        normed = normalize(numbers[..., :rank], self.parts[Part.LATENT_NORM], self._latent.norm)
        return np.concatenate([normed, self._rotated(numbers[..., rank:])], axis=-1)

    def _queries(self, hidden: FloatArray) -> FloatArray:
        """Return the queries in the space of latents: `[num_tokens, num_heads, rank + rope_dim]`."""
        if self._latent.query_rank is not None:
            rows = linear(hidden, self.parts[Part.QUERY_DOWN])
            hidden = normalize(rows, self.parts[Part.QUERY_DOWN_NORM], self._latent.norm)
        heads = linear(hidden, self.parts[Part.QUERY]).reshape(len(hidden), self._num_heads, -1)
        plain, rest = np.split(heads, [self._latent.plain_dim], axis=-1)
        return np.concatenate([self._by_head(plain, Part.KEY_UP, transposed=True), self._rotated(rest)], axis=-1)

    def _rotated(self, heads: FloatArray) -> FloatArray:
        return heads if self._angles is None else rotate(heads, self._angles)

    def _by_head(self, heads: FloatArray, part: Part, *, transposed: bool = False) -> FloatArray:
        """Return the product of each head's numbers, `[num_tokens, num_heads, in]`, and its rows of a part."""
        weight, change = self.parts[part].weight, self.parts[part].change
        if change is not None:
            weight = weight + np.einsum("or,ri->oi", change[1], change[0])
        matrices = weight.reshape(self._num_heads, -1, self._latent.rank)
        if transposed:
            matrices = matrices.swapaxes(1, 2)
        products = [linear(heads[:, head], PartWeights(matrix)) for head, matrix in enumerate(matrices)]
        return np.stack(products, axis=1)
