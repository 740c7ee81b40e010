"""Heads as 4-bit numbers, in kernels: the bits of `quire.compute.torch.int4`.

    write   float32 keys, values ─► less the centre ─► turned ─► n, scale, minimum ─► their slots in the KV memory
    turn    queries before attention, and its outputs after it

A head is turned by a fast Hadamard transform: for 128 numbers, 7 additions each, in registers. A launch of `turn` reads
and writes each row once. Attention needs one for its outputs, and another for its queries if keys have 4 bits too.
Rejected: turning within the attention kernel, which would do it for each split and hold more registers.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from quire.compute.torch.attention.base import KVPair
from quire.compute.torch.int4 import INT4, turning_factor
from quire.compute.torch.kernels.quantize import (
    EXACT,
    INT8_MOST,
    SMALLEST,
    TO_INTEGERS,
    quantized,
    scale_and_factor,
    size_of,
)
from quire.compute.torch.kernels.tile_shape import power_of_two
from quire.compute.torch.kernels.variants import KernelVariant
from quire.core.kv_spec import INT4_GROUP

ROWS: Final = 16
HEADS: Final = 8
NUM_WARPS: Final = 4
MOST: Final = tl.constexpr(15.0)
INFINITY: Final = tl.constexpr(float("inf"))
HIGH_HALF: Final = tl.constexpr(-0x10000)
NAN_SCALE: Final = tl.constexpr(0x7FC0)


class Stored(NamedTuple):
    """Keys or values in the KV memory, with their scales."""

    numbers: torch.Tensor
    scales: torch.Tensor
    block_stride: int
    head_stride: int
    token_stride: int
    scale_block_stride: int
    scale_head_stride: int
    scale_token_stride: int

    @classmethod
    def of(cls, numbers: torch.Tensor, scales: torch.Tensor) -> Stored:
        """Return them in the form that kernels take."""
        return cls(numbers, scales, *numbers.stride()[:3], *scales.stride()[:3])


@triton.jit
def turned_heads(heads, DIM: tl.constexpr, STAGES: tl.constexpr, FACTOR: tl.constexpr):
    """Return rows of float32 numbers, `[rows, DIM]`, multiplied by a Hadamard matrix of 2^STAGES numbers."""
    rows: tl.constexpr = heads.shape[0]
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(heads, [rows, DIM >> (stage + 1), 2, 1 << stage])
        low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        heads = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), [rows, DIM])
    return heads * FACTOR


@triton.jit
def as_bfloat16(numbers):
    """Return finite float32 numbers rounded to bfloat16, ties to even."""
    bits = numbers.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & HIGH_HALF).to(tl.float32, bitcast=True)


@triton.jit
def rounded_groups(groups, real):
    """Return n of each number, int32 `[rows, groups, numbers]`, and the words of the groups; `real`: not padding."""
    finite = tl.max(tl.where(real, size_of(groups), 0.0), 2) < INFINITY
    numbers = tl.where(finite[:, :, None], groups, 0.0)
    lowest = tl.min(tl.where(real, numbers, INFINITY), 2)
    highest = tl.max(tl.where(real, numbers, -INFINITY), 2)
    minimum = as_bfloat16(tl.where(lowest < INFINITY, lowest, 0.0))
    step = tl.div_rn(tl.where(highest > -INFINITY, highest, 0.0) - minimum, MOST)
    scale = tl.where(step < SMALLEST, 0.0, as_bfloat16(step))
    finite = finite & (scale < INFINITY) & (tl.abs(minimum) < INFINITY)
    usable = finite & (scale > 0)
    factor = tl.where(usable, tl.div_rn(1.0, tl.where(usable, scale, 1.0)), 0.0)
    steps = tl.where(usable[:, :, None], numbers - minimum[:, :, None], 0.0) * factor[:, :, None]
    inside = tl.minimum(tl.maximum(steps, 0.0), MOST)
    n = ((inside + TO_INTEGERS) - TO_INTEGERS).to(tl.int32)
    low = tl.where(finite, (scale.to(tl.int32, bitcast=True) >> 16) & 0xFFFF, NAN_SCALE)
    return n, low | (minimum.to(tl.int32, bitcast=True) & HIGH_HALF)


@triton.jit
def store_int4(
    stored: Stored,
    places,
    heads,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Turn, round and store heads; `places`: of each head's numbers and scales, -1 for padding."""
    rows: tl.constexpr = heads.shape[0]
    dim: tl.constexpr = heads.shape[1]
    num_groups: tl.constexpr = dim // GROUP
    numbers, scales = places
    groups = tl.reshape(turned_heads(heads, dim, STAGES, FACTOR), [rows, num_groups, GROUP])
    index = tl.arange(0, num_groups)
    dims = index[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    n, words = rounded_groups(groups, dims < HEAD_DIM)
    tl.store(
        stored.scales + scales[:, None] + index[None, :],
        words,
        mask=(scales >= 0)[:, None] & (index * GROUP < HEAD_DIM)[None, :],
    )
    low, high = tl.split(tl.reshape(n, [rows, dim // 2, 2]))
    places = tl.arange(0, dim // 2)
    tl.store(
        stored.numbers + numbers[:, None] + places[None, :],
        (low | (high << 4)).to(tl.uint8),
        mask=(numbers >= 0)[:, None] & (places < HEAD_DIM // 2)[None, :],
    )


@triton.jit
def places_of(stored: Stored, slot, block_size, heads, NUM_HEADS: tl.constexpr):
    """Return the places of the numbers and of the scales of some heads of a slot; -1 for padding."""
    block, offset, held = slot // block_size, slot % block_size, heads < NUM_HEADS
    numbers = block * stored.block_stride + heads * stored.head_stride + offset * stored.token_stride
    scales = block * stored.scale_block_stride + heads * stored.scale_head_stride + offset * stored.scale_token_stride
    return tl.where(held, numbers, -1), tl.where(held, scales, -1)


@triton.jit
def write_int4_kernel(
    key_rows,
    value_rows,
    key_centre,
    keys: Stored,
    values: Stored,
    slots,
    block_size,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Store some heads of the key or of the value of a token. `KEY_GROUP` 0: keys are int8."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    heads, dims = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, DIM)
    held = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    own = heads[:, None] * HEAD_DIM + dims[None, :]
    at = token * NUM_HEADS * HEAD_DIM + own
    if tl.program_id(2) == 1:
        numbers = tl.load(value_rows + at, mask=held, other=0.0)
        places = places_of(values, slot, block_size, heads, NUM_HEADS)
        store_int4(values, places, numbers, HEAD_DIM, DIM, STAGES, FACTOR)
    else:
        numbers = tl.load(key_rows + at, mask=held, other=0.0)
        places = places_of(keys, slot, block_size, heads, NUM_HEADS)
        if KEY_GROUP > 0:
            if key_centre is not None:
                numbers -= tl.load(key_centre + own, mask=held, other=0.0)
            store_int4(keys, places, numbers, HEAD_DIM, KEY_GROUP, STAGES, FACTOR)
        else:
            scale, factor = scale_and_factor(tl.max(size_of(numbers), 1), INT8_MOST)
            tl.store(keys.scales + places[1], scale, mask=places[1] >= 0)
            rounded = quantized(numbers, factor[:, None], True)
            tl.store(keys.numbers + places[0][:, None] + dims[None, :], rounded, mask=held)


def write_int4(
    key_rows: torch.Tensor,
    value_rows: torch.Tensor,
    key_centre: torch.Tensor | None,
    pair: KVPair,
    slots: torch.Tensor,
) -> None:
    """Store float32 keys, less their centre, and values, `[num_tokens, num_kv_heads, head_dim]`. Mutates the pair."""
    num_tokens, num_heads, head_dim = key_rows.shape
    assert pair.key_scales is not None and pair.value_scales is not None  # 4 bits have them
    if num_tokens == 0:
        return
    shape = _shape(head_dim)
    write_int4_kernel[num_tokens, triton.cdiv(num_heads, HEADS), 2](
        key_rows,
        value_rows,
        key_centre,
        Stored.of(pair.keys, pair.key_scales),
        Stored.of(pair.values, pair.value_scales),
        slots,
        pair.keys.shape[2],
        NUM_HEADS=num_heads,
        KEY_GROUP=min(INT4_GROUP, shape["DIM"]) if pair.keys.dtype is INT4 else 0,
        HEADS=HEADS,
        **shape,
        num_warps=NUM_WARPS,
        **EXACT,
    )


@triton.jit
def turn_kernel(
    rows,
    outputs,
    num_rows,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Turn some rows."""
    row, dims = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, DIM)[None, :]
    held, places = (row < num_rows) & (dims < HEAD_DIM), row * HEAD_DIM + dims
    heads = tl.load(rows + places, mask=held, other=0.0).to(tl.float32)
    turned = turned_heads(heads, DIM, STAGES, FACTOR)
    tl.store(outputs + places, turned.to(outputs.dtype.element_ty), mask=held)


def turn(heads: torch.Tensor) -> torch.Tensor:
    """Return queries or outputs, `[num_tokens, num_heads, head_dim]`, turned, in their dtype. Does not mutate."""
    heads = heads.contiguous()
    outputs, num_rows = torch.empty_like(heads), heads.shape[0] * heads.shape[1]
    if num_rows:
        grid = (triton.cdiv(num_rows, ROWS),)
        turn_kernel[grid](heads, outputs, num_rows, **_shape(heads.shape[-1]), ROWS=ROWS, num_warps=NUM_WARPS, **EXACT)
    return outputs


def _shape(head_dim: int) -> dict[str, Any]:
    stages = (head_dim & -head_dim).bit_length() - 1
    return {
        "HEAD_DIM": head_dim,
        "DIM": power_of_two(head_dim),
        "STAGES": stages,
        "FACTOR": turning_factor(head_dim),
    }


def _write_variant(head_dim: int, keys: str, *, centre: bool = False) -> KernelVariant:
    shape = _shape(head_dim)
    strides = ["i32:16"] * 5
    group = min(INT4_GROUP, shape["DIM"])
    of_keys = Stored._make(
        ["*i8:16", "*fp32:16", *strides, 1] if keys == "int8" else ["*u8:16", "*i32:16", *strides, "i32"]
    )
    return KernelVariant(
        f"write {head_dim}, {keys} keys{', less a centre' if centre else ''}",
        write_int4_kernel,
        arguments={"key_rows": "*fp32:16", "value_rows": "*fp32:16", "slots": "*i32:16", "block_size": "i32:16"}
        | ({"key_centre": "*fp32:16"} if centre else {})
        | {"keys": of_keys, "values": Stored._make(["*u8:16", "*i32:16", *strides, 1])},
        constants=shape
        | {"NUM_HEADS": 8, "KEY_GROUP": 0 if keys == "int8" else group, "HEADS": HEADS}
        | ({} if centre else {"key_centre": None}),
        num_warps=NUM_WARPS,
    )


def _turn_variant(head_dim: int) -> KernelVariant:
    return KernelVariant(
        f"turn {head_dim}",
        turn_kernel,
        arguments={"rows": "*bf16:16", "outputs": "*bf16:16", "num_rows": "i32:16"},
        constants=_shape(head_dim) | {"ROWS": ROWS},
        num_warps=NUM_WARPS,
    )


VARIANTS: Final = (
    *(_turn_variant(head_dim) for head_dim in (64, 80, 128, 256, 512)),
    *(_write_variant(head_dim, "int8") for head_dim in (64, 128, 256, 512)),
    *(_write_variant(head_dim, "int4", centre=True) for head_dim in (80, 128, 256, 512)),
    _write_variant(128, "int4"),
)
"""The forms that the compile gate compiles; see `variants`."""
