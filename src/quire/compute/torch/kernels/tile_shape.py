"""TileShape: the shape that the attention kernel is compiled for. Pure Python, to plan work without a GPU.

    rows      of the matrix products: (token, head of the group). 16 rows select an instruction that wastes little on
              one token, 64 and more the fastest instruction
    tokens    of a tile of keys and values

The shape depends only on the model and the GPU, so it is the same for every row of every step. Nothing is tuned while
serving: a kernel chosen by the batch would make a row's bits depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

SPLIT: Final = 512
"""Positions of a split. Fixed, because it sets the order of sums in longer rows."""
DECODE_SPLIT: Final = 256
"""The same in the kernel for decodes alone: one context of 500 to 4,000 tokens keeps twice as many processors busy,
which saves 4 µs in a layer; one of 32,000 and more takes 8 % longer. Expected from one run, not measured
(benchmarks/RESULTS.md, GPU: predictions). In prompts, more parts would have to be written."""


class Use(Enum):
    """The use of a kernel.

    `DECODE`: one or a few tokens per sequence. `PROMPT`: many. `ANY`: both, with the same bits.
    """

    DECODE = "decode"
    PROMPT = "prompt"
    ANY = "any"


NARROW: Final = 64
WIDE: Final = 128
"""Heads of more numbers than this strain the registers."""
WIDEST: Final = 256
"""Heads of more numbers than this strain shared memory, too: some GPUs have 99 KiB for a program."""
MOST: Final = 512
FLOAT32_BITS: Final = 32
LEAST_TOKENS: Final = 16
"""The least of a matrix product's dimensions."""
FORMS: Final = MappingProxyType(
    {  # (decodes, most numbers of a head, quantised or before sm_90, MOST: not sm_90): rows, tokens, warps, stages
        (True, WIDE, False): (16, 64, 4, 3),
        (True, WIDE, True): (16, 64, 4, 3),
        (True, WIDEST, False): (16, 32, 4, 3),
        (True, WIDEST, True): (16, 32, 8, 3),
        (True, MOST, False): (16, 16, 8, 3),
        (True, MOST, True): (16, 16, 8, 3),
        (False, WIDE, False): (64, 64, 8, 3),
        (False, WIDE, True): (32, 32, 8, 3),
        (False, WIDEST, False): (32, 32, 8, 3),
        (False, WIDEST, True): (32, 32, 8, 3),
        (False, MOST, False): (32, 16, 8, 3),
        (False, MOST, True): (16, 16, 8, 3),
    }
)
"""The largest shapes that do not spill. Not tuned for speed: `quire bench gpu-kernels --only tiles` compares them."""
TWICE_THE_ROWS: Final = frozenset({(16, 8), (16, 9), (8, 9)})
"""(bits of a number, major capability) with enough registers for twice the rows in the kernel for prompts alone."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """The kernel's shape, without types. Immutable; a constant within kernels.

    `rows`: of the matrix products; `tokens`: of a tile of keys; `num_stages`: of the loop over tiles; `split`: the
    positions after which sums are folded. Not `paged`: no table is read, and a table at offset t stands for the blocks
    from t on, in order.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    head_dim: int
    group: int
    block_size: int
    split: int = SPLIT
    paged: bool = True

    @classmethod
    def of(
        cls, use: Use, *, head_dim: int, group: int, block_size: int, kv_bits: int = 16, capability: int = 90
    ) -> TileShape:
        """Return the shape for a use. It depends on the model and the GPU, never on the step.

        `kv_bits`: the bits of a number in the KV memory, of values if keys have more.

        >>> shape = TileShape.of(Use.DECODE, head_dim=80, group=4, block_size=16)
        >>> shape.rows, shape.tokens_per_task, shape.padded_dim
        (16, 4, 128)
        """
        is_decode = use is Use.DECODE
        most = next((most for most in (WIDE, WIDEST) if head_dim <= most), MOST)
        is_other = capability // 10 != 9 if most == MOST else capability < 90
        is_narrow = kv_bits < 16 or (is_other and not is_decode)
        rows, tokens, num_warps, num_stages = FORMS[is_decode, most, is_narrow]
        if use is Use.PROMPT and head_dim <= WIDE and (kv_bits, capability // 10) in TWICE_THE_ROWS:
            rows *= 2
        if kv_bits == 4 and head_dim <= WIDE:
            num_warps = 4  # with more, a thread would load less than 16 bytes of a tile; and sm_100 would spill
        if is_decode and head_dim <= NARROW and capability >= 90:
            tokens *= 2  # as many bytes in flight as with other heads
        if kv_bits == FLOAT32_BITS:  # else more than 99 KiB of shared memory, and registers would spill
            tokens, num_stages = max(LEAST_TOKENS, tokens // 2), 2
        split = DECODE_SPLIT if is_decode else SPLIT
        return cls(max(rows, power_of_two(group)), tokens, num_warps, num_stages, head_dim, group, block_size, split)

    @property
    def padded_dim(self) -> int:
        """Numbers of a head, padded for matrix units to a power of two, at least 16."""
        return max(16, power_of_two(self.head_dim))

    @property
    def tokens_per_task(self) -> int:
        """Tokens whose heads fit into the rows."""
        return self.rows // self.group


def power_of_two(number: int) -> int:
    """Return the least power of two that is at least `number`.

    >>> [power_of_two(number) for number in (1, 7, 8, 80)]
    [1, 8, 8, 128]
    """
    return 1 << (number - 1).bit_length()
