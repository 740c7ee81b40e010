"""The seam between a worker and a model: flat arrays in, logits out.

    plan ─► InputBatch.build ─► StepInputs ─► ModelRunner.run ─► StepOutputs ─► Sampler ─► result

The tokens of all sequences of a step are concatenated, without padding. A runner writes the keys and
values of exactly these tokens to their slots, and reads only slots of the same sequences, through their
block tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import numpy as np

from quire.compute.arrays import BoolArray, FloatArray, IntArray, Logits

Memory_contra = TypeVar("Memory_contra", contravariant=True)
UNKNOWN: Final = -1
"""A token that a running step samples; only a runner that is a `Launcher` gets it, as the last token of a sequence."""

NO_INDICES: Final[IntArray] = np.zeros(0, np.int64)
NO_COORDINATES: Final[IntArray] = np.zeros((0, 0), np.int64)
NO_STATES: Final[FloatArray] = np.zeros((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tokens that one step computes.

    Sequence s has the tokens query_starts[s] up to query_starts[s + 1], at consecutive positions, and
    gets the logits logit_starts[s] up to logit_starts[s + 1], for its last tokens. `entries[s]` is its
    entry in the plan, and `rows[s]` its row.

    Token t has the row given_rows[given[t]] instead of its embedding, unless that is -1. Its coordinates are for
    rotary positions with axes; without any, each is its position. It also sees the later positions of its sequence
    before ends_seen[t], all of which are in the step; 0: none.
    """

    entries: tuple[int, ...]
    query_starts: IntArray  # [num_sequences + 1]
    token_ids: IntArray  # [num_tokens]
    positions: IntArray  # [num_tokens]
    slots: tuple[IntArray, ...]  # per KV group: [num_tokens]
    block_tables: tuple[IntArray, ...]  # per KV group: [num_sequences, blocks of the longest sequence or fewer]
    logit_starts: IntArray  # [num_sequences + 1]
    logit_indices: IntArray  # [num_logits], each an index of a token
    rows: IntArray  # [num_sequences]
    state_indices: IntArray = field(default_factory=lambda: NO_INDICES)  # [num_states], each an index of a token
    adapters: tuple[str, ...] = ()  # [num_sequences], digests, empty for no adapter; (): no sequence has one
    given: IntArray = field(default_factory=lambda: NO_INDICES)  # [num_tokens], see above; empty: no token has a row
    given_rows: FloatArray = field(default_factory=lambda: NO_STATES)  # [num_rows, embedding_size + deep rows]
    coordinates: IntArray = field(default_factory=lambda: NO_COORDINATES)  # [num_axes, num_tokens], or empty
    ends_seen: IntArray = field(default_factory=lambda: NO_INDICES)  # [num_tokens], or empty: all are 0

    def tokens_of(self, sequence: int) -> slice:
        """Return the slice of a sequence's tokens."""
        return slice(int(self.query_starts[sequence]), int(self.query_starts[sequence + 1]))

    def logits_of(self, sequence: int) -> slice:
        """Return the slice of a sequence's logits."""
        return slice(int(self.logit_starts[sequence]), int(self.logit_starts[sequence + 1]))

    def num_late(self, sequence: int, most: int) -> int:
        """Return how many of a sequence's last tokens may have to be taken back: those with logits, at least one."""
        num_logits = int(self.logit_starts[sequence + 1] - self.logit_starts[sequence])
        return min(max(1, num_logits), most)

    def part(self, start: int, stop: int) -> StepInputs:
        """Return the sequences from `start` up to `stop` as a separate step. Does not mutate."""
        tokens = slice(int(self.query_starts[start]), int(self.query_starts[stop]))
        logits, states = slice(int(self.logit_starts[start]), int(self.logit_starts[stop])), self.state_indices
        return StepInputs(
            entries=self.entries[start:stop],
            query_starts=self.query_starts[start : stop + 1] - tokens.start,
            token_ids=self.token_ids[tokens],
            positions=self.positions[tokens],
            slots=tuple(slots[tokens] for slots in self.slots),
            block_tables=tuple(table[start:stop] for table in self.block_tables),
            logit_starts=self.logit_starts[start : stop + 1] - logits.start,
            logit_indices=self.logit_indices[logits] - tokens.start,
            rows=self.rows[start:stop],
            state_indices=states[(states >= tokens.start) & (states < tokens.stop)] - tokens.start,
            adapters=self.adapters[start:stop],
            given=self.given[tokens],
            given_rows=self.given_rows,
            coordinates=self.coordinates[:, tokens],
            ends_seen=self.ends_seen[tokens],
        )


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """The outputs of a model: the logits, the requested hidden states, and which outputs are finite.

    Rows of logits may have padding of any content after the vocabulary.
    """

    logits: Logits  # [num_logits, vocab_size or more]
    finite: BoolArray  # [num_tokens]: the hidden state of the token
    finite_logits: BoolArray  # [num_logits]
    states: FloatArray = field(default_factory=lambda: NO_STATES)  # [num_states, hidden_size], after the final norm


class ModelRunner(Protocol[Memory_contra]):
    """A model that computes steps over its own kind of KV memory."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the model."""
        ...

    def run(self, inputs: StepInputs, cache: Memory_contra) -> StepOutputs:
        """Compute one step of at least one token. Mutates its slots in the cache, no others."""
        ...
