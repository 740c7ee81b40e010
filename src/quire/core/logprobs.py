"""TokenLogprobs: how likely a token was, for `SamplingParams.logprobs` and `prompt_logprobs`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from quire.core.wire import WireReader, WireWriter


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability and rank of a token in the model's own distribution, before temperature and filters.

    `rank` is 1 for the likeliest token. `top_ids` are the likeliest tokens, best first, ties to the lowest id, and
    `top_logprobs` their log-probabilities.
    """

    logprob: float
    rank: int
    top_ids: array[int]
    top_logprobs: array[float]


def write_logprobs(writer: WireWriter, entry: TokenLogprobs) -> None:
    """Write the log-probabilities of one token."""
    writer.number(entry.logprob)
    writer.integer(entry.rank)
    writer.column(entry.top_ids)
    writer.numbers(entry.top_logprobs)


def read_logprobs(reader: WireReader) -> TokenLogprobs:
    """Read the log-probabilities of one token."""
    return TokenLogprobs(reader.number(), reader.integer(), reader.column(), reader.numbers())
