"""Pooling: how the hidden states of a text become one vector, its embedding.

    last    the state of the last token, which has read the whole text
    mean    the mean over all tokens: every token is computed, without prefix cache hits
    cls     the state of the first token, if its model is an encoder: it has read the whole text too
    labels  for a model that classifies: the share of each label, from one of these states

The states are those after the final norm. A vector of the first two kinds is cut to its first dimensions if fewer are
requested, and then scaled to length 1.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from typing import Final

POOLINGS: Final = ("last", "mean", "cls")
FIRST: Final = "cls"
LABELS: Final = "labels"
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
"""Qwen3-Reranker's default instruction, used if the caller gives none; its GGUF files contain the same text."""

PAIR_TEMPLATE: Final = "query_and_document"
"""The name of a chat template for three messages: an instruction, a query and a document."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """One way to make a vector from a text. `dimensions`: how many numbers to keep; 0: all."""

    kind: str
    dimensions: int = 0


def vector_numbers(vector: bytes) -> array[float]:
    """Return the numbers of a vector in its wire form, little-endian float32.

    >>> vector_numbers(bytes([0, 0, 128, 63]))
    array('f', [1.0])
    """
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
