"""The order of the rows of tensors in GGUF files, where it is not that of Hugging Face.

Files of Llama, Arcee, Granite, InternLM2, Ministral 3, OLMo and SmolLM3 have the rows of queries and keys interleaved,
because llama.cpp rotates adjacent dimensions where we rotate halves. Falcon and GPT-NeoX files have all queries, then
all keys, then all values. Qwen3.5 files have the value heads of recurrent layers in turns (`Turns`).
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

INTERLEAVED: Final = frozenset(
    {"arcee", "granite", "granitehybrid", "granitemoe", "internlm2", "llama", "mistral3", "nemotron_h"}
    | {"nemotron_h_moe", "olmo", "smollm3"}
)
"""Architectures whose files interleave the rows of the two halves of each query and key head."""

TAKES_TURNS: Final = frozenset({"qwen35", "qwen35moe"})
"""Architectures whose files have the value heads of recurrent layers in turns."""

OF_VALUES: Final = frozenset({"ssm_a", "ssm_alpha", "ssm_beta", "ssm_dt"})
"""Tensors with rows of value heads. Gates keep their turns, as the columns of the output matrix do."""

AFTER_KEYS: Final = frozenset({"attn_qkv", "ssm_conv1d"})
"""Tensors with rows of queries, keys and value heads."""

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


@dataclass(frozen=True, slots=True)
class Turns:
    """Puts value heads with the same key next to each other: the file has the first of each key, then the second.

    The first `start` rows of a tensor belong to no value head, and stay where they are.
    """

    num_keys: int
    heads_per_key: int
    start: int = 0

    def __call__(self, stored: Rows) -> Rows:
        """Return the rows in the order of Hugging Face."""
        heads = stored[self.start :]
        turns = heads.reshape(self.heads_per_key, self.num_keys, -1, *heads.shape[1:])
        return np.concatenate([stored[: self.start], turns.swapaxes(0, 1).reshape(heads.shape)])

    def head_size(self, num_rows: int) -> int:
        """Return the rows of each value head; 0 if this number of rows does not fit."""
        size, rest = divmod(num_rows - self.start, self.num_keys * self.heads_per_key)
        return 0 if rest else max(size, 0)


@dataclass(frozen=True, slots=True)
class ColoursLast:
    """Puts the numbers of a patch pixel by pixel: the file has all pixels of one colour, then those of the next."""

    num_colours: int

    def __call__(self, stored: Rows) -> Rows:
        """Return the rows in the order of Hugging Face."""
        pixels = stored.reshape(len(stored), self.num_colours, -1).swapaxes(1, 2)
        return pixels.reshape(stored.shape)


def order_of(header: GgufHeader, architecture: str, part: str, tensor: GgufTensor) -> Order | Turns | None:
    """Return the order for the rows of a tensor; None if they already have that of Hugging Face."""
    if architecture in TAKES_TURNS:
        is_known = part in OF_VALUES | AFTER_KEYS
        return _turns(header, architecture, tensor.shape[0], has_keys=part in AFTER_KEYS) if is_known else None
    key = f"{architecture}.attention.head_count"
    heads: Any = header.settings.get(key)
    kv_heads: Any = heads if architecture == "gptneox" else header.settings.get(f"{key}_kv", heads)
    kv_heads = same_number([each for each in kv_heads if each != 0] if isinstance(kv_heads, list) else kv_heads)
    if architecture in INTERLEAVED and part in ("attn_q", "attn_k"):
        counts = [kv_heads if part == "attn_k" else heads]
        key = f"{key}_kv" if part == "attn_k" and f"{key}_kv" in header.settings else key
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


def _turns(header: GgufHeader, architecture: str, num_rows: int, *, has_keys: bool = False) -> Turns | None:
    """Return the order of value heads; settings or rows that do not fit are refused by later checks."""
    names = ("ssm.group_count", "ssm.time_step_rank", "ssm.state_size")
    found: list[Any] = [header.settings.get(f"{architecture}.{name}") for name in names]
    if any(type(number) is not int or number < 1 for number in found):
        return None
    keys, heads, size = found
    turns = Turns(keys, heads // keys, 2 * keys * size if has_keys else 0)
    return turns if heads % keys == 0 and heads != keys and turns.head_size(num_rows) else None
