"""How a request wants its tokens chosen, and when it wants to stop.

A plain value: nothing is checked here. `quire.core.validate` checks every field, whatever door the request came
through, and it is the only place that does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling and stopping parameters of one request.

    `n` sequences are returned out of `best_of` (default: `n`) that are generated. With `beam_search` the
    `best_of` sequences are the beams of one search. `max_tokens` None means: as many as fit.

    >>> SamplingParams(n=2, best_of=4).num_sequences
    4
    """

    n: int = 1
    best_of: int | None = None
    beam_search: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def num_sequences(self) -> int:
        """How many sequences are generated side by side."""
        return self.n if self.best_of is None else self.best_of
