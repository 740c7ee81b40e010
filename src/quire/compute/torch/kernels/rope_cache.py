"""From the fused product of a layer to the inputs of attention, in one launch: norm, rotate, quantise, store.

    projected row of a token        q q q q q q q q │ k k │ v v          eight heads per program
    queries ─► norm ─► rotate ─► grow with the position if configured ─► queries
    keys    ─► norm ─► rotate ─► scale, int8 or e4m3 if configured ───► their slots in the KV memory
    values  ───────────────────► scale, int8 or e4m3 if configured ───► their slots

In some models, heads rotate first and are normalised then, values are normalised without weights, keys are the values
too, or a layer has queries only. With 4-bit values, keys and values become float32 rows of tokens here, and
`kernels.int4` turns and stores whole heads.

A head is held in three parts: the first of each pair, the second of each pair, and the rest that does not rotate. A sum
or maximum over a head is computed over each part, and the results are joined in one order. Everything between the load
and the store is float32 and rounds once. A program may hold heads of all three kinds: it computes all three results for
each head and keeps the one of its kind. That costs less than a program per head: a long prefill would launch a hundred
thousand.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from quire.compute.torch.attention.base import KVPair
from quire.compute.torch.int4 import INT4
from quire.compute.torch.kernels.int4 import write_int4
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

HEADS: Final = 8
NUM_WARPS: Final = 4


@triton.jit
def load_parts(start, held, HALF: tl.constexpr, REST: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr):
    """Return the three parts of rows that start at `start`, as float32, padded with 0."""
    pairs, others = tl.arange(0, HALF_BLOCK)[None, :], tl.arange(0, REST_BLOCK)[None, :]
    are_pairs, are_others = held & (pairs < HALF), held & (others < REST)
    first = tl.load(start + pairs, mask=are_pairs, other=0.0).to(tl.float32)
    second = tl.load(start + HALF + pairs, mask=are_pairs, other=0.0).to(tl.float32)
    rest = tl.load(start + 2 * HALF + others, mask=are_others, other=0.0).to(tl.float32)
    return first, second, rest


@triton.jit
def store_parts(
    start, held, parts, HALF: tl.constexpr, REST: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr
):
    """Store the three parts of rows, in the type of the target."""
    pairs, others = tl.arange(0, HALF_BLOCK)[None, :], tl.arange(0, REST_BLOCK)[None, :]
    are_pairs, are_others = held & (pairs < HALF), held & (others < REST)
    dtype: tl.constexpr = start.dtype.element_ty
    tl.store(start + pairs, parts[0].to(dtype), mask=are_pairs)
    tl.store(start + HALF + pairs, parts[1].to(dtype), mask=are_pairs)
    tl.store(start + 2 * HALF + others, parts[2].to(dtype), mask=are_others)


@triton.jit
def over_head(first, second, rest):
    """Return the sum over each head of three parts."""
    return tl.sum(first, axis=1)[:, None] + tl.sum(second, axis=1)[:, None] + tl.sum(rest, axis=1)[:, None]


@triton.jit
def normed_parts(parts, weights, epsilon, is_value, head_dim: tl.constexpr, NORMS_VALUES: tl.constexpr):
    """Return the norms of heads in three parts; values as they are, or without weights."""
    first, second, rest = parts
    length = tl.sqrt_rn(over_head(first * first, second * second, rest * rest) / head_dim + epsilon)
    normed_first, normed_second, normed_rest = first / length, second / length, rest / length
    if NORMS_VALUES:
        first, second, rest = normed_first, normed_second, normed_rest
    first = tl.where(is_value, first, weights[0] * normed_first)
    second = tl.where(is_value, second, weights[1] * normed_second)
    return first, second, tl.where(is_value, rest, weights[2] * normed_rest)


@triton.jit
def grown_queries(parts, factors, is_query):
    """Return heads in three parts: queries times the factor of their token, keys and values as they are."""
    factor = tl.where(is_query, tl.load(factors), 1.0)
    return parts[0] * factor, parts[1] * factor, parts[2] * factor


@triton.jit
def turned_parts(parts, is_value, cosines, sines, token, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr):
    """Return heads in three parts, the pairs rotated by the angles of a token; values as they are."""
    first, second, rest = parts
    pairs = tl.arange(0, HALF_BLOCK)[None, :]
    cosine = tl.load(cosines + token * HALF + pairs, mask=pairs < HALF, other=0.0)
    sine = tl.load(sines + token * HALF + pairs, mask=pairs < HALF, other=0.0)
    turned_first = tl.where(is_value, first, first * cosine - second * sine)
    return turned_first, tl.where(is_value, second, second * cosine + first * sine), rest


@triton.jit
def quantized_parts(parts, factor, IS_INT8: tl.constexpr):
    """Return the three parts of heads times the factor of each head, as int8 or e4m3."""
    first, second, rest = parts
    return quantized(first, factor, IS_INT8), quantized(second, factor, IS_INT8), quantized(rest, factor, IS_INT8)


@triton.jit
def highest_size(parts):
    """Return the largest absolute value in each head of three parts."""
    highest = tl.maximum(tl.max(size_of(parts[0]), axis=1), tl.max(size_of(parts[1]), axis=1))
    return tl.maximum(highest, tl.max(size_of(parts[2]), axis=1))[:, None]


@triton.jit
def rotate_and_write_kernel(
    projected,
    queries,
    query_weight,
    key_weight,
    cosines,
    sines,
    query_factors,
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
    NUM_SHARED: tl.constexpr,  # heads that are keys and values
    NORMED: tl.constexpr,  # no heads, queries and keys, or all
    TURNS: tl.constexpr,  # before or after the norm
    GROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Compute and store some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    head_dim: tl.constexpr = 2 * HALF + REST
    first_value: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    is_query, is_value, held = heads < NUM_HEADS, heads >= first_value, heads < first_value + NUM_KV_HEADS
    start = projected + token * projected_stride + tl.where(is_value, heads - NUM_SHARED, heads) * head_dim
    parts = load_parts(start, held, HALF, REST, HALF_BLOCK, REST_BLOCK)
    if TURNS == "before":
        parts = turned_parts(parts, is_value, cosines, sines, token, HALF, HALF_BLOCK)
    if NORMED != "":
        weight, epsilon = tl.where(is_query, query_weight, key_weight), tl.where(is_query, query_epsilon, key_epsilon)
        weights = load_parts(weight, held & (is_value == 0), HALF, REST, HALF_BLOCK, REST_BLOCK)
        parts = normed_parts(parts, weights, epsilon, is_value, head_dim, NORMED == "all")
    if TURNS == "after":
        parts = turned_parts(parts, is_value, cosines, sines, token, HALF, HALF_BLOCK)
    if GROWS:
        parts = grown_queries(parts, query_factors + token, is_query)
    store_parts(queries + (token * NUM_HEADS + heads) * head_dim, is_query, parts, HALF, REST, HALF_BLOCK, REST_BLOCK)

    slot = tl.load(slots + token).to(tl.int64)
    block, offset, kv_heads = slot // block_size, slot % block_size, (heads - NUM_HEADS) % max(1, NUM_KV_HEADS)
    if FORMAT == "rows":
        block, offset = token, token * 0
    is_key, is_value = (is_query == 0) & (is_value == 0) & (slot >= 0), is_value & held & (slot >= 0)
    if FORMAT == "int8" or FORMAT == "fp8":  # noqa: PLR1714  not every Triton has `in`
        scale, factor = scale_and_factor(highest_size(parts), INT8_MOST if FORMAT == "int8" else FP8_MOST)
        parts = quantized_parts(parts, factor, FORMAT == "int8")
        place = block * scale_block_stride + kv_heads * scale_head_stride + offset * scale_token_stride
        tl.store(key_scales + place, scale, mask=is_key)
        tl.store(value_scales + place, scale, mask=is_value)
    place = block * block_stride + kv_heads * head_stride + offset * token_stride
    store_parts(keys + place, is_key, parts, HALF, REST, HALF_BLOCK, REST_BLOCK)
    store_parts(values + place, is_value, parts, HALF, REST, HALF_BLOCK, REST_BLOCK)


def rotate_and_write(
    projected: torch.Tensor, form: HeadForm, angles: Angles | None, pair: KVPair, slots: torch.Tensor
) -> torch.Tensor:
    """Normalise and rotate queries and keys, store keys and values; return the queries. Mutates the slots of the pair.

    Like `Operations.rotate_and_write`, for RMS norms without a bias. There may be gaps between rows of `projected`.
    """
    if form.num_kv_heads == 0:  # nothing is stored
        return _rotate(projected, form, angles, pair, slots, "plain")
    if pair.values.dtype is not INT4:
        format_ = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(pair.keys.dtype, "plain")
        return _rotate(projected, form, angles, pair, slots, format_)
    rows = projected.new_empty((2, len(projected), form.num_kv_heads, 1, form.head_dim), dtype=torch.float32)
    queries = _rotate(projected, form, angles, KVPair(rows[0], rows[1]), slots, "rows")
    write_int4(rows[0, :, :, 0], rows[1, :, :, 0], form.key_centre, pair, slots)
    return queries


def _rotate(
    projected: torch.Tensor,
    form: HeadForm,
    angles: Angles | None,
    pair: KVPair,
    slots: torch.Tensor,
    format_: str,
) -> torch.Tensor:
    """Return the queries. Mutates the slots of the pair; if the format is "rows", the rows of the tokens."""
    num_tokens = len(projected)
    queries = projected.new_empty((num_tokens, form.num_heads, form.head_dim))
    if num_tokens == 0:
        return queries
    # Programs write through one set of strides.
    assert not form.num_kv_heads or pair.keys.stride() == pair.values.stride()
    query_norm, key_norm = (
        form.query_norm,
        form.key_norm or form.query_norm,
    )  # a layer without keys has no norm for them
    scales = pair.keys if pair.key_scales is None else pair.key_scales
    rotary_dim = 0 if angles is None else 2 * angles.cosines.shape[-1]
    grid = (num_tokens, triton.cdiv(form.num_heads + 2 * form.num_kv_heads, HEADS))
    rotate_and_write_kernel[grid](
        projected,
        queries,
        None if query_norm is None else query_norm.weight,
        None if key_norm is None else key_norm.weight,
        None if angles is None else angles.cosines,
        None if angles is None else angles.sines,
        None if angles is None else angles.query_factors,
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
        NUM_SHARED=form.num_kv_heads if form.keys_are_values else 0,
        NORMED="" if query_norm is None else "keys" if form.value_norm is None else "all",
        TURNS="" if rotary_dim == 0 else "before" if form.rotates_first else "after",
        GROWS=angles is not None and angles.query_factors is not None,
        FORMAT=format_,
        **_parts(form.head_dim, rotary_dim or form.head_dim),
        HEADS=HEADS,
        num_warps=_num_warps(form.head_dim),
        **EXACT,
    )
    return queries


WIDEST: Final = 256
"""Heads of more numbers need twice the warps."""


def _num_warps(head_dim: int) -> int:
    return NUM_WARPS if head_dim <= WIDEST else 2 * NUM_WARPS


def _parts(head_dim: int, rotary_dim: int) -> dict[str, Any]:
    half = rotary_dim // 2
    rest = head_dim - 2 * half
    blocks = {"HALF_BLOCK": triton.next_power_of_2(half), "REST_BLOCK": triton.next_power_of_2(max(1, rest))}
    return {"HALF": half, "REST": rest} | blocks


TURNS_FIRST, GROWS, QUERIES = "turns before the norm", "growing", "queries only"
VALUES_TOO, SHARED = "values too", "values too, which are the keys"
"""What only some families do; see `_variant`."""


def _variant(
    head_dim: int, rotary_dim: int, dtype: str, stored: str, *, norms: bool = False, extra: str = ""
) -> KernelVariant:
    # float32 numbers are compiled as rows.
    format_ = {"i8": "int8", "fp8e4nv": "fp8", "fp32": "rows"}.get(stored, "plain")
    scale = "*fp32:16" if format_ in ("int8", "fp8") else f"*{stored}:16"
    arguments = {name: f"*{dtype}:16" for name in ("projected", "queries")} | {"slots": "*i32:16"}
    arguments |= dict.fromkeys(("keys", "values"), f"*{stored}:16") | dict.fromkeys(
        ("key_scales", "value_scales"), scale
    )
    strides = ("projected", "block", "head", "token", "scale_block", "scale_head")
    arguments |= {f"{name}_stride": "i32:16" for name in strides} | {"block_size": "i32:16"}
    arguments |= dict.fromkeys(("query_epsilon", "key_epsilon"), "fp32")
    optional = dict.fromkeys(("query_weight", "key_weight"), norms) | {"query_factors": extra == GROWS}
    optional |= dict.fromkeys(("cosines", "sines"), rotary_dim > 0)
    arguments |= {name: "*fp32:16" for name, is_there in optional.items() if is_there}
    constants = {name: None for name, is_there in optional.items() if not is_there}
    constants |= _parts(head_dim, rotary_dim or head_dim) | {
        "scale_token_stride": 1,
        "NUM_HEADS": 32,
        "NUM_KV_HEADS": 0 if extra == QUERIES else 8,
        "NUM_SHARED": 8 if extra == SHARED else 0,
        "HEADS": HEADS,
    }
    normed = "" if not norms else "all" if extra in (VALUES_TOO, SHARED) else "keys"
    turns = ("before" if extra == TURNS_FIRST else "after") if rotary_dim else ""
    return KernelVariant(
        f"{head_dim} dims, {rotary_dim} turn{', normed' * norms}{extra and ', '}{extra}, {dtype} to {stored}",
        rotate_and_write_kernel,
        arguments=arguments,
        constants=constants | {"NORMED": normed, "TURNS": turns, "GROWS": extra == GROWS, "FORMAT": format_},
        num_warps=_num_warps(head_dim),
        min_wide_share=0.5 if head_dim > 64 else 0.0,  # half a small head is too little for all threads
        capabilities=(90, 100) if format_ == "fp8" else (80, 90, 100),
    )


VARIANTS = (
    _variant(128, 128, "bf16", "bf16"),
    _variant(128, 128, "bf16", "bf16", extra=GROWS),
    _variant(128, 128, "bf16", "bf16", norms=True),
    _variant(128, 128, "bf16", "bf16", norms=True, extra=TURNS_FIRST),
    _variant(128, 128, "fp16", "fp16", norms=True),
    _variant(128, 128, "bf16", "i8", norms=True),
    _variant(128, 128, "bf16", "fp8e4nv", norms=True),
    _variant(128, 128, "bf16", "fp32", norms=True),
    _variant(256, 256, "bf16", "bf16", norms=True),
    _variant(256, 256, "bf16", "i8", norms=True),
    _variant(256, 256, "bf16", "bf16", norms=True, extra=VALUES_TOO),
    _variant(512, 512, "bf16", "bf16", norms=True, extra=VALUES_TOO),
    _variant(512, 512, "bf16", "bf16", norms=True, extra=SHARED),
    _variant(512, 512, "bf16", "bf16", norms=True, extra=QUERIES),
    _variant(512, 512, "bf16", "i8", norms=True, extra=VALUES_TOO),
    _variant(512, 512, "bf16", "fp32", norms=True, extra=VALUES_TOO),
    _variant(96, 72, "bf16", "bf16"),
    _variant(80, 80, "bf16", "i8"),
    _variant(64, 0, "fp16", "fp16"),
    _variant(64, 64, "bf16", "bf16"),
)
"""The forms that the compile gate compiles; see `variants`."""
