"""The centre of the keys of each layer, which is taken off them before they are rounded to 4 bits.

The keys of a head have much in common. Taking one vector off all of them changes each score of a query by the same
number, and so changes no softmax; but 4 bits then hold only the differences. A cap on scores breaks that: models with
one keep their keys as they are.

The centre is the mean key of a fixed text of token ids, which the model reads once when it is loaded. Any text will do,
because what keys have in common hardly depends on tokens. A model computes the same bits for the same tokens, so the
centre does not depend on threads or on how the text is cut. Rotary positions turn keys: each key is turned to all
positions of a longer text, and the mean of these is taken. Pairs that turn fast then have a centre near zero. Without
this, the centre would fit short texts only, and make long ones worse than none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from quire.compute.arrays import FloatArray
from quire.compute.models.base import DecoderSpec, RopeSpec
from quire.compute.worker.cache_engine import CacheEngine
from quire.compute.worker.model_runner import ModelRunner, StepInputs
from quire.core.kv_spec import KVCacheSpec

NUM_TOKENS: Final = 256
CHUNK: Final = 64
BLOCK: Final = 16
STRIDE: Final = 7919
"""Token ids are multiples of this prime, within the vocabulary."""
NUM_POSITIONS: Final = 2048
"""The length of the texts that the centre is meant for."""


def key_centres(
    spec: DecoderSpec,
    kv_spec: KVCacheSpec,
    runner: ModelRunner[CacheEngine],
    read_keys: Callable[[CacheEngine, int], FloatArray],
) -> list[FloatArray] | None:
    """Return the centre of the keys of each layer, `[num_kv_heads, head_dim]`; None if the model caps scores.

    `kv_spec`: memory of float32 with blocks of `BLOCK` tokens, as the runner takes it. `read_keys` returns the keys of
    a layer in it by slot, `[num_slots, num_kv_heads, head_dim]`.
    """
    if spec.attention.score_soft_cap is not None:
        return None
    count = min(NUM_TOKENS, spec.context_length)
    num_blocks, num_groups = -(-count // BLOCK), len(kv_spec.groups)
    cache = CacheEngine(kv_spec, num_blocks=num_blocks * num_groups)
    cache.allocate()
    for first in range(0, count, CHUNK):
        chunk = range(first, min(count, first + CHUNK))
        runner.run(_inputs(spec.vocab_size, num_groups, num_blocks, chunk), cache)
    centres = []
    for index, layer in enumerate(spec.layers):
        group = next(number for number, each in enumerate(kv_spec.groups) if index in each.layers)
        first = group * num_blocks * BLOCK
        mean = _mean(read_keys(cache, index)[first : first + count], layer.rope)
        centres.append(np.where(np.isfinite(mean), mean, np.float32(0)))
    return centres


def _inputs(vocab_size: int, num_groups: int, num_blocks: int, chunk: range) -> StepInputs:
    """Return the step that computes a chunk of the text; each group has blocks of its own, in order."""
    positions = np.array(chunk, np.int64)
    starts = [group * num_blocks for group in range(num_groups)]
    return StepInputs(
        entries=(0,),
        query_starts=np.array([0, len(chunk)], np.int64),
        token_ids=positions * STRIDE % vocab_size,
        positions=positions,
        slots=tuple(positions + start * BLOCK for start in starts),
        block_tables=tuple(np.arange(start, start + num_blocks, dtype=np.int64)[None] for start in starts),
        logit_starts=np.zeros(2, np.int64),
        logit_indices=np.zeros(0, np.int64),
        rows=np.zeros(1, np.int64),
    )


def _mean(keys: FloatArray, rope: RopeSpec | None) -> FloatArray:
    """Return the mean of keys at positions 0, 1, … `[num_tokens, num_kv_heads, head_dim]`, turned to all positions."""
    mean: FloatArray = keys.mean(axis=0)
    if rope is not None:
        half = rope.rotary_dim // 2
        pairs = keys[..., :half] + 1j * keys[..., half : 2 * half]
        turns = np.exp(1j * np.arange(NUM_POSITIONS)[:, None] * np.array(rope.inverse_frequencies))
        turned = np.mean(pairs / turns[: len(keys), None], axis=0) * turns.mean(axis=0)
        mean[..., :half], mean[..., half : 2 * half] = turned.real, turned.imag
    return mean
