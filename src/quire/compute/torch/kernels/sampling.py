"""Draws on the device: every token has a time, -log(its random number) / its weight, and the least time wins.

    logits ─► highest_kernel ─► weigh_kernel ─────────────► choose_kernel ─► token
              of each tile      without filters: least      the least of all tiles, or, one draw per program: the
                                time; else keys, count      least key that the filters keep, then the least time of
                                and weight of each class    the kept

A minimum is the same in any order, so no tile, split or neighbour can change a winner. Filters need sums, and sums of
floats depend on their order. So they see each weight, e^((logit − highest) / temperature) in float64, as an integer:
the highest is 2^43, and a weight below 2^-44 times the highest is 0. Weight and id together are a **key**, distinct for
each token, in the order of likelihood:

    key = weight × 2^19 + (2^19 − 1 − id)        among equal weights the lower id has the larger key

So a filter is one number, the least key that it keeps: the keys from there upward are top_k, or just reach top_p of the
total. To search among few keys, the kernel counts and weighs keys in four classes, by size, and gathers only the
heaviest classes that suffice.

Guarantees: a greedy choice is always that of `quire.compute.sampling.draws`. A drawn token is that of the definition,
unless the times of two tokens are equal except for roundings of float64. With top_k or top_p there are more exceptions:
the times are equal except that weights are rounded to 2^-43, or the share of top_p is within 2^-24 of a border between
two tokens, each of which happens once in some 2^24 draws; or the border of a filter is between two tokens whose weights
differ by less than 2^-43 of the highest, where the lower id counts as likelier. A token depends on its draw only.

Rejected: sorting each row (it would move the row some twenty times), and float sums (their order would be part of the
definition).
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

# The settings of draws, [num_draws, 7] of float64.
LOGIT_ROW: Final = tl.constexpr(0)
TEMPERATURE: Final = tl.constexpr(1)
TOP_K: Final = tl.constexpr(2)
TOP_P: Final = tl.constexpr(3)
MIN_P: Final = tl.constexpr(4)
FIRST_KEY: Final = tl.constexpr(5)
SECOND_KEY: Final = tl.constexpr(6)
NUM_SETTINGS: Final = tl.constexpr(7)


@triton.jit
def setting(settings, index: tl.constexpr, draw):
    """Return a setting of a draw."""
    return tl.load(settings + draw * NUM_SETTINGS + index)


@triton.jit
def key_of(settings, draw):
    """Return both words of the key of a draw's random numbers."""
    first, second = setting(settings, FIRST_KEY, draw), setting(settings, SECOND_KEY, draw)
    return first.to(tl.int64).to(tl.uint32), second.to(tl.int64).to(tl.uint32)


@triton.jit
def times_of(ids, weights, first, second):
    """Return the times of tokens, float64; infinite without weight. See `quire.compute.sampling.token_numbers`."""
    words = (ids.to(tl.uint32) ^ first) * 0x21F0AAAD
    words = ((words ^ (words >> 15)) + second) * 0xD35A2D97
    words = (words ^ (words >> 15)) * 0x31848BAB
    upper = words ^ (words >> 14)
    lower = (upper ^ first) * 0xAC4C1B51
    lower = (lower ^ (lower >> 15)) * 0xED5AD4BB
    bits = (upper.to(tl.int64) << 20) | (lower >> 12).to(tl.int64)
    numbers = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    return tl.where(weights > 0.0, -tl.log(numbers) / tl.where(weights > 0.0, weights, 1.0), float("inf"))


@triton.jit
def filters_of(settings, draw):
    """Return top_k and top_p of a draw, and whether it has any of them. It needs keys then."""
    top_k, top_p = setting(settings, TOP_K, draw).to(tl.int64), setting(settings, TOP_P, draw)
    return top_k, top_p, (top_k > 0) | (top_p < 1.0)


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
    best,
    times,
    keys,
    counts,
    masses,
    row_stride,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Store what decides a draw in a tile; a token below min_p has no weight.

    With top_k or top_p: the keys, 0 without weight, and the count and weight of each class. Else the least time and, in
    `best`, its token. Greedy draws keep their `best`.
    """
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
        is_filtered = filters_of(settings, draw)[2]
        if is_filtered:
            whole = (weights * WEIGHT_OF_HIGHEST + 0.5).to(tl.int64)
            found = tl.where(whole > 0, (whole << ID_BITS) + (MAX_ID - ids), 0)
            tl.store(keys + draw * vocab_size + ids, found, mask=inside)
            for kind in tl.static_range(NUM_CLASSES):
                belongs = found >= least_of_class(kind)
                place = (draw * NUM_CLASSES + kind) * num_tiles + tile
                tl.store(counts + place, tl.sum(belongs.to(tl.int64)))
                tl.store(masses + place, tl.sum(tl.where(belongs, whole, 0)))
        else:
            first, second = key_of(settings, draw)
            own = times_of(ids, weights, first, second)
            time, fastest = tl.min(own, axis=0, return_indices=True, return_indices_tie_break_left=True)
            tl.store(times + draw * num_tiles + tile, time)
            tl.store(best + draw * num_tiles + tile, tile * TILE + fastest)


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
def winner_of(keys, num_keys, least, first, second, LIST_TILE: tl.constexpr):
    """Return the token with the least time of the kept ones of a list."""
    token = tl.zeros((), tl.int64)
    time = tl.full((), float("inf"), tl.float64)
    start = tl.zeros((), tl.int64)
    while start < num_keys:
        places = start + tl.arange(0, LIST_TILE)
        found = tl.load(keys + places, mask=places < num_keys, other=0)
        ids = MAX_ID - (found & MAX_ID)
        weights = tl.where(found >= least, found >> ID_BITS, 0)
        times = times_of(ids, weights.to(tl.float64), first, second)
        here = tl.min(times)
        # The list is in the order of ids: among equal times, the first one wins.
        token = tl.where(here < time, tl.min(tl.where(times == here, ids, MAX_ID)), token)
        time = tl.minimum(here, time)
        start += LIST_TILE
    return token


@triton.jit
def share_of(total, share):
    """Return a share of a total weight, rounded up to an integer, at least 1."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * share).to(tl.int64), 1)


@triton.jit
def kept_keys(
    keys,
    counts,
    masses,
    top_k,
    top_p,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    LIST_TILE: tl.constexpr,
):
    """Gather keys that include all that top_k, top_p or both keep; return their number, and the least that is kept."""
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
    return num_keys, least


@triton.jit
def choose_kernel(
    settings,
    highest,
    best,
    times,
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
        top_k, top_p, is_filtered = filters_of(settings, draw)
        if is_filtered:
            own_keys, first_class = keys + draw * vocab_size, draw * NUM_CLASSES * num_tiles
            num_keys, least = kept_keys(
                own_keys,
                counts + first_class,
                masses + first_class,
                top_k,
                top_p,
                vocab_size,
                num_tiles,
                TILE,
                TILES,
                LIST_TILE,
            )
            first, second = key_of(settings, draw)
            token = winner_of(own_keys, num_keys, least, first, second, LIST_TILE)
        else:
            own = tl.load(times + draw * num_tiles + tiles, mask=tiles < num_tiles, other=float("inf"))
            tile = tl.min(own, axis=0, return_indices=True, return_indices_tie_break_left=True)[1]
            token = tl.load(best + draw * num_tiles + tile).to(tl.int64)
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
    are float64 `[num_draws, 7]`: row of logits, temperature, top_k (0: off), top_p, min_p, and the two words of the key
    of its random numbers. Tile sizes change no token; they are parameters for tests with few tokens.
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
    times, keys = scratch(torch.float64, num_tiles), scratch(torch.int64, vocab_size)
    counts, masses = (scratch(torch.int64, NUM_CLASSES.value, num_tiles) for _ in range(2))
    row_stride, tiles, grid = logits.stride(0), triton.next_power_of_2(num_tiles), (num_draws, num_tiles)
    rows, shape, options = (logits, settings, highest), (vocab_size, num_tiles), {"num_warps": NUM_WARPS}
    highest_kernel[grid](*rows, best, row_stride, *shape, least, TILE=tile, **options)
    weigh_kernel[grid](*rows, best, times, keys, counts, masses, row_stride, *shape, TILE=tile, TILES=tiles, **options)
    choose_kernel[(num_draws,)](
        *(settings, highest, best, times, keys, counts, masses, tokens),
        *shape,
        TILE=tile,
        TILES=tiles,
        LIST_TILE=list_tile,
        **options,
    )
    return tokens


def _variant(name: str, kernel: Any, arguments: dict[str, str], constants: dict[str, int]) -> KernelVariant:
    # A draw's settings are seven single numbers, so not every load is wide.
    return KernelVariant(name, kernel, arguments, constants, num_warps=NUM_WARPS, min_wide_share=0.2)


def _variants() -> list[KernelVariant]:
    shape = {"vocab_size": "i32:16", "num_tiles": "i32", "settings": "*fp64:16", "highest": "*fp32:16"}
    best, tables = {"best": "*i32:16"}, {"keys": "*i64:16", "counts": "*i64:16", "masses": "*i64:16"}
    tables["times"] = "*fp64:16"
    choosing = shape | tables | best | {"tokens": "*i64:16"}
    tile, tiles, list_tile = {"TILE": TILE}, {"TILES": 128}, {"LIST_TILE": LIST_TILE}
    found = [_variant("choose", choose_kernel, choosing, tile | tiles | list_tile)]
    for dtype in ("fp32", "bf16"):
        rows = shape | {"logits": f"*{dtype}:16", "row_stride": "i32:16"}
        found.append(_variant(f"highest, {dtype}", highest_kernel, rows | best | {"least": "fp32"}, tile))
        found.append(_variant(f"weigh, {dtype}", weigh_kernel, rows | best | tables, tile | tiles))
    return found


VARIANTS = tuple(_variants())
"""The forms that the compile gate compiles; see `variants`."""
