"""Draws on the device: every token's weight as an integer, and a walk to the token that a uniform number hits.

    logits ─► highest_kernel ─► weigh_kernel ─────────────► choose_kernel ─► token
              of each tile      keys; count and weight      one draw per program: the least key that the filters
                                of each class in a tile     keep, then the walk in the order of ids

A weight, e^((logit − highest) / temperature) in float64, becomes an integer: the highest is 2^43, and a weight below
2^-44 times the highest is 0. Sums of integers are exact in any order, so no tile, split or neighbour can move the
border between two tokens. Weight and id together are a **key**, distinct for each token, in the order of likelihood:

    key = weight × 2^19 + (2^19 − 1 − id)        among equal weights the lower id has the larger key

So a filter is one number, the least key that it keeps: the keys from there upward are top_k, or just reach top_p of the
total. To search among few keys, the kernel counts and weighs keys in four classes, by size, and gathers only the
heaviest classes that suffice.

Guarantees: a greedy choice is always that of `quire.compute.sampling.draws`. A drawn token is that of the definition,
with two exceptions: its uniform number, or the share of top_p, is within 2^-24 of a border between two tokens
(2^19 weights, each rounded by half of 2^-43); or the border of a filter is between two tokens whose weights differ by
less than 2^-43 of the highest, where the lower id counts as likelier. A token always depends only on its draw.

Rejected: sorting each row (it would move the row some twenty times), float sums (their order would be part of the
definition), and Gumbel noise (one number per token, but the definition has one per draw).
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from quire.compute.torch.kernels.variants import KernelVariant

TILE: Final = 2048
LIST_TILE: Final = 1024
NUM_WARPS: Final = 8
MAX_DRAWS: Final = 128
"""The most draws of a launch, to limit the memory for keys: 8 bytes per token of the vocabulary and draw."""

LEAST_FINITE: Final = float(torch.finfo(torch.float32).min)

ID_BITS: Final = tl.constexpr(19)
MAX_ID: Final = tl.constexpr((1 << 19) - 1)
WEIGHT_OF_HIGHEST: Final = tl.constexpr(float(1 << 43))
KEY_BITS: Final = tl.constexpr(63)
MOST: Final = tl.constexpr((1 << 63) - 1)
NUM_CLASSES: Final = tl.constexpr(4)
MAX_VOCABULARY: Final = 1 << 19

# The settings of draws, [num_draws, 6] of float64.
LOGIT_ROW: Final = tl.constexpr(0)
TEMPERATURE: Final = tl.constexpr(1)
TOP_K: Final = tl.constexpr(2)
TOP_P: Final = tl.constexpr(3)
MIN_P: Final = tl.constexpr(4)
UNIFORM: Final = tl.constexpr(5)
NUM_SETTINGS: Final = tl.constexpr(6)


@triton.jit
def setting(settings, index: tl.constexpr, draw):
    """Return a setting of a draw."""
    return tl.load(settings + draw * NUM_SETTINGS + index)


@triton.jit
def least_of_class(kind):
    """Return the least key of a class: at least 2^-8, 2^-16, 2^-24 of the highest weight, and all others."""
    weight_bits = tl.where(kind == NUM_CLASSES - 1, 0, 35 - 8 * kind)
    return tl.full((), 1, tl.int64) << (weight_bits + ID_BITS)


@triton.jit
def highest_kernel(logits, settings, highest, best, row_stride, vocab_size, num_tiles, least, TILE: tl.constexpr):
    """Find the highest logit of a tile, and the lowest id that has it.

    If a logit is NaN, infinite or below `least`, the highest is infinite, and the id -1: no draw chooses another tile.
    """
    draw, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = setting(settings, LOGIT_ROW, draw).to(tl.int64)
    ids = tile * TILE + tl.arange(0, TILE)
    numbers = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    is_sound = (ids >= vocab_size) | ((numbers >= least) & (numbers < float("inf")))  # false for NaN
    numbers = tl.where(is_sound, numbers, float("-inf"))
    number, place = tl.max(numbers, axis=0, return_indices=True, return_indices_tie_break_left=True)
    are_sound = tl.min(is_sound.to(tl.int32), axis=0) == 1
    tl.store(highest + draw * num_tiles + tile, tl.where(are_sound, number, float("inf")))
    tl.store(best + draw * num_tiles + tile, tl.where(are_sound, tile * TILE + place, -1))


@triton.jit
def weigh_kernel(
    logits,
    settings,
    highest,
    keys,
    counts,
    masses,
    row_stride,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Store the keys of a tile, 0 without weight or below min_p, and the count and weight of each class."""
    draw, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tiles = tl.arange(0, TILES)
    top = tl.max(tl.load(highest + draw * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf")))
    temperature = setting(settings, TEMPERATURE, draw)
    if is_drawn(temperature, top):
        row = setting(settings, LOGIT_ROW, draw).to(tl.int64)
        ids = tile * TILE + tl.arange(0, TILE)
        inside = ids < vocab_size
        numbers = tl.load(logits + row * row_stride + ids, mask=inside, other=float("-inf")).to(tl.float64)
        weights = tl.exp((numbers - top.to(tl.float64)) / temperature)
        weights = tl.where(weights >= setting(settings, MIN_P, draw), weights, 0.0)
        whole = (weights * WEIGHT_OF_HIGHEST + 0.5).to(tl.int64)
        found = tl.where(whole > 0, (whole << ID_BITS) + (MAX_ID - ids), 0)
        tl.store(keys + draw * vocab_size + ids, found, mask=inside)
        for kind in tl.static_range(NUM_CLASSES):
            belongs = found >= least_of_class(kind)
            place = (draw * NUM_CLASSES + kind) * num_tiles + tile
            tl.store(counts + place, tl.sum(belongs.to(tl.int64)))
            tl.store(masses + place, tl.sum(tl.where(belongs, whole, 0)))


@triton.jit
def is_drawn(temperature, top):
    """Return whether a draw is not greedy: its temperature is a normal float32, and some token may be chosen."""
    return (temperature >= 1.1754943508222875e-38) & (tl.abs(top) < float("inf"))


@triton.jit
def amounts_from(keys, num_keys, leasts, LIST_TILE: tl.constexpr):
    """Return, for each of `leasts` (none is 0), the number and the weight of a list's keys that are not less."""
    counts, masses = tl.zeros_like(leasts), tl.zeros_like(leasts)
    start = tl.zeros((), tl.int64)
    while start < num_keys:
        places = start + tl.arange(0, LIST_TILE)
        found = tl.load(keys + places, mask=places < num_keys, other=0)
        belongs = found[:, None] >= leasts[None, :]
        counts += tl.sum(belongs.to(tl.int64), axis=0)
        masses += tl.sum(tl.where(belongs, (found >> ID_BITS)[:, None], 0), axis=0)
        start += LIST_TILE
    return counts, masses


@triton.jit
def least_kept(keys, num_keys, goal, BY_MASS: tl.constexpr, LIST_TILE: tl.constexpr):
    """Return the border key, which just reaches `goal` with all larger keys, in number or weight; and their weight.

    Finds three bits at a time, until only one key can be the border.
    """
    digits = tl.arange(0, 8).to(tl.int64)
    least = tl.full((), 1, tl.int64)
    total = tl.zeros((), tl.int64)
    beyond = tl.zeros((), tl.int64)  # number of keys above the searched range
    is_alone = tl.zeros((), tl.int1)
    shift = tl.full((), KEY_BITS - 3, tl.int64)
    while (shift >= 0) & (is_alone == 0):
        counts, masses = amounts_from(keys, num_keys, least + (digits << shift), LIST_TILE)
        reaches = (masses if BY_MASS else counts) >= goal
        least += (tl.sum(reaches.to(tl.int64)) - 1) << shift
        total = tl.min(tl.where(reaches, masses, MOST))
        beyond = tl.maximum(beyond, tl.max(tl.where(reaches, 0, counts)))
        is_alone = tl.min(tl.where(reaches, counts, MOST)) - beyond == 1
        shift -= 3
    return least, total


@triton.jit
def gathered(keys, counts, least, vocab_size, num_tiles, TILE: tl.constexpr):
    """Move the keys of a draw that are at least `least` to the front, in the order of ids; return their number."""
    filled = tl.zeros((), tl.int64)
    tile = tl.zeros((), tl.int32)
    while tile < num_tiles:
        count = tl.load(counts + tile)
        if count > 0:
            places = tile * TILE + tl.arange(0, TILE)
            found = tl.load(keys + places, mask=places < vocab_size, other=0)
            belongs = found >= least
            tl.debug_barrier()  # the whole tile must be read before it is overwritten
            target = filled + tl.cumsum(belongs.to(tl.int64), 0) - 1
            tl.store(keys + target, found, mask=belongs)
            filled += count
        tile += 1
    tl.debug_barrier()  # from here on, all threads read keys that others wrote
    return filled


@triton.jit
def walked(keys, num_keys, least, hit, LIST_TILE: tl.constexpr):
    """Return the first kept token of a list at which the sum of weights exceeds `hit`."""
    token = tl.zeros((), tl.int64)
    is_found = tl.zeros((), tl.int1)
    passed = tl.zeros((), tl.int64)
    start = tl.zeros((), tl.int64)
    while start < num_keys:
        places = start + tl.arange(0, LIST_TILE)
        found = tl.load(keys + places, mask=places < num_keys, other=0)
        weights = tl.where((found >= least) & (found > 0), found >> ID_BITS, 0)
        sums = passed + tl.cumsum(weights, 0)
        passed += tl.sum(weights)
        # The first place whose sum is above the hit: its key gives the token.
        place = tl.sum((sums <= hit).to(tl.int32))
        here = MAX_ID - (tl.sum(tl.where(tl.arange(0, LIST_TILE) == place, found, 0)) & MAX_ID)
        token = tl.where(is_found | (passed <= hit), token, here)
        is_found = passed > hit
        start += LIST_TILE
    return token


@triton.jit
def hit_of(total, uniform):
    """Return the point in a total weight that a uniform number of [0, 1) hits."""
    return tl.minimum((total.to(tl.float64) * uniform).to(tl.int64), total - 1)


@triton.jit
def share_of(total, share):
    """Return a share of a total weight, rounded up to an integer, at least 1."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * share).to(tl.int64), 1)


@triton.jit
def filtered_draw(
    keys,
    counts,
    masses,
    vocab_size,
    num_tiles,
    top_k,
    top_p,
    uniform,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    LIST_TILE: tl.constexpr,
):
    """Return the token of a draw with top_k, top_p or both."""
    tiles = tl.arange(0, TILES)
    total = tl.sum(tl.load(masses + (NUM_CLASSES - 1) * num_tiles + tiles, mask=tiles < num_tiles, other=0))
    count = tl.sum(tl.load(counts + (NUM_CLASSES - 1) * num_tiles + tiles, mask=tiles < num_tiles, other=0))
    most = tl.minimum(top_k, count)
    share = share_of(total, top_p)
    kind = tl.full((), NUM_CLASSES - 1, tl.int32)
    for back in tl.static_range(NUM_CLASSES):
        other = NUM_CLASSES - 1 - back
        heavy = tl.load(masses + other * num_tiles + tiles, mask=tiles < num_tiles, other=0)
        many = tl.load(counts + other * num_tiles + tiles, mask=tiles < num_tiles, other=0)
        suffices = tl.where(top_k > 0, tl.sum(many) >= most, tl.sum(heavy) >= share)
        kind = tl.where(suffices, other, kind)
    num_keys = gathered(keys, counts + kind * num_tiles, least_of_class(kind), vocab_size, num_tiles, TILE)
    least = tl.zeros((), tl.int64)
    if top_k > 0:
        least, total = least_kept(keys, num_keys, most, False, LIST_TILE)
    if top_p < 1.0:
        least, total = least_kept(keys, num_keys, share_of(total, top_p), True, LIST_TILE)
    return walked(keys, num_keys, least, hit_of(total, uniform), LIST_TILE)


@triton.jit
def plain_draw(
    keys, masses, vocab_size, num_tiles, uniform, TILE: tl.constexpr, TILES: tl.constexpr, LIST_TILE: tl.constexpr
):
    """Return the token of a draw without filters: finds its tile by the sums of tiles, and reads only this tile."""
    tiles = tl.arange(0, TILES)
    mass = tl.load(masses + (NUM_CLASSES - 1) * num_tiles + tiles, mask=tiles < num_tiles, other=0)
    hit = hit_of(tl.sum(mass), uniform)
    tile = tl.sum((tl.cumsum(mass, 0) <= hit).to(tl.int32))
    passed = tl.sum(tl.where(tiles < tile, mass, 0))
    num_keys = tl.minimum(TILE, vocab_size - tile * TILE)
    return walked(keys + tile * TILE, num_keys, tl.zeros((), tl.int64), hit - passed, LIST_TILE)


@triton.jit
def choose_kernel(
    settings,
    highest,
    best,
    keys,
    counts,
    masses,
    tokens,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    LIST_TILE: tl.constexpr,
):
    """Choose the token of a draw: -1, that of the highest tile, if a logit is not finite."""
    draw = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    numbers = tl.load(highest + draw * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    top, tile = tl.max(numbers, axis=0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(best + draw * num_tiles + tile).to(tl.int64)
    if is_drawn(setting(settings, TEMPERATURE, draw), top):
        top_k = setting(settings, TOP_K, draw).to(tl.int64)
        top_p = setting(settings, TOP_P, draw)
        uniform = setting(settings, UNIFORM, draw)
        own_keys = keys + draw * vocab_size
        own_counts = counts + draw * NUM_CLASSES * num_tiles
        own_masses = masses + draw * NUM_CLASSES * num_tiles
        if (top_k > 0) | (top_p < 1.0):
            token = filtered_draw(
                own_keys, own_counts, own_masses, vocab_size, num_tiles, top_k, top_p, uniform, TILE, TILES, LIST_TILE
            )
        else:
            token = plain_draw(own_keys, own_masses, vocab_size, num_tiles, uniform, TILE, TILES, LIST_TILE)
    tl.store(tokens + draw, token)


def choose_tokens(
    logits: torch.Tensor,
    settings: torch.Tensor,
    *,
    least: float = LEAST_FINITE,
    tile: int = TILE,
    list_tile: int = LIST_TILE,
) -> torch.Tensor:
    """Return the token of each draw, int64, on the device; does not wait. Does not mutate.

    The token is -1 if a logit of its row is not finite. With `least` = -inf, logits of -inf are forbidden tokens.

    `logits` are `[num_rows, vocab_size]`, at most 2^19 tokens, perhaps with gaps between rows; `settings` of the draws
    are float64 `[num_draws, 6]`: row of logits, temperature, top_k (0: off), top_p, min_p, uniform number. Tile sizes
    change no token; they are parameters for tests with few tokens.
    """
    return torch.cat([_choose(logits, part, least, (tile, list_tile)) for part in settings.split(MAX_DRAWS)])


def _choose(logits: torch.Tensor, settings: torch.Tensor, least: float, tile_sizes: tuple[int, int]) -> torch.Tensor:
    tile, list_tile = tile_sizes
    num_draws, vocab_size = len(settings), logits.shape[1]
    num_tiles = triton.cdiv(vocab_size, tile)

    def scratch(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((num_draws, *shape), dtype=dtype, device=logits.device)

    tokens = scratch(torch.int64)
    if num_draws == 0:
        return tokens
    highest, best = scratch(torch.float32, num_tiles), scratch(torch.int32, num_tiles)
    keys = scratch(torch.int64, vocab_size)
    counts, masses = (scratch(torch.int64, NUM_CLASSES.value, num_tiles) for _ in range(2))
    row_stride, tiles, grid = logits.stride(0), triton.next_power_of_2(num_tiles), (num_draws, num_tiles)
    rows, shape, options = (logits, settings, highest), (vocab_size, num_tiles), {"num_warps": NUM_WARPS}
    highest_kernel[grid](*rows, best, row_stride, *shape, least, TILE=tile, **options)
    weigh_kernel[grid](*rows, keys, counts, masses, row_stride, *shape, TILE=tile, TILES=tiles, **options)
    choose_kernel[(num_draws,)](
        *(settings, highest, best, keys, counts, masses, tokens),
        *shape,
        TILE=tile,
        TILES=tiles,
        LIST_TILE=list_tile,
        **options,
    )
    return tokens


def _variant(name: str, kernel: Any, arguments: dict[str, str], constants: dict[str, int]) -> KernelVariant:
    # A draw's settings are single numbers, so not every load is wide.
    return KernelVariant(name, kernel, arguments, constants, num_warps=NUM_WARPS, min_wide_share=0.25)


def _variants() -> list[KernelVariant]:
    shape = {"vocab_size": "i32:16", "num_tiles": "i32", "settings": "*fp64:16", "highest": "*fp32:16"}
    best, tables = {"best": "*i32:16"}, {"keys": "*i64:16", "counts": "*i64:16", "masses": "*i64:16"}
    choosing = shape | tables | best | {"tokens": "*i64:16"}
    tile, tiles, list_tile = {"TILE": TILE}, {"TILES": 128}, {"LIST_TILE": LIST_TILE}
    found = [_variant("choose", choose_kernel, choosing, tile | tiles | list_tile)]
    for dtype in ("fp32", "bf16"):
        rows = shape | {"logits": f"*{dtype}:16", "row_stride": "i32:16"}
        found.append(_variant(f"highest, {dtype}", highest_kernel, rows | best | {"least": "fp32"}, tile))
        found.append(_variant(f"weigh, {dtype}", weigh_kernel, rows | tables, tile | tiles))
    return found


VARIANTS = tuple(_variants())
"""The forms that the compile gate compiles; see `variants`."""
