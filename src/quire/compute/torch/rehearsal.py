"""The largest steps that there will be, to be computed once before the first one: as many tokens, as many sequences.

They store nothing and read whatever lies in the first block, so they need no memory but their own.
"""

from __future__ import annotations

import numpy as np

from quire.compute.torch.settings import TorchSettings
from quire.compute.worker.model_runner import StepInputs
from quire.core.kv_spec import KVCacheSpec
from quire.core.step import MAX_PROMPT_LOGITS


def largest_steps(spec: KVCacheSpec, settings: TorchSettings) -> tuple[StepInputs, ...]:
    """Return the longest prompt in one step, with all the logits that a step may bring, and the most decodes."""
    num_logits = min(settings.max_num_seqs + MAX_PROMPT_LOGITS, settings.max_num_batched_tokens)
    return _step(spec, 1, settings.max_num_batched_tokens, num_logits), _step(spec, settings.max_num_seqs, 1, 1)


def _step(spec: KVCacheSpec, num_sequences: int, num_tokens: int, num_logits: int) -> StepInputs:
    """Return sequences of so many tokens each, of which the last ones bring logits."""
    total = num_sequences * num_tokens
    starts = np.arange(num_sequences + 1, dtype=np.int64)
    num_blocks = -(-num_tokens // spec.block_size)
    last = np.arange(num_tokens - num_logits, num_tokens)
    return StepInputs(
        entries=tuple(range(num_sequences)),
        query_starts=starts * num_tokens,
        token_ids=np.zeros(total, np.int64),
        positions=np.tile(np.arange(num_tokens), num_sequences),
        slots=tuple(np.full(total, -1, np.int64) for _ in spec.groups),
        block_tables=tuple(np.zeros((num_sequences, num_blocks), np.int64) for _ in spec.groups),
        logit_starts=starts * num_logits,
        logit_indices=(starts[:-1, None] * num_tokens + last).ravel(),
        rows=np.arange(num_sequences),
    )
