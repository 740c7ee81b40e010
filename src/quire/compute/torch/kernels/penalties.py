"""Penalties of a text's tokens, from counts on the device; changes rows of logits in place.

The definition, `quire.compute.sampling.draws`, rounds each product, quotient and difference. So the kernel is compiled
without fused products and sums (`enable_fp_fusion`), and divides as IEEE does.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from quire.compute.torch.kernels.variants import KernelVariant

TILE: Final = 1024

# The settings of a row, [num_rows, 5] of float64.
LOGIT_ROW: Final = tl.constexpr(0)
TABLE_ROW: Final = tl.constexpr(1)
REPETITION: Final = tl.constexpr(2)
FREQUENCY: Final = tl.constexpr(3)
PRESENCE: Final = tl.constexpr(4)
NUM_SETTINGS: Final = tl.constexpr(5)


@triton.jit
def penalize_kernel(logits, table, settings, vocab_size, TILE: tl.constexpr):
    """Change the logits of a piece of a row."""
    own = settings + tl.program_id(0) * NUM_SETTINGS
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = ids < vocab_size
    entries = tl.load(table + tl.load(own + TABLE_ROW).to(tl.int64) * vocab_size + ids, mask=inside, other=0)
    numbers = logits + tl.load(own + LOGIT_ROW).to(tl.int64) * vocab_size + ids
    given = tl.load(numbers, mask=inside, other=0.0)
    counts = (tl.maximum(entries, 1) - 1).to(tl.float32)
    repetition = tl.load(own + REPETITION).to(tl.float32)
    scaled = tl.where(given < 0, given * repetition, tl.div_rn(given, tl.zeros_like(given) + repetition))
    less = scaled - tl.load(own + FREQUENCY).to(tl.float32) * counts
    less = tl.where(counts > 0, less - tl.load(own + PRESENCE).to(tl.float32), less)
    tl.store(numbers, less, mask=inside & (entries > 0))


def penalize(logits: torch.Tensor, table: torch.Tensor, settings: torch.Tensor) -> None:
    """Apply penalties to rows of logits, float32 `[num_rows, vocab_size]`, contiguous. Mutates them.

    `table` has counts, int32 of the same width: 0 for a token that is not in the text, and otherwise 1 more than its
    occurrences in the output. `settings` are float64 `[num_changed, 5]`: row of logits, row of counts, repetition,
    frequency and presence penalty.
    """
    vocab_size = logits.shape[1]
    grid = (len(settings), triton.cdiv(vocab_size, TILE))
    penalize_kernel[grid](logits, table, settings, vocab_size, TILE=TILE, num_warps=4, enable_fp_fusion=False)


VARIANTS = (
    KernelVariant(
        "penalize",
        penalize_kernel,
        arguments={"logits": "*fp32:16", "table": "*i32:16", "settings": "*fp64:16", "vocab_size": "i32:16"},
        constants={"TILE": TILE},
        min_wide_share=0.25,  # the settings of a row are single numbers
        fuses=False,
    ),
)
"""The forms that the compile gate compiles; see `variants`."""
