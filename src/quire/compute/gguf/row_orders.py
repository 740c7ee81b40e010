"""The order of the rows of tensors in GGUF files, where it is not that of Hugging Face.

Files of Llama, Arcee, Granite, InternLM2, Ministral 3 and SmolLM3 have the rows of queries and keys interleaved,
because llama.cpp rotates adjacent dimensions where we rotate halves. Falcon and GPT-NeoX files have all queries, then
all keys, then all values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from quire.compute.arrays import ByteArray, FloatArray
from quire.compute.gguf.header import GgufHeader, GgufTensor, same_number
from quire.core.errors import CheckpointError

APART: Final = frozenset({"falcon", "gptneox"})
"""Architectures whose files have all queries, then all keys, then all values in one tensor."""

INTERLEAVED: Final = frozenset({"arcee", "granite", "granitemoe", "internlm2", "llama", "mistral3", "smollm3"})
"""Architectures whose files interleave the rows of the two halves of each query and key head."""

Rows = TypeVar("Rows", FloatArray, ByteArray)


@dataclass(frozen=True, slots=True)
class Order:
    """Puts the rows of a tensor in the order of Hugging Face, if the file interleaves the halves of each of `heads`.

    With `kv_heads`, the file has all queries, all keys and all values; the result has each key and each value after the
    queries that read them.
    """

    heads: int
    kv_heads: int = 0

    def __call__(self, stored: Rows) -> Rows:
        """Return the rows in the order of Hugging Face."""
        rows, rest = stored.shape[0], stored.shape[1:]
        if not self.kv_heads:
            pairs = stored.reshape(self.heads, rows // self.heads // 2, 2, *rest)
            return pairs.swapaxes(1, 2).reshape(rows, *rest)
        size = rows // (self.heads + 2 * self.kv_heads)
        ends = [self.heads * size, (self.heads + self.kv_heads) * size]
        parts = [part.reshape(self.kv_heads, -1, *rest) for part in np.split(stored, ends)]
        return np.concatenate(parts, axis=1).reshape(rows, *rest)


def order_of(header: GgufHeader, architecture: str, part: str, tensor: GgufTensor) -> Order | None:
    """Return the order for the rows of a tensor; None if they already have that of Hugging Face."""
    key = f"{architecture}.attention.head_count"
    heads: Any = header.settings.get(key)
    kv_heads: Any = heads if architecture == "gptneox" else same_number(header.settings.get(f"{key}_kv", heads))
    if architecture in INTERLEAVED and part in ("attn_q", "attn_k"):
        counts = [kv_heads if part == "attn_k" else heads]
    elif architecture in APART and part == "attn_qkv":
        counts = [heads, kv_heads]
    else:
        return None
    if all(type(count) is int and count > 0 for count in counts):
        order = Order(*counts)
        if order.kv_heads:  # rows that do not fit have a wrong shape, which a later check detects
            fits = tensor.shape[0] % (order.heads + 2 * order.kv_heads) == 0 == order.heads % order.kv_heads
            return order if fits else None
        if tensor.shape[0] % (2 * order.heads) == 0:
            return order
    raise CheckpointError(
        f"{header.path}: {key}", counts[0], f"heads whose rows make up the {tensor.shape[0]} of {part}"
    )
