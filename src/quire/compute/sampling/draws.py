"""Draws and choices: what a sampler is asked, and what it answers.

A draw chooses one token from one row of logits, by settings of its own:

1. Tokens that are banned (those that would end the text before `min_tokens`) are taken away.
2. Temperature 0: the token of the highest logit, of equal ones the lowest id.
3. Else every token has the weight e^(logit / temperature), and filters take tokens away, in this order: **min_p**,
   those below that share of the highest weight; **top_k**, all but the k likeliest; **top_p**, all but the likeliest
   that together make up that share of what is left, at least one. Of equal weights the lowest ids count as likelier.
4. What is left, in the order of ids, is drawn by one uniform number, a function of (seed, position) alone.

So a sampled token depends on the request's own logits, seed and position: not on the batch, on chunks, or on what was
preempted. Log-probabilities are those of the model itself: of step 1's logits before anything was taken away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Draws:
    """Columns of equal length, an entry per draw. Draw i may not choose banned_ids[banned_starts[i]] … of its own."""

    logit_rows: IntArray
    temperatures: FloatArray
    top_k: IntArray  # 0: off
    top_p: FloatArray
    min_p: FloatArray
    seeds: IntArray
    positions: IntArray
    banned_starts: IntArray  # [num_draws + 1]
    banned_ids: IntArray
    num_logprobs: IntArray  # of the likeliest tokens to report; -1: no log-probabilities at all

    def __len__(self) -> int:
        """Return the number of draws."""
        return len(self.logit_rows)


@dataclass(frozen=True, slots=True)
class Choices:
    """The chosen tokens. The other columns are set only where a draw asks for log-probabilities."""

    tokens: IntArray
    logprobs: NDArray[np.float64]
    ranks: IntArray  # 1: the likeliest
    top_ids: IntArray  # [num_draws, most asked for], best first
    top_logprobs: NDArray[np.float64]

    @classmethod
    def empty(cls, draws: Draws) -> Choices:
        """Return arrays of the right size for a sampler to fill."""
        count, most = len(draws), max(0, int(draws.num_logprobs.max(initial=0)))
        return cls(
            tokens=np.zeros(count, np.int64),
            logprobs=np.zeros(count, np.float64),
            ranks=np.zeros(count, np.int64),
            top_ids=np.zeros((count, most), np.int64),
            top_logprobs=np.zeros((count, most), np.float64),
        )


class Sampler(Protocol):
    """Chooses tokens."""

    def sample(self, logits: FloatArray, draws: Draws) -> Choices:
        """Return a choice per draw; logits `[num_logits, vocab_size]` are finite. Does not mutate them."""
        ...
