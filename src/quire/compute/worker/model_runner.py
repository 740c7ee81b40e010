"""The seam between a worker and a model: flat arrays in, logits out.

    plan ─► InputBatch.build ─► StepInputs ─► ModelRunner.run ─► StepOutputs ─► Sampler ─► result

The tokens of all sequences of a step lie one after another; nothing is padded. A runner writes the
keys and values of exactly these tokens to their slots, and reads nothing but slots of the same
sequences, through their block tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from quire.compute.arrays import BoolArray, IntArray, Logits

Memory_contra = TypeVar("Memory_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tokens that one step computes.

    Sequence s has the tokens query_starts[s] up to query_starts[s + 1], at consecutive positions,
    and wants the logits logit_starts[s] up to logit_starts[s + 1]: those of its last tokens.
    `entries[s]` is its entry in the plan, and `rows[s]` the row that it holds.
    """

    entries: tuple[int, ...]
    query_starts: IntArray  # [num_sequences + 1]
    token_ids: IntArray  # [num_tokens]
    positions: IntArray  # [num_tokens]
    slots: tuple[IntArray, ...]  # per KV group: [num_tokens]
    block_tables: tuple[IntArray, ...]  # per KV group: [num_sequences, max_blocks]
    logit_starts: IntArray  # [num_sequences + 1]
    logit_indices: IntArray  # [num_logits], each an index of a token
    rows: IntArray  # [num_sequences]

    def tokens_of(self, sequence: int) -> slice:
        """Return where the tokens of a sequence lie."""
        return slice(int(self.query_starts[sequence]), int(self.query_starts[sequence + 1]))

    def logits_of(self, sequence: int) -> slice:
        """Return where the logits of a sequence lie."""
        return slice(int(self.logit_starts[sequence]), int(self.logit_starts[sequence + 1]))


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a model computed: the logits that were wanted, and what came through finite.

    Rows of logits may be padded beyond the vocabulary, with anything.
    """

    logits: Logits  # [num_logits, vocab_size or more]
    finite: BoolArray  # [num_tokens]: the hidden state of the token
    finite_logits: BoolArray  # [num_logits]


class ModelRunner(Protocol[Memory_contra]):
    """A model that can compute steps, over its own kind of KV memory."""

    @property
    def vocab_size(self) -> int:
        """How many tokens the model knows."""
        ...

    def run(self, inputs: StepInputs, cache: Memory_contra) -> StepOutputs:
        """Compute one step of at least one token. Mutates its slots in the cache, no others."""
        ...
