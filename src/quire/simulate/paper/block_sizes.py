"""The effect of the block size on memory, speed and preemption."""

from __future__ import annotations

from collections.abc import Sequence

from quire.reporting.document.content import LOG, Axis, Chart, Series, Table
from quire.simulate.paper.figure import Figure, make_figure
from quire.simulate.paper.runs import OPT_13B, SWAPPING, Laboratory, long_run, short_run

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PLACES = tuple(map(float, BLOCK_SIZES))
SIZE_AXIS = Axis("tokens in a block", scale=LOG)
GOOD = 0.95
MOVED_TOKENS = 512
LOST_TOKENS = (64, 128, 256, MOVED_TOKENS, 768, 1024, 1536, 2048)


def blocks(laboratory: Laboratory) -> Figure:
    """Return the memory use and throughput by block size."""
    tables, filled, served, largest, enough = [], [], [], {}, []
    for name, run in (("ShareGPT", long_run), ("Alpaca", short_run)):
        found = [laboratory.run(run("vllm", block_size=size)) for size in BLOCK_SIZES]
        most = max(outcome.requests_per_s for outcome in found)
        shares = tuple(outcome.requests_per_s / most for outcome in found)
        filled.append(Series(name, tuple(100 * outcome.filled for outcome in found)))
        served.append(Series(name, tuple(100 * share for share in shares)))
        rows = (
            (str(size), f"{100 * outcome.filled:.1f} %", f"{outcome.mean_running:.1f}", f"{outcome.requests_per_s:.2f}")
            for size, outcome in zip(BLOCK_SIZES, found, strict=True)
        )
        header = ("tokens in a block", "of the blocks in use filled", "sequences running", "requests a second")
        tables.append(Table(header, tuple(rows), name))
        largest[f"{name}: the largest good block"] = _largest(shares, GOOD)
        enough.append(_largest(shares, 0.75))
    charts = (
        Chart("Slots in use that hold a token", PLACES, tuple(filled), SIZE_AXIS, Axis("share", "%")),
        Chart("Requests served, of the most", PLACES, tuple(served), SIZE_AXIS, Axis("share", "%")),
    )
    return make_figure("blocks", tables, largest, charts, good=100 * GOOD, long=enough[0], short=enough[1])


def _largest(shares: Sequence[float], least: float) -> int:
    """Return the largest block size whose share is at least `least`."""
    return max(size for size, share in zip(BLOCK_SIZES, shares, strict=True) if share >= least)


def swap(laboratory: Laboratory) -> Figure:
    """Return preemption by recompute compared with swap."""
    recomputed = [laboratory.run(long_run("vllm", block_size=size)) for size in BLOCK_SIZES]
    swapped = [laboratory.run(long_run(SWAPPING, block_size=size)) for size in BLOCK_SIZES]
    rows = tuple(
        (
            str(size),
            *(f"{outcome.requests_per_s:.2f}" for outcome in (again, moved)),
            *(f"{count:,}" for count in (again.num_preemptions, again.recomputed_tokens)),
            *(f"{count:,}" for count in (moved.num_preemptions, moved.num_moved_blocks)),
        )
        for size, again, moved in zip(BLOCK_SIZES, recomputed, swapped, strict=True)
    )
    header = ("tokens in a block", "recompute /s", "swap /s", "preempted", "recomputed", "preempted", "moved")
    lines = (("recompute", recomputed), ("swap", swapped))
    series = tuple(Series(name, tuple(outcome.requests_per_s for outcome in line)) for name, line in lines)
    site, at_16 = laboratory.sites[OPT_13B], BLOCK_SIZES.index(16)
    lost, roofline, link = tuple(map(float, LOST_TOKENS)), site.roofline(), site.hardware.host_link_bandwidth
    again_s = tuple(roofline.step_s([0], [tokens], 1) for tokens in LOST_TOKENS)
    moved_s = tuple(2 * tokens * site.setup().spec.bytes_per_token / link for tokens in LOST_TOKENS)
    charts = (
        Chart("Requests served", PLACES, series, SIZE_AXIS, Axis("requests a second")),
        Chart(
            "Time until a preempted sequence is back",
            lost,
            (Series("recompute", again_s), Series("swap", moved_s)),
            Axis("tokens of the sequence"),
            Axis("time", "s"),
        ),
    )
    middle = LOST_TOKENS.index(MOVED_TOKENS)
    found = {
        f"{MOVED_TOKENS} tokens: recompute / swap": again_s[middle] / moved_s[middle],
        "blocks of 16, served: swap / recompute": swapped[at_16].requests_per_s / recomputed[at_16].requests_per_s,
    }
    times = {"recompute_ms": 1000 * again_s[middle], "swap_ms": 1000 * moved_s[middle]}
    return make_figure("swap", [Table(header, rows)], found, charts, tokens=MOVED_TOKENS, link=link / 1e9, **times)
