"""The centre of the keys of each layer, which is subtracted before the keys are rounded to 4 bits.

The keys of a head have much in common. Subtracting one vector from all of them changes each score of a query by the
same number, so no softmax changes; but 4 bits then hold only the differences. This fails with a cap on scores, or with
a sink, whose score does not change with the others: models with either keep their keys unchanged.

The centre is the mean key of a fixed text of token ids, which the model reads once when it is loaded. Any text will do,
because the part that keys have in common hardly depends on tokens. A model computes the same bits for the same tokens,
so the centre does not depend on threads or on how the text is cut. Rotary positions rotate keys: the centre is the mean
over each key rotated to all positions of a longer text. Pairs that rotate fast then have a centre near zero. Without
this, the centre would fit short texts only, and would make long texts worse than no centre.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import numpy as np

from quire.compute.arrays import FloatArray
from quire.compute.models.base import DecoderSpec
from quire.compute.models.sublayers import RopeSpec
from quire.compute.worker.kv_memory import KVMemory
from quire.compute.worker.model_runner import ModelRunner, StepInputs
from quire.core.kv_spec import KVCacheSpec

Memory = TypeVar("Memory", bound=KVMemory)

NUM_TOKENS: Final = 256
CHUNK: Final = 64
BLOCK: Final = 16
STRIDE: Final = 7919
"""Token ids are multiples of this prime, within the vocabulary."""
NUM_POSITIONS: Final = 2048
"""The length of text that the centre is made for."""


def num_blocks(spec: DecoderSpec, kv_spec: KVCacheSpec) -> int:
    """Return the number of blocks for the text, of `BLOCK` tokens each."""
    return -(-_num_tokens(spec) // BLOCK) * len(kv_spec.groups)


def key_centres(
    spec: DecoderSpec,
    memory: Memory,
    runner: ModelRunner[Memory],
    read_keys: Callable[[Memory, int], FloatArray],
) -> Mapping[int, FloatArray]:
    """Return the centre of the keys of each layer that stores some, `[num_kv_heads, head_dim]`.

    Returns nothing if a centre would change a softmax.

    `memory`: `num_blocks` of `BLOCK` tokens, in float32; it is allocated and released here. `read_keys` returns the
    keys of a layer in it by slot, `[num_slots, num_kv_heads, head_dim]`.
    """
    if spec.attention.score_soft_cap is not None or spec.attention.sinks:
        return {}
    count, groups = _num_tokens(spec), memory.spec.groups
    blocks_each = num_blocks(spec, memory.spec) // len(groups)
    memory.allocate()
    for first in range(0, count, CHUNK):
        chunk = range(first, min(count, first + CHUNK))
        runner.run(_inputs(spec.vocab_size, len(groups), blocks_each, chunk), memory)
    centres = {}
    for number, group in enumerate(groups):
        first = number * blocks_each * BLOCK
        for layer in group.layers:
            mean = _mean(read_keys(memory, layer)[first : first + count], spec.layers[layer].rope)
            centres[layer] = np.where(np.isfinite(mean), mean, np.float32(0))
    memory.release()
    return centres


def _num_tokens(spec: DecoderSpec) -> int:
    return min(NUM_TOKENS, spec.context_length)


def _inputs(vocab_size: int, num_groups: int, num_blocks: int, chunk: range) -> StepInputs:
    """Return the step that computes a chunk of the text; each group has its own blocks, in order."""
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
    """Return the mean of keys at positions 0, 1, … `[num_tokens, num_kv_heads, head_dim]`, rotated to all positions."""
    mean: FloatArray = keys.mean(axis=0)
    if rope is not None:
        half = rope.rotary_dim // 2
        pairs = keys[..., :half] + 1j * keys[..., half : 2 * half]
        turns = np.exp(1j * np.arange(NUM_POSITIONS)[:, None] * np.array(rope.inverse_frequencies))
        turned = np.mean(pairs / turns[: len(keys), None], axis=0) * turns.mean(axis=0)
        mean[..., :half], mean[..., half : 2 * half] = turned.real, turned.imag
    return mean
