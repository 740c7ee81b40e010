"""Scores of pairs: how well a document answers a query.

    a model with labels     one prompt for each pair; the score is the share of the first label
    any other               a vector for each text; the score is the cosine of the two

The prompt of a pair has the query first, so that documents share its blocks. It is what Qwen3-Reranker was trained
with, in the model's own chat template; without a template, the query and the document in two lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from quire.core.pooling import vector_numbers
from quire.engine.text.prompts import ChatOptions, Prompt

INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
JUDGE: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
AS_CHAT: Final = ChatOptions(True, None, MappingProxyType({"enable_thinking": False}))


def pair_prompt(query: str, document: str, instruction: str | None, *, is_chat: bool) -> Prompt:
    r"""Return the prompt that a pair is scored by.

    >>> pair_prompt("a query", "a document", None, is_chat=False)
    'a query\na document'
    """
    if not is_chat:
        return f"{query}\n{document}"
    asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    return [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}]


def first_share(vector: bytes) -> float:
    """Return the share of the first label."""
    return float(vector_numbers(vector)[0])


def cosine(one: bytes, other: bytes) -> float:
    """Return the cosine of two vectors of length 1.

    >>> from array import array
    >>> cosine(array("f", [0.6, 0.8]).tobytes(), array("f", [1.0, 0.0]).tobytes())
    0.6000000238418579
    """
    return math.fsum(x * y for x, y in zip(vector_numbers(one), vector_numbers(other), strict=True))


def ranked(scores: Sequence[float], most: int | None = None) -> list[int]:
    """Return the places of scores, the highest first; among equal ones the first.

    >>> ranked([0.1, 0.9, 0.9], 2)
    [1, 2]
    """
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:most]
