"""The gains of paging, computed from first principles, next to those that the source document expected.

That document (001, "PagedAttention Analysis") has two tables: memory saved compared with reserving the longest context
for each request, and a 16 GB card (RTX 4070 Ti SUPER) with an 8B model. Both are computed again here. Its mistakes:

    a block of Llama-3.1-8B takes 4 MB         16 × 32 × 2 × 128 × 8 × 2 = 2,097,152 bytes: 2 MiB
    requests take exactly their tokens         they take whole blocks, so they save a little less
    2 to 3 sequences, 8K to 16K of context     int8 weights leave room for more, 16-bit weights for less
    137 tok/s for one user                     the card cannot read weights of 8 or 16 bits so often in a second

Nothing is tuned; each difference is explained next to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.errors import InvalidConfigError
from quire.simulate.hardware import Hardware
from quire.simulate.model_shape import ModelShape
from quire.simulate.roofline import Numbers, Roofline

CONTEXT, RESERVED_TOKENS = 1024, 4096
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Saving:
    """Slots of KV memory that requests take: with the longest context reserved for each, and in blocks."""

    scenario: str
    expected: float
    num_reserved: int
    num_taken: int
    num_used: int

    @property
    def saved(self) -> float:
        """The share of the reserved slots that paging saves."""
        return 1 - self.num_taken / self.num_reserved

    @property
    def waste(self) -> float:
        """The share of the used slots that holds no token."""
        return 1 - self.num_used / self.num_taken


def saving(scenario: str, expected: float, lengths: Sequence[int]) -> Saving:
    """Return the slots that requests of these lengths take.

    >>> found = saving("ten of 1,000", 0.75, [1000] * 10)
    >>> found.num_reserved, found.num_taken, round(found.saved, 4), round(found.waste, 4)
    (40960, 10080, 0.7539, 0.0079)
    """
    if not lengths or not all(0 < length <= RESERVED_TOKENS for length in lengths):
        raise InvalidConfigError("lengths", list(lengths), f"at least one, each from 1 to {RESERVED_TOKENS}")
    taken = sum(-(-length // BLOCK_SIZE) * BLOCK_SIZE for length in lengths)
    return Saving(scenario, expected, RESERVED_TOKENS * len(lengths), taken, sum(lengths))


def memory_savings() -> tuple[Saving, ...]:
    """Return the table of memory saved. The last row is the document's "variable": eight lengths, 500 on average.

    >>> [round(100 * row.saved, 1) for row in memory_savings()], [100 * row.expected for row in memory_savings()]
    ([0.0, 75.0, 87.5, 87.6], [0.0, 75.0, 87.5, 87.5])
    """
    spread = [125 + round(750 * index / 7) for index in range(8)]
    return (
        saving("one of 4,096", 0.0, [4096]),
        saving("ten of 1,024", 0.75, [1024] * 10),
        saving("eight of 500", 0.875, [500] * 8),
        saving("eight of 125 to 875", 0.875, spread),
    )


@dataclass(frozen=True, slots=True)
class CardExpectation:
    """The capacity and speed of a card for a model, in a given number format; tokens per second are bounds.

    `num_tokens`: the total of all contexts, and so the longest single one; `num_contexts` of `CONTEXT` tokens at once;
    `reserved_contexts`: their number if each reserved `RESERVED_TOKENS`.
    """

    num_tokens: int
    num_contexts: int
    reserved_contexts: int
    stream_tokens_per_s: float
    batch_tokens_per_s: float


def card_expectation(
    hardware: Hardware, shape: ModelShape, numbers: Numbers, *, other_bytes: int = 0
) -> CardExpectation | None:
    """Return the expectation; None if weights and `other_bytes` (activations) leave no room for one context."""
    kv_bytes = hardware.memory_bytes - shape.weight_bytes(numbers.dtype, numbers.weights) - other_bytes
    spec = shape.kv_cache_spec(BLOCK_SIZE, numbers.stored_kv_dtype)
    num_blocks = max(0, kv_bytes) // spec.bytes_per_block
    num_contexts = num_blocks // spec.num_blocks_for(CONTEXT)
    if not num_contexts:
        return None
    roofline = Roofline(hardware, shape, numbers)
    return CardExpectation(
        num_tokens=num_blocks // len(spec.groups) * BLOCK_SIZE,
        num_contexts=num_contexts,
        reserved_contexts=num_blocks // spec.num_blocks_for(RESERVED_TOKENS),
        stream_tokens_per_s=1 / roofline.decode_s(1, CONTEXT),
        batch_tokens_per_s=num_contexts / roofline.decode_s(num_contexts, CONTEXT),
    )


def most_bits_per_weight(hardware: Hardware, shape: ModelShape, tokens_per_s: float) -> float:
    """Return the most bits per weight with which one stream can be this fast: each token reads all weights.

    >>> from quire.simulate.model_shape import WeightCount
    >>> layers, head = WeightCount(900_000), WeightCount(100_000)
    >>> shape = ModelShape("m", "float32", 8, 2, 1, 4, 10, 64, (None,), layers, head)
    >>> most_bits_per_weight(Hardware("card", 1 << 30, 1e9, {"float32": 1e12}), shape, tokens_per_s=1000.0)
    8.0
    """
    read = shape.layers.multiplied + shape.head.matrices + shape.experts_per_token * shape.expert.multiplied
    return 8 * hardware.read_bandwidth / tokens_per_s / read
