"""The non-linearity of an MLP, times `up` if the MLP is gated: number by number, without sums."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from quire.compute.torch.kernels.variants import KernelVariant

BLOCK: Final = 1024
GELU_FACTOR: Final = tl.constexpr(1.5957691216057308)  # 2 × sqrt(2 / pi)
SWIGLU_FACTOR: Final = tl.constexpr(1.702)
SWIGLU_LIMIT: Final = tl.constexpr(7.0)
SQRT_HALF: Final = tl.constexpr(0.7071067811865476)


@triton.jit
def activated(numbers, ACTIVATION: tl.constexpr):
    """Return the activation of float32 numbers."""
    if ACTIVATION == "relu":
        return tl.where(numbers < 0, 0.0, numbers)  # NaN stays NaN
    elif ACTIVATION == "relu_squared":
        return tl.where(numbers < 0, 0.0, numbers * numbers)
    elif ACTIVATION == "silu":
        return numbers * tl.sigmoid(numbers)
    elif ACTIVATION == "quick_gelu":
        return numbers * tl.sigmoid(numbers * SWIGLU_FACTOR)
    elif ACTIVATION == "clamped_swiglu":
        low = tl.where(numbers > SWIGLU_LIMIT, SWIGLU_LIMIT, numbers)
        return low * tl.sigmoid(low * SWIGLU_FACTOR)
    elif ACTIVATION == "gelu":
        return numbers * (0.5 + 0.5 * tl.erf(numbers * SQRT_HALF))
    else:  # (1 + tanh(x)) / 2 is the sigmoid of 2x
        tl.static_assert(ACTIVATION == "gelu_tanh")
        return numbers * tl.sigmoid((numbers + 0.044715 * numbers * numbers * numbers) * GELU_FACTOR)


@triton.jit
def factor_of(ups, ACTIVATION: tl.constexpr):
    """Return the factor of an activated gate, from float32 numbers."""
    if ACTIVATION == "clamped_swiglu":
        low = tl.where(ups > SWIGLU_LIMIT, SWIGLU_LIMIT, ups)
        return tl.where(low < -SWIGLU_LIMIT, -SWIGLU_LIMIT, low) + 1
    else:
        return ups


@triton.jit
def activation_kernel(
    rows, active, row_stride, size, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """Activate a piece of a row; if gated, multiply it by the numbers `size` places further on."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    start = rows + row * row_stride + places
    result = activated(tl.load(start, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    if GATED:
        result *= factor_of(tl.load(start + size, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    tl.store(active + row * size + places, result.to(active.dtype.element_ty), mask=inside)


def activate(rows: torch.Tensor, *, activation: str, gated: bool) -> torch.Tensor:
    """Return activation(rows), or activation(gate) × up for rows with both, the gate first. Does not mutate.

    `activation` is the value of an `Activation`; a clamped gate also clamps `up`, and adds 1 to it. Each row is
    contiguous, but there may be gaps between rows.
    """
    num_rows, width = rows.shape
    size = width // 2 if gated else width
    active = torch.empty((num_rows, size), dtype=rows.dtype, device=rows.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(size, BLOCK))
        activation_kernel[grid](
            rows, active, rows.stride(0), size, ACTIVATION=activation, GATED=gated, BLOCK=BLOCK, num_warps=4
        )
    return active


VARIANTS = tuple(
    KernelVariant(
        f"{activation}{', gated' if gated else ''}, {dtype}",
        activation_kernel,
        arguments={"rows": f"*{dtype}:16", "active": f"*{dtype}:16", "row_stride": "i32:16", "size": "i32:16"},
        constants={"ACTIVATION": activation, "GATED": gated, "BLOCK": BLOCK},
    )
    for activation, gated, dtype in (
        ("silu", True, "bf16"),
        ("silu", True, "fp16"),
        ("gelu_tanh", True, "bf16"),
        ("gelu_tanh", False, "fp32"),
        ("relu", False, "fp16"),
        ("relu_squared", False, "bf16"),
        ("gelu", False, "bf16"),
        ("clamped_swiglu", True, "bf16"),
    )
)
"""The forms that the compile gate compiles; see `variants`."""
