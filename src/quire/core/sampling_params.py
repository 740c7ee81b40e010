"""How a request wants its tokens chosen, and when it wants to stop.

A plain value: lists become tuples, and nothing is checked here. `quire.core.validate` checks every field, whatever
door the request came through, and it is the only place that does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling and stopping parameters of one request.

    `n` sequences are returned out of `best_of` (default: `n`) that are generated. With `beam_search` the
    `best_of` sequences are the beams of one search. `max_tokens` None means: as many as fit.

    Tokens are drawn from the softmax of logits / temperature, 0 meaning the likeliest token, after the filters in the
    order min_p, top_k (0 or -1: off), top_p. Sequence i of a request draws with seed + i, so that n sequences of one
    request are those of n requests with their own seeds.

    The text ends before the first of the `stop` strings, or with it where `include_stop_str_in_output`. `logprobs`
    asks for the log-probabilities of each token and of so many of the likeliest.

    >>> SamplingParams(n=2, best_of=4, stop="END").num_sequences
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
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for field in ("stop", "stop_token_ids"):
            if isinstance(getattr(self, field), list):
                object.__setattr__(self, field, tuple(getattr(self, field)))

    @property
    def num_sequences(self) -> int:
        """How many sequences are generated side by side."""
        return self.n if self.best_of is None else self.best_of
