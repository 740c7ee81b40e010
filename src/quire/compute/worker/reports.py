"""Log-probabilities of tokens, from the sampler's columns to the form of a step result."""

from __future__ import annotations

from array import array

from quire.compute.sampling.draws import Choices
from quire.core.logprobs import TokenLogprobs


def reports(choices: Choices, first: int, count: int, num_logprobs: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of `count` choices and the likeliest tokens; empty if `num_logprobs` is negative."""
    if num_logprobs < 0:
        return ()
    return tuple(
        TokenLogprobs(
            logprob=float(choices.logprobs[draw]),
            rank=int(choices.ranks[draw]),
            top_ids=array("i", choices.top_ids[draw, :num_logprobs].tolist()),
            top_logprobs=array("d", choices.top_logprobs[draw, :num_logprobs].tolist()),
        )
        for draw in range(first, first + count)
    )
