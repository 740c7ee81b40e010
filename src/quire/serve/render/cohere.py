"""The answer with vectors in Cohere's types.

    float, base64     the numbers; their bytes, little-endian float32
    int8              the numbers × 127 / the largest of their magnitudes, rounded
    uint8             int8 + 128
    ubinary           a bit for each number, 1 if it is above 0; the first is the highest bit of the first byte
    binary            ubinary - 128

Each depends only on its own vector, so a text has the same bytes in any batch. Cohere scales int8 by ranges measured
for each of its models; other models have no such ranges. Rejected: ranges of the batch.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from quire.core.pooling import vector_numbers
from quire.serve.render.answer import shown_id
from quire.serve.render.scores import COHERE
from quire.serve.run.generation import Generation
from quire.serve.schemas.cohere import CohereEmbedAnswer, CohereEmbedMeta, CohereEmbedRequest, CohereVectors
from quire.serve.schemas.scores import CohereTokens

MOST: Final = 127
OFFSET: Final = 128


def cohere_embed_answer(
    fields: CohereEmbedRequest, generation: Generation, vectors: Sequence[bytes]
) -> CohereEmbedAnswer:
    """Return the answer of /v2/embed. Does not mutate."""
    tokens = CohereTokens(generation.counts.prompt)
    found: dict[str, Any] = {}
    for name in fields.types():
        found["floats" if name == "float" else name] = [FORMS[name](vector) for vector in vectors]
    meta = CohereEmbedMeta(COHERE, tokens, tokens)
    made = shown_id("embed-", generation.context)
    return CohereEmbedAnswer(made, CohereVectors(**found), fields.all_texts(), meta, "embeddings_by_type")


def _floats(vector: bytes) -> list[float]:
    return vector_numbers(vector).tolist()


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


def _int8(vector: bytes) -> list[int]:
    numbers = vector_numbers(vector)
    largest = max(map(abs, numbers)) or 1.0
    return [round(number * MOST / largest) for number in numbers]


def _uint8(vector: bytes) -> list[int]:
    return [number + OFFSET for number in _int8(vector)]


def _ubinary(vector: bytes) -> list[int]:
    bits = "".join("1" if number > 0 else "0" for number in vector_numbers(vector))
    return list(int(bits, 2).to_bytes(len(bits) // 8, "big"))


def _binary(vector: bytes) -> list[int]:
    return [number - OFFSET for number in _ubinary(vector)]


FORMS: Final[Mapping[str, Callable[[bytes], object]]] = MappingProxyType(
    {
        "float": _floats,
        "base64": _base64,
        "int8": _int8,
        "uint8": _uint8,
        "binary": _binary,
        "ubinary": _ubinary,
    }
)
