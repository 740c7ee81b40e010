"""Hypothesis: a text that a beam search has found."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from quire.core.wire import WireReader, WireWriter


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Generated tokens, the sum of their log-probabilities, and the score by which the search ranks them."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float


def write_hypothesis(writer: WireWriter, found: Hypothesis) -> None:
    """Write a hypothesis."""
    writer.column(array("i", found.token_ids))
    writer.number(found.cumulative_logprob)
    writer.number(found.score)


def read_hypothesis(reader: WireReader) -> Hypothesis:
    """Read a hypothesis."""
    return Hypothesis(tuple(reader.column()), reader.number(), reader.number())
