"""From the fused product of a layer to what attention reads, in one launch: norm, turn, quantise, store.

    projected row of a token        q q q q q q q q │ k k │ v v          one program a head
    queries ─► norm ─► turn ──────────────────────────────────────────► queries
    keys    ─► norm ─► turn ─► its scale, int8 or e4m3 where asked ───► their slots in the KV memory
    values  ─────────────────► its scale, int8 or e4m3 where asked ───► their slots

A head is held in three parts: the first of each pair, the second of each pair, and the rest that does not turn. Where
sums are taken over a head (norms, the highest size), they are taken over the parts and then added, in one order.
Everything between the load and the store is float32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire.compute.torch.attention.base import KVPair
from quire.compute.torch.kernels.quantize import (
    EXACT,
    FP8_MOST,
    INT8_MOST,
    quantized,
    scale_and_factor,
    size_of,
)
from quire.compute.torch.kernels.variants import KernelVariant
from quire.compute.torch.operations import Angles, HeadForm


@triton.jit
def load_head(start, HALF: tl.constexpr, REST: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr):
    """Return the three parts of a head as float32; places beyond them are 0."""
    pairs, others = tl.arange(0, HALF_BLOCK), tl.arange(0, REST_BLOCK)
    first = tl.load(start + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
    second = tl.load(start + HALF + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
    rest = tl.load(start + 2 * HALF + others, mask=others < REST, other=0.0).to(tl.float32)
    return first, second, rest


@triton.jit
def store_head(
    start, parts, HALF: tl.constexpr, REST: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr
):
    """Store the three parts of a head, in the type of where they go."""
    pairs, others = tl.arange(0, HALF_BLOCK), tl.arange(0, REST_BLOCK)
    tl.store(start + pairs, parts[0].to(start.dtype.element_ty), mask=pairs < HALF)
    tl.store(start + HALF + pairs, parts[1].to(start.dtype.element_ty), mask=pairs < HALF)
    tl.store(start + 2 * HALF + others, parts[2].to(start.dtype.element_ty), mask=others < REST)


@triton.jit
def store_kv(
    start,
    scale_place,
    parts,
    FORMAT: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Store a key or a value, quantised with a scale of its own where the format asks for it."""
    if FORMAT == "plain":
        store_head(start, parts, HALF, REST, HALF_BLOCK, REST_BLOCK)
    else:
        highest = tl.maximum(tl.max(size_of(parts[0])), tl.max(size_of(parts[1])))
        highest = tl.maximum(highest, tl.max(size_of(parts[2])))
        scale, factor = scale_and_factor(highest, INT8_MOST if FORMAT == "int8" else FP8_MOST)
        first = quantized(parts[0], factor, FORMAT == "int8")
        second = quantized(parts[1], factor, FORMAT == "int8")
        rest = quantized(parts[2], factor, FORMAT == "int8")
        store_head(start, (first, second, rest), HALF, REST, HALF_BLOCK, REST_BLOCK)
        tl.store(scale_place, scale)


@triton.jit
def rotate_and_write_kernel(
    projected,
    queries,
    query_weight,
    key_weight,
    cosines,
    sines,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    projected_stride,
    block_stride,
    head_stride,
    token_stride,
    scale_block_stride,
    scale_head_stride,
    scale_token_stride,
    block_size,
    query_epsilon,
    key_epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    TURNS: tl.constexpr,
    FORMAT: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Bring one head of one token where it belongs."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head_dim: tl.constexpr = 2 * HALF + REST
    start = projected + token * projected_stride + head * head_dim
    first, second, rest = load_head(start, HALF, REST, HALF_BLOCK, REST_BLOCK)
    pairs, others = tl.arange(0, HALF_BLOCK), tl.arange(0, REST_BLOCK)
    if HAS_NORM and head < NUM_HEADS + NUM_KV_HEADS:
        epsilon = tl.where(head < NUM_HEADS, query_epsilon, key_epsilon)
        total = tl.sum(first * first) + tl.sum(second * second) + tl.sum(rest * rest)
        length = tl.sqrt_rn(total / head_dim + epsilon)
        weight = query_weight
        if head >= NUM_HEADS:
            weight = key_weight
        first = tl.load(weight + pairs, mask=pairs < HALF, other=0.0) * (first / length)
        second = tl.load(weight + HALF + pairs, mask=pairs < HALF, other=0.0) * (second / length)
        rest = tl.load(weight + 2 * HALF + others, mask=others < REST, other=0.0) * (rest / length)
    if TURNS and head < NUM_HEADS + NUM_KV_HEADS:
        cosine = tl.load(cosines + token * HALF + pairs, mask=pairs < HALF, other=0.0)
        sine = tl.load(sines + token * HALF + pairs, mask=pairs < HALF, other=0.0)
        turned = first * cosine - second * sine
        second = second * cosine + first * sine
        first = turned
    parts = (first, second, rest)
    if head < NUM_HEADS:
        target = queries + (token * NUM_HEADS + head) * head_dim
        store_head(target, parts, HALF, REST, HALF_BLOCK, REST_BLOCK)
    slot = tl.load(slots + token).to(tl.int64)
    if (head >= NUM_HEADS) & (slot >= 0):
        kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
        block, offset = slot // block_size, slot % block_size
        place = block * block_stride + kv_head * head_stride + offset * token_stride
        scale_place = block * scale_block_stride + kv_head * scale_head_stride + offset * scale_token_stride
        if head < NUM_HEADS + NUM_KV_HEADS:
            store_kv(keys + place, key_scales + scale_place, parts, FORMAT, HALF, REST, HALF_BLOCK, REST_BLOCK)
        else:
            store_kv(values + place, value_scales + scale_place, parts, FORMAT, HALF, REST, HALF_BLOCK, REST_BLOCK)


def rotate_and_write(
    projected: torch.Tensor, form: HeadForm, angles: Angles | None, pair: KVPair, slots: torch.Tensor
) -> torch.Tensor:
    """Norm and turn queries and keys, store keys and values; return the queries. Mutates the slots of the pair.

    As `Operations.rotate_and_write`, for norms by root mean square without a bias. Rows of `projected` may lie apart.
    """
    num_tokens = len(projected)
    queries = projected.new_empty((num_tokens, form.num_heads, form.head_dim))
    if num_tokens == 0:
        return queries
    # Programs write through one set of strides.
    assert pair.keys.stride() == pair.values.stride()
    query_norm, key_norm = form.query_norm, form.key_norm
    format_ = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(pair.keys.dtype, "plain")
    scales = pair.keys if pair.key_scales is None else pair.key_scales
    rotate_and_write_kernel[(num_tokens, form.num_heads + 2 * form.num_kv_heads)](
        projected,
        queries,
        None if query_norm is None else query_norm.weight,
        None if key_norm is None else key_norm.weight,
        None if angles is None else angles.cosines,
        None if angles is None else angles.sines,
        pair.keys,
        pair.values,
        scales,
        pair.values if pair.value_scales is None else pair.value_scales,
        slots,
        projected.stride(0),
        *pair.keys.stride()[:3],
        *scales.stride()[:3],
        pair.keys.shape[2],
        0.0 if query_norm is None else query_norm.epsilon,
        0.0 if key_norm is None else key_norm.epsilon,
        NUM_HEADS=form.num_heads,
        NUM_KV_HEADS=form.num_kv_heads,
        HAS_NORM=query_norm is not None,
        TURNS=angles is not None,
        FORMAT=format_,
        **_parts(form.head_dim, form.head_dim if angles is None else 2 * angles.cosines.shape[-1]),
        num_warps=1,
        **EXACT,
    )
    return queries


def _parts(head_dim: int, rotary_dim: int) -> dict[str, Any]:
    half = rotary_dim // 2
    rest = head_dim - 2 * half
    blocks = {"HALF_BLOCK": triton.next_power_of_2(half), "REST_BLOCK": triton.next_power_of_2(max(1, rest))}
    return {"HALF": half, "REST": rest} | blocks


def _variant(head_dim: int, rotary_dim: int, dtype: str, stored: str, *, norms: bool = False) -> KernelVariant:
    format_ = {"i8": "int8", "fp8e4nv": "fp8"}.get(stored, "plain")
    scale = f"*{stored}:16" if format_ == "plain" else "*fp32:16"
    arguments = {name: f"*{dtype}:16" for name in ("projected", "queries")} | {"slots": "*i32:16"}
    arguments |= dict.fromkeys(("keys", "values"), f"*{stored}:16") | dict.fromkeys(
        ("key_scales", "value_scales"), scale
    )
    strides = ("projected", "block", "head", "token", "scale_block", "scale_head")
    arguments |= {f"{name}_stride": "i32:16" for name in strides} | {"block_size": "i32:16"}
    arguments |= dict.fromkeys(("query_epsilon", "key_epsilon"), "fp32")
    optional = dict.fromkeys(("query_weight", "key_weight"), norms) | dict.fromkeys(
        ("cosines", "sines"), rotary_dim > 0
    )
    arguments |= {name: "*fp32:16" for name, is_there in optional.items() if is_there}
    constants = {name: None for name, is_there in optional.items() if not is_there}
    constants |= _parts(head_dim, rotary_dim or head_dim) | {
        "scale_token_stride": 1,
        "NUM_HEADS": 32,
        "NUM_KV_HEADS": 8,
    }
    return KernelVariant(
        f"{head_dim} dims, {rotary_dim} turn{', normed' if norms else ''}, {dtype} to {stored}",
        rotate_and_write_kernel,
        arguments=arguments,
        constants=constants | {"HAS_NORM": norms, "TURNS": rotary_dim > 0, "FORMAT": format_},
        num_warps=1,
        min_wide_share=0.0,  # a head is small: its parts are loaded by 4 or 8 bytes a thread
        capabilities=(90, 100) if format_ == "fp8" else (80, 90, 100),
    )


VARIANTS = (
    _variant(128, 128, "bf16", "bf16"),
    _variant(128, 128, "bf16", "bf16", norms=True),
    _variant(128, 128, "fp16", "fp16", norms=True),
    _variant(128, 128, "bf16", "i8", norms=True),
    _variant(128, 128, "bf16", "fp8e4nv", norms=True),
    _variant(256, 256, "bf16", "bf16", norms=True),
    _variant(256, 256, "bf16", "i8", norms=True),
    _variant(96, 72, "bf16", "bf16"),
    _variant(80, 80, "bf16", "i8"),
    _variant(64, 0, "fp16", "fp16"),
)
"""What the compile gate compiles; see `variants`."""
