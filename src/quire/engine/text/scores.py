"""Scores of pairs: how well a document answers a query.

    a model with labels     one prompt for each pair; the score is the share of the first label
    other models            a vector for each text; the score is the cosine of the two

An encoder with labels reads both texts of a pair with its own tokens around them, as it was trained.

The prompt of a pair has the query first, so that documents share its blocks. It is made by the model's own template for
pairs, which GGUF files of rerankers have; else it has the form that Qwen3-Reranker was trained with, in the model's
chat template; without a template, it is the query and the document on two lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Final, cast

from quire.core.errors import InvalidRequestError
from quire.core.pooling import INSTRUCTION, PAIR_TEMPLATE, vector_numbers
from quire.engine.text.chat_template import ChatOptions
from quire.engine.text.prompts import Message, Prompt, cut_to
from quire.engine.text.tokenizer import Tokenizer

JUDGE: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
AS_CHAT: Final = ChatOptions(True, None, MappingProxyType({"enable_thinking": False}))
AS_PAIR: Final = ChatOptions(template=PAIR_TEMPLATE)
Pairs = Iterable[tuple[str, str]]


def pair_prompts(
    pairs: Pairs, instruction: str | None, tokenizer: Tokenizer | None, *, plain: bool = False
) -> tuple[list[Prompt], ChatOptions | None]:
    r"""Return the prompts that score pairs, and the chat options if the prompts are conversations.

    `plain`: the model reads the two texts as its tokenizer joins them.
    Raises `InvalidRequestError` for an instruction if the model's template has no place for one.

    >>> pair_prompts([("a query", "a document")], None, None)
    (['a query\na document'], None)
    """
    if plain:
        if instruction:
            raise InvalidRequestError("instruction", instruction, "none: this model reads a query and a document only")
        return [[_message("user", one), _message("user", two)] for one, two in pairs], AS_PAIR
    if tokenizer is not None and (template := tokenizer.pair_template):
        if instruction and "messages[0]" not in template:
            raise InvalidRequestError(
                "instruction", instruction, "none: the prompt in the model's file has no place for it"
            )
        task = instruction or INSTRUCTION
        return [[_message("system", task), _message("user", one), _message("user", two)] for one, two in pairs], AS_PAIR
    if tokenizer is None or not tokenizer.has_chat_template:
        return [f"{query}\n{document}" for query, document in pairs], None
    asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: "
    return [
        [_message("system", JUDGE), _message("user", f"{asked}{query}\n<Document>: {document}")]
        for query, document in pairs
    ], AS_CHAT


def cut_pairs(
    prompts: Sequence[Prompt], chat: ChatOptions | None, tokenizer: Tokenizer | None, length: int
) -> tuple[list[Prompt], ChatOptions | None]:
    """Return the prompts of pairs, cut to a number of tokens; pairs that a tokenizer joins become tokens. Pure."""
    if chat is None or tokenizer is None:
        return [cut_to(length, prompt, tokenizer) for prompt in prompts], chat
    if chat != AS_PAIR or tokenizer.pair_template:
        raise InvalidRequestError("truncate", True, "False: the prompt of this model ends with what it is asked")
    texts = ([str(message["content"]) for message in cast(Sequence[Message], prompt)] for prompt in prompts)
    return [tokenizer.encode_pair(pair, length) for pair in texts], None


def scored_texts(query: object, documents: object) -> list[str]:
    """Return the documents to score; raises `InvalidRequestError` unless they and the query are texts. Pure."""
    if not isinstance(query, str):
        raise InvalidRequestError("query", query, "a text")
    texts = [documents] if isinstance(documents, str) else documents
    if not isinstance(texts, Sequence):
        raise InvalidRequestError("documents", documents, "a text, or a list of texts")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidRequestError(f"documents[{index}]", text, "a text")
    return list(texts)


def _message(role: str, content: str) -> dict[str, object]:
    return {"role": role, "content": content}


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


def ranked(scores: Sequence[float], most: int | None) -> list[int]:
    """Return the indexes of scores, the highest score first; equal scores in their order.

    >>> ranked([0.1, 0.9, 0.9], 2)
    [1, 2]
    """
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:most]
