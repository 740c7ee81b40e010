"""Paged attention: one kernel for decodes, for chunks of prompts, and for a prefix that many rows share.

A program has a *task*: some tokens, a span of positions of one block table, and one KV head. Rows of its products are
(token, head of the group), so that keys and values are loaded once for all of them. It loops over tiles of positions:

    positions    0 … 63 │ 64 … 127 │ 128 … 191 │ 192 … 255 ║ 256 …        tile: 64 positions; ║: a split ends
    ids          carried ──► loaded a tile ahead ──► …
    keys         · cp.async ──► tile ──► scores = q·k ──► weights = exp2(scores − highest)
    values       · cp.async ──► tile ──────────────────► sums = sums × keep + weights·v
    masks        the tiles where a window begins, none, … none, the tiles where tokens end

To keep the pipeline, the ids of the next tile's blocks are loaded one tile ahead and carried through the loop. If ids
and keys were loaded in the same turn, Triton 3.6 would silently give up the overlap.

Numbers of 4 bits are unpacked in registers; queries and outputs are turned by other launches (`kernels.int4`). A key is
n × scale + minimum, rounded to the dtype of queries. Values count from 7.5, as in the native kernel:

    sum of w × value  =  sum of (w × scale) × (n - 7.5)  +  sum of w × (7.5 × scale + minimum), the same for all numbers

To keep the bits, tiles begin at absolute positions, the order of a row's sums depends on its own positions, a position
that a row does not see adds an exact zero, and the sums of each split are folded (`merge`) as if another program had
computed them. So a row's bits depend neither on the other rows of its tile, nor on how many programs shared its splits.
They do depend on `TileShape`: the rows of a tile determine the matrix instruction.

Rejected: separate kernels for decodes and prompts (they would differ only in how a task is made, which is data here);
tokens as consecutive rows only (a shared prefix has rows from many sequences).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from quire.compute.torch.attention.base import AttentionRule, KVPair
from quire.compute.torch.kernels.merge import Results, fold, in_launches, with_sink
from quire.compute.torch.kernels.tile_shape import WIDEST, TileShape, Use
from quire.compute.torch.kernels.variants import KernelVariant
from quire.core.kv_spec import INT4_GROUP, INT4_VALUES

LOG2_E: Final = math.log2(math.e)
TANH_SCALE: Final = tl.constexpr(2 * LOG2_E)
KEY_GROUP: Final = tl.constexpr(INT4_GROUP)
VALUE_CENTRE: Final = tl.constexpr(7.5)
TASK_COLUMNS: Final = tl.constexpr(5)
"""The columns of a task: first entry, number of entries, offset of its block table, first position, end position."""


class Queries(NamedTuple):
    """Queries, `[num_tokens, num_heads, head_dim]`, the position of each token, and the last one that it sees.

    `lasts` None: the last one is the token's own.
    """

    numbers: torch.Tensor
    positions: torch.Tensor  # int32 [num_tokens]
    token_stride: int
    head_stride: int
    lasts: torch.Tensor | None  # int32 [num_tokens]

    @classmethod
    def of(cls, queries: torch.Tensor, positions: torch.Tensor, lasts: torch.Tensor | None = None) -> Queries:
        """Return queries in the form that kernels take."""
        return cls(queries, positions, queries.stride(0), queries.stride(1), lasts)


class Cache(NamedTuple):
    """A layer's keys and values, `[num_blocks, num_kv_heads, block_size, head_dim]`, and its block tables.

    uint8: two 4-bit numbers a byte, with words as scales. The scales of the tokens of a head are adjacent, and keys and
    values have the same strides from block to block.
    """

    key_data: torch.Tensor
    value_data: torch.Tensor
    key_scales: torch.Tensor | None  # [num_blocks, num_kv_heads, block_size], or [..., num_groups]
    value_scales: torch.Tensor | None
    tables: torch.Tensor  # int32, one table after another
    block_stride: int
    key_head_stride: int
    key_token_stride: int
    value_head_stride: int
    value_token_stride: int
    scale_block_stride: int
    key_scale_head_stride: int
    value_scale_head_stride: int

    @classmethod
    def of(cls, pair: KVPair, tables: torch.Tensor) -> Cache:
        """Return the memory of a layer in the form that kernels take."""
        keys, values, key_scales, value_scales = pair.keys, pair.values, pair.key_scales, pair.value_scales
        block, head, token, _ = keys.stride()
        _, value_head, value_token, _ = values.stride()
        scale_block, key_scale_head, value_scale_head = 0, 0, 0
        if key_scales is not None and value_scales is not None:
            scale_block, key_scale_head, value_scale_head = (
                key_scales.stride(0),
                key_scales.stride(1),
                value_scales.stride(1),
            )
        memory = keys, values, key_scales, value_scales, tables
        strides = block, head, token, value_head, value_token, scale_block, key_scale_head, value_scale_head
        return cls(*memory, *strides)


class Work(NamedTuple):
    """A work list: tasks, and their entries: a token each, and the place of its part; -1: the output itself."""

    tasks: torch.Tensor  # int32 [num_tasks, TASK_COLUMNS]
    tokens: torch.Tensor  # int32 [num_entries]
    parts: torch.Tensor  # int32 [num_entries]


class Weighting(NamedTuple):
    """How products become weights: 2^(exponent_scale × s), where s = product, or tanh(cap_scale × product)."""

    exponent_scale: float
    cap_scale: float | None
    window: int | None
    sinks: torch.Tensor | None  # float32 [num_heads]: weights 2^(log2(e) × sink) without a value

    @classmethod
    def of(cls, rule: AttentionRule) -> Weighting:
        """Return the weighting of a rule.

        >>> round(Weighting.of(AttentionRule(0.5)).exponent_scale, 4)
        0.7213
        >>> Weighting.of(AttentionRule(0.5, window=8, soft_cap=2.0)).cap_scale
        0.25
        """
        if rule.soft_cap is None:
            return cls(rule.scale * LOG2_E, None, rule.window, rule.sinks)
        return cls(rule.soft_cap * LOG2_E, rule.scale / rule.soft_cap, rule.window, rule.sinks)


class Span(NamedTuple):
    """Positions of a task, within kernels: those that some row sees, and the tiles that every row sees in full."""

    first: tl.tensor
    stop: tl.tensor
    first_tile: tl.tensor
    first_full: tl.tensor
    end_full: tl.tensor


class Task(NamedTuple):
    """The queries and positions of a program, within kernels."""

    query: tl.tensor  # [rows, padded_dim]
    positions: tl.tensor  # [rows]
    lasts: tl.tensor | None  # [rows]
    cache: Cache
    table: tl.tensor
    head: tl.tensor
    span: Span
    rule: Weighting


@triton.jit
def span_of(bounds, positions, lasts, real, window, SHAPE: tl.constexpr):
    """Return the span of a task with these bounds, whose `real` rows have these positions, and see up to `lasts`."""
    start, stop = bounds
    highest = tl.max(positions)
    lowest = tl.min(tl.where(real, positions, highest))
    first, full = start, start
    if window is not None:
        first = tl.maximum(start, lowest - window + 1)
        full = tl.maximum(start, highest - window + 1)
    if lasts is not None:
        highest = tl.max(lasts)
        lowest = tl.min(tl.where(real, lasts, highest))
    stop = tl.minimum(stop, highest + 1)
    first_tile = first // SHAPE.tokens * SHAPE.tokens
    first_full = (full + SHAPE.tokens - 1) // SHAPE.tokens * SHAPE.tokens
    first_full = tl.maximum(first_tile, tl.minimum(first_full, stop))
    end_full = tl.maximum(first_full, tl.minimum(stop, lowest + 1) // SHAPE.tokens * SHAPE.tokens)
    return Span(first, stop, first_tile, first_full, end_full)


@triton.jit
def block_ids(task: Task, start, SHAPE: tl.constexpr):
    """Return the block of each position of a tile; after the last position, the block of the last one."""
    blocks = (start + tl.arange(0, SHAPE.tokens)) // SHAPE.block_size
    if SHAPE.paged:
        ids = tl.load(task.table + tl.minimum(blocks, (task.span.stop - 1) // SHAPE.block_size))
    else:
        ids = task.table + blocks
    return ids


@triton.jit
def load_tile(data, places, readable, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Return a tile of `WIDTH` columns, `[tokens, PADDED]`, zero where it is not readable."""
    dims = tl.arange(0, PADDED)
    pointers = data + (places[:, None] + dims[None, :])
    if MASKED:
        tile = tl.load(pointers, mask=readable[:, None] & (dims < WIDTH)[None, :], other=0.0)
    elif PADDED > WIDTH:
        tile = tl.load(pointers, mask=(dims < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_int4(data, places, readable, SHAPE: tl.constexpr, MASKED: tl.constexpr):
    """Return a tile of 4-bit numbers as float32, `[tokens, padded_dim]`."""
    tile = load_tile(data, places, readable, SHAPE.head_dim // 2, SHAPE.padded_dim // 2, MASKED)
    return tl.interleave(tile & 15, tile >> 4).to(tl.float32)


@triton.jit
def scales_and_minimums(words):
    """Return the scales and the minimums in the words of groups, float32."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def load_int4_keys(cache: Cache, places, scale_places, readable, SHAPE: tl.constexpr, MASKED: tl.constexpr):
    """Return a tile of keys of 4 bits, turned, as float32; `scale_places`: the first group of each token."""
    group: tl.constexpr = min(KEY_GROUP, SHAPE.padded_dim)
    num_groups: tl.constexpr = SHAPE.padded_dim // group
    real_groups: tl.constexpr = (SHAPE.head_dim + group - 1) // group
    words = load_tile(cache.key_scales, scale_places, readable, real_groups, num_groups, MASKED)
    scales, minimums = scales_and_minimums(words)
    numbers = load_int4(cache.key_data, places, readable, SHAPE, MASKED)
    grouped = tl.reshape(numbers, [SHAPE.tokens, num_groups, group])
    keys = tl.fma(grouped, scales[:, :, None], minimums[:, :, None])
    return tl.reshape(keys, [SHAPE.tokens, SHAPE.padded_dim])


@triton.jit
def load_scales(data, places, readable, MASKED: tl.constexpr):
    """Return the scales of a tile of keys or values, `[tokens]`."""
    return tl.load(data + places, mask=readable, other=0.0) if MASKED else tl.load(data + places)


@triton.jit
def weigh(part, scores, rule: Weighting, MASKED: tl.constexpr):
    """Return the weights of a tile's scores, and highest, total and sums rescaled to them, without its values.

    Masked scores are -inf. If all of a row's scores are, its weights are zero.
    """
    highest = tl.maximum(part[0], tl.max(scores, 1))
    finite = highest
    if MASKED:
        finite = tl.where(highest == float("-inf"), 0.0, highest)
    # fma, not a product and a sum: the compiler could contract those only in tiles without masks.
    shift = -(finite * rule.exponent_scale)
    weights = tl.exp2(tl.fma(scores, rule.exponent_scale, shift[:, None]))
    keep = tl.exp2((part[0] - finite) * rule.exponent_scale)
    return weights, highest, tl.fma(part[1], keep, tl.sum(weights, 1)), part[2] * keep[:, None]


@triton.jit
def empty_part(SHAPE: tl.constexpr):
    """Return (highest, total, sums) of rows that have seen no token."""
    highest = tl.full([SHAPE.rows], float("-inf"), tl.float32)
    total = tl.full([SHAPE.rows], 0.0, tl.float32)
    return highest, total, tl.full([SHAPE.rows, SHAPE.padded_dim], 0.0, tl.float32)


@triton.jit
def attend_tile(task: Task, part, blocks, start, SHAPE: tl.constexpr, MASKED: tl.constexpr):
    """Return (highest, total, sums) with one more tile."""
    cache, span, rule = task.cache, task.span, task.rule
    positions = start + tl.arange(0, SHAPE.tokens)
    offsets = positions % SHAPE.block_size
    readable = (positions >= span.first) & (positions < span.stop)
    block, scale_block = blocks.to(tl.int64) * cache.block_stride, blocks.to(tl.int64) * cache.scale_block_stride
    places = block + (task.head * cache.key_head_stride + offsets * cache.key_token_stride)
    if cache.key_data.dtype.element_ty == tl.uint8:
        num_groups: tl.constexpr = (SHAPE.head_dim + KEY_GROUP - 1) // KEY_GROUP
        scale_places = scale_block + (task.head * cache.key_scale_head_stride + offsets * num_groups)
        keys = load_int4_keys(cache, places, scale_places, readable, SHAPE, MASKED)
    else:
        keys = load_tile(cache.key_data, places, readable, SHAPE.head_dim, SHAPE.padded_dim, MASKED)
    if cache.key_data.dtype.element_ty != cache.value_data.dtype.element_ty:  # else the same, without more registers
        places = block + (task.head * cache.value_head_stride + offsets * cache.value_token_stride)
    if cache.value_data.dtype.element_ty == tl.uint8:
        values = load_int4(cache.value_data, places, readable, SHAPE, MASKED) - VALUE_CENTRE
    else:
        values = load_tile(cache.value_data, places, readable, SHAPE.head_dim, SHAPE.padded_dim, MASKED)
    scores = tl.dot(task.query, tl.trans(keys.to(task.query.dtype)), input_precision="ieee")  # [rows, tokens]
    if cache.key_scales is not None and cache.key_data.dtype.element_ty != tl.uint8:
        scale_places = scale_block + (task.head * cache.key_scale_head_stride + offsets)
        scores *= load_scales(cache.key_scales, scale_places, readable, MASKED)[None, :]
    if rule.cap_scale is not None:
        scores = 1 - 2 / (1 + tl.exp2(scores * (TANH_SCALE * rule.cap_scale)))  # tanh
    if MASKED:
        lasts = task.positions
        if task.lasts is not None:
            lasts = task.lasts
        seen = positions[None, :] <= lasts[:, None]
        if rule.window is not None:
            seen &= positions[None, :] > (task.positions - rule.window)[:, None]
        scores = tl.where(seen, scores, float("-inf"))
    weights, highest, total, sums = weigh(part, scores, rule, MASKED)
    if cache.value_scales is not None:
        scale_places = scale_block + (task.head * cache.value_scale_head_stride + offsets)
        scales = load_scales(cache.value_scales, scale_places, readable, MASKED)
        if cache.value_data.dtype.element_ty == tl.uint8:
            scales, minimums = scales_and_minimums(scales)
            # fma, for the same reason as in `weigh`: this product is added up at once.
            sums += tl.sum(tl.fma(weights, tl.fma(scales, VALUE_CENTRE, minimums)[None, :], 0.0), 1)[:, None]
        weights *= scales[None, :]
    sums = tl.dot(weights.to(task.query.dtype), values.to(task.query.dtype), sums, input_precision="ieee")
    return highest, total, sums


@triton.jit
def attend_tiles(task: Task, state, start, end, SHAPE: tl.constexpr, MASKED: tl.constexpr):
    """Return the state, (results of earlier splits, of the current split), with tiles from `start` to `end`."""
    whole, part = state
    ahead = block_ids(task, start, SHAPE)
    for tile in tl.range(start, end, SHAPE.tokens):
        blocks = ahead
        ahead = block_ids(task, tile + SHAPE.tokens, SHAPE)
        if tile % SHAPE.split == 0:
            whole = fold(whole, part, task.rule.exponent_scale)
            part = empty_part(SHAPE)
        part = attend_tile(task, part, blocks, tile, SHAPE, MASKED)
    return whole, part


@triton.jit
def store(results: Results, entries, rows, part, rule: Weighting, SHAPE: tl.constexpr):
    """Write the outputs of rows that are complete, and the parts of the others; `entries` are (token, part or -1)."""
    tokens, parts = entries
    real, heads = rows
    highest, total, sums = part
    dims = tl.arange(0, SHAPE.padded_dim)
    whole, partial = real & (parts < 0), real & (parts >= 0)
    all_weights = total
    if rule.sinks is not None:
        all_weights = with_sink(highest, total, tl.load(rule.sinks + heads, mask=real, other=0.0), rule.exponent_scale)
    outputs = (sums / tl.where(all_weights == 0, 1, all_weights)[:, None]).to(results.outputs.dtype.element_ty)
    places = (tokens * results.token_stride + heads * results.head_stride)[:, None] + dims[None, :]
    tl.store(results.outputs + places, outputs, mask=whole[:, None] & (dims < SHAPE.head_dim)[None, :])
    places = parts.to(tl.int64) * results.num_heads + heads
    tl.store(results.part_norms + places * 2, highest, mask=partial)
    tl.store(results.part_norms + places * 2 + 1, total, mask=partial)
    places = places[:, None] * SHAPE.head_dim + dims[None, :]
    tl.store(results.part_sums + places, sums, mask=partial[:, None] & (dims < SHAPE.head_dim)[None, :])


@triton.jit
def attend_kernel(queries: Queries, cache: Cache, work: Work, results: Results, rule: Weighting, SHAPE: tl.constexpr):
    """Compute one task for one KV head."""
    head = tl.program_id(0)
    fields = work.tasks + tl.program_id(1) * TASK_COLUMNS
    first_entry, num_entries = tl.load(fields), tl.load(fields + 1)
    if num_entries == 0:
        return
    table = tl.load(fields + 2)
    if SHAPE.paged:
        table = cache.tables + table
    index, dims = tl.arange(0, SHAPE.rows), tl.arange(0, SHAPE.padded_dim)
    entry, heads = first_entry + index // SHAPE.group, head * SHAPE.group + index % SHAPE.group
    real = index // SHAPE.group < num_entries
    tokens = tl.load(work.tokens + entry, mask=real, other=0)
    positions = tl.load(queries.positions + tokens, mask=real, other=0)
    lasts = queries.lasts
    if queries.lasts is not None:
        lasts = tl.load(queries.lasts + tokens, mask=real, other=0)
    places = (tokens * queries.token_stride + heads * queries.head_stride)[:, None] + dims[None, :]
    query = tl.load(queries.numbers + places, mask=real[:, None] & (dims < SHAPE.head_dim)[None, :], other=0.0)
    bounds = tl.load(fields + 3), tl.load(fields + 4)
    span = span_of(bounds, positions, lasts, real, rule.window, SHAPE)
    task = Task(query, positions, lasts, cache, table, head, span, rule)
    state = empty_part(SHAPE), empty_part(SHAPE)
    if rule.window is not None:
        state = attend_tiles(task, state, span.first_tile, span.first_full, SHAPE, True)
    state = attend_tiles(task, state, span.first_full, span.end_full, SHAPE, False)
    whole, part = attend_tiles(task, state, span.end_full, span.stop, SHAPE, True)
    part = fold(whole, part, rule.exponent_scale)
    parts = tl.load(work.parts + entry, mask=real, other=-1)
    store(results, (tokens, parts), (real, heads), part, rule, SHAPE)


def attend(shape: TileShape, queries: Queries, cache: Cache, work: Work, results: Results, rule: Weighting) -> None:
    """Compute the tasks of a work list. Mutates only the outputs and parts of their tokens."""
    for tasks in in_launches(work.tasks):
        attend_kernel[results.num_heads // shape.group, len(tasks)](
            *(queries, cache, work._replace(tasks=tasks), results, rule),
            SHAPE=shape,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )


class _Form(NamedTuple):
    """The form of a variant: types, the size of heads, with or without a window and a soft cap, or sinks.

    `sees_ahead`: with a window, and tokens that see later ones.
    """

    dtype: str
    head_dim: int
    kv_dtype: str = ""
    narrowed: bool = False
    paged: bool = True
    sinks: bool = False
    sees_ahead: bool = False


def _variant(use: Use, form: _Form, capabilities: tuple[int, ...]) -> KernelVariant:
    dtype, head_dim, kv_dtype, narrowed, paged, sinks, sees_ahead = form
    kv_bits, quantised = (4 if kv_dtype in INT4_VALUES else 8 if kv_dtype else 16), kv_dtype != ""
    shape = TileShape.of(use, head_dim=head_dim, group=4, block_size=16, kv_bits=kv_bits, capability=capabilities[0])
    memory = {"k8v4": ("*i8:16", "*u8:16", "*fp32:16", "*i32:16"), "int4": (*["*u8:16"] * 2, *["*i32:16"] * 2)}.get(
        kv_dtype, (*[f"*{kv_dtype or dtype}:16"] * 2, *["*fp32:16" if quantised else None] * 2)
    )
    words = [
        use.value,
        dtype,
        str(head_dim),
        kv_dtype,
        "window cap" * narrowed,
        "contiguous" * (not paged),
        "sinks" * sinks,
        "window ahead" * sees_ahead,
    ]
    arguments: dict[str, tuple[Any, ...]] = {
        "queries": Queries._make([f"*{dtype}:16", "*i32:16", "i32:16", "i32:16", "*i32:16" if sees_ahead else None]),
        "cache": Cache._make([*memory, "*i32:16", *["i32:16"] * 8]),
        "work": Work._make(["*i32:16"] * 3),
        "results": Results._make([f"*{dtype}:16", "*fp32:16", "*fp32:16", "i32:16", "i32:16", "i32"]),
        "rule": Weighting._make(
            [
                "fp32",
                "fp32" if narrowed else None,
                "i32" if narrowed or sees_ahead else None,
                "*fp32:16" if sinks else None,
            ]
        ),
    }
    from_shared = shape.rows >= WARP_GROUP_ROWS and capabilities[0] >= 90 and not quantised
    return KernelVariant(
        " ".join([word for word in words if word] + [f"sm_{capabilities[0]}"] * (capabilities[0] != 90)),
        attend_kernel,
        arguments=arguments,
        constants={"SHAPE": replace(shape, paged=paged)},
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        # A product that reads a tile from shared memory while it runs keeps it there for one more turn.
        num_buffers=shape.num_stages if from_shared else shape.num_stages - 1,
        min_wide_share=_min_wide_share(form),
        capabilities=capabilities,
    )


def _min_wide_share(form: _Form) -> float:
    if form.kv_dtype in INT4_VALUES:  # the 40 bytes of a head of 80 are not a multiple of 16
        return 0.1 if form.head_dim % 32 == 0 else 0.0
    return 0.2 if form.kv_dtype else 0.6


WARP_GROUP_ROWS: Final = 64
"""From this number of rows on, products of sm_90 and later read both factors from shared memory."""
FP8: Final = "fp8e4nv"
VARIANTS: Final = tuple(
    _variant(use, form, capabilities)
    for use in Use
    for form in (
        _Form("bf16", 128),
        _Form("bf16", 128, paged=False),
        _Form("bf16", 64, sinks=True),
        *(_Form("bf16", head_dim, sees_ahead=True) for head_dim in (128, 256)),
        *(_Form("bf16", head_dim, narrowed=True) for head_dim in (64, 80, 128, 256, 512)),
        *(_Form("bf16", head_dim, kv, narrowed=True) for head_dim, kv in ((128, "i8"), (128, FP8), (256, "i8"))),
        *(_Form("bf16", head_dim, kv, narrowed=True) for head_dim in (80, 128, 256) for kv in ("k8v4", "int4")),
        *(_Form("bf16", 512, kv) for kv in ("", "i8", FP8, "k8v4", "int4")),
    )
    for capabilities in (
        ((80,), (90, 100))
        if use is Use.DECODE or (use is Use.ANY and form.head_dim <= WIDEST)
        else ((80,), (90,), (100,))
    )
    if (form.kv_dtype, capabilities) != (FP8, (80,))  # sm_80 has no fp8
)
