"""The largest possible steps, and smaller steps of each kind, computed once before the first real step.

    prompts      the most tokens of a step, with the most logits
    chunks       at the end of the longest context, with the most parts of a launch, and of one tile
    decodes      the most concurrent sequences
    a decode     of the first token after 1, 2, 4, … splits, and at the end of the longest context
    some tokens  with as many logits, because products of codes have one kernel for few rows and one for more
    images       prompts and decodes again, with a row of an image for each token, if the model reads images

They store nothing and read the first block, whatever its content, so they need only their own memory. They also compile
the kernels for later steps: attention has separate kernels to merge 2, 4, 8 or more splits at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from quire.compute.arrays import IntArray
from quire.compute.models.base import DecoderSpec
from quire.compute.sampling.draws import Draws, TokenLists, TokenRules, parameter_columns
from quire.compute.torch.attention.base import MOST_SHORT
from quire.compute.torch.attention.work import MOST_PARTS
from quire.compute.torch.kernels.tile_shape import DECODE_SPLIT, SPLIT
from quire.compute.torch.settings import TorchSettings
from quire.compute.worker.model_runner import StepInputs
from quire.core.kv_spec import KVCacheSpec

SOME: Final = 32
MOST_OF_TILE: Final = 128
"""The tokens of the largest tile, if a KV head has a single query head."""


def largest_steps(spec: KVCacheSpec, settings: TorchSettings, context_length: int) -> tuple[StepInputs, ...]:
    """Return the steps. No token is past the context of the model."""
    num_prompts = -(-settings.max_num_batched_tokens // context_length)
    prompt = np.arange(settings.max_num_batched_tokens // num_prompts)
    num_logits = min(-(-settings.num_logits // num_prompts), len(prompt))
    num_doublings = (max(context_length - 1, 1) // DECODE_SPLIT).bit_length()
    num_cut = max(MOST_SHORT + 1, MOST_PARTS // -(-context_length // SPLIT))
    # A window that ends with the first token of a split reaches into the most splits.
    lengths = [(DECODE_SPLIT << doubling) + 1 for doubling in range(num_doublings)] + [context_length]
    return (
        _step(spec, num_prompts, prompt, num_logits),
        *(
            _step(spec, 1, np.arange(context_length - min(count, len(prompt)), context_length), 1)
            for count in (num_cut, MOST_OF_TILE)
        ),
        _step(spec, settings.max_num_seqs, prompt[:1], 1),
        *(_step(spec, 1, np.array([length - 1]), 1) for length in lengths),
        _step(spec, 1, prompt[:SOME], min(num_logits, SOME)),
    )


def with_images(steps: tuple[StepInputs, ...], spec: DecoderSpec) -> tuple[StepInputs, ...]:
    """Return the steps, and the largest one of prompts and of decodes with rows of images. Does not mutate."""
    decodes = max((step for step in steps if len(step.rows) == len(step.token_ids)), key=lambda step: len(step.rows))
    more = []
    for step in (steps[0], decodes):
        count = len(step.token_ids)
        rows = np.zeros((count, (1 + spec.deep_rows) * spec.hidden_size), np.float32)
        more.append(replace(step, given=np.arange(count), given_rows=rows, ends_seen=step.positions + 1))
    return *steps, *more


def rehearsed_draws(count: int) -> tuple[Draws, Draws]:
    """Return draws without rules and with rules, one from each of the first rows of logits.

    Both use every filter of a sampler. Rules change copies of the logits in float32, which other kernels read, and
    penalties allocate the memory for counts of tokens.
    """
    plain = filtered_draws(count)
    lists = TokenLists.of([np.zeros(1, np.int64)] * count)
    rules = replace(plain.rules, banned=lists, seen=lists, counts=np.ones(count, np.int64))
    columns = parameter_columns(count, top_k=1, top_p=0.5, min_p=0.25, repetition_penalty=2, frequency_penalty=1)
    return plain, replace(plain, parameters=columns, rules=rules)


def filtered_draws(count: int) -> Draws:
    """Return draws that use every filter of a sampler, one from each of the first rows of logits."""
    integers = np.zeros(count, np.int64)
    return Draws(
        logit_rows=np.arange(count),
        parameters=parameter_columns(count, top_k=1, top_p=0.5, min_p=0.25),
        seeds=integers,
        positions=integers,
        num_logprobs=integers - 1,
        rules=TokenRules.none(count),
    )


def _step(spec: KVCacheSpec, num_sequences: int, positions: IntArray, num_logits: int) -> StepInputs:
    """Return sequences that compute the same positions, with logits for the last ones."""
    starts, count = np.arange(num_sequences + 1, dtype=np.int64), len(positions)
    num_blocks = int(positions[-1]) // spec.block_size + 1
    return StepInputs(
        entries=tuple(range(num_sequences)),
        query_starts=starts * count,
        token_ids=np.zeros(num_sequences * count, np.int64),
        positions=np.tile(positions, num_sequences),
        slots=tuple(np.full(num_sequences * count, -1, np.int64) for _ in spec.groups),
        block_tables=tuple(np.zeros((num_sequences, num_blocks), np.int64) for _ in spec.groups),
        logit_starts=starts * num_logits,
        logit_indices=(starts[1:, None] * count - num_logits + np.arange(num_logits)).ravel(),
        rows=np.arange(num_sequences),
    )
