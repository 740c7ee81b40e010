"""`quire bench gpu-kernels --only tiles`: finds the fastest shape of attention's tiles, and names the place to set it.

Each shape takes turns with the shape that engines use. All compile for sm_90 with pipelined loads; only a GPU can show
their speed. A shape determines the order of sums, so a change of shape changes the bits of answers once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Final

from quire.reporting.report import Section, cell
from quire.reporting.samples import ratios, summarize

if TYPE_CHECKING:
    from quire.compute.torch.attention_run import AttentionStep
    from quire.compute.torch.kernels.tile_shape import TileShape, Use
    from quire.instruments.bench.gpu_attention import GpuKernelBench

PLACE: Final = "src/quire/compute/torch/kernels/tile_shape.py"
SHORT_SPLIT, LONG_SPLIT = 256, 512
FEW: Final = 1
"""Shapes to try with `--small`."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of a product, tokens of a key tile, warps, stages of the loop, and positions of a split."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    split: int = LONG_SPLIT

    def shape(self, present: TileShape) -> TileShape:
        """Return the present shape with the values of this tile."""
        return replace(
            present,
            rows=max(self.rows, present.group),
            tokens=self.tokens,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            split=self.split,
        )


DECODE_TILES: Final = (
    Tile(16, 64, 4, 4, SHORT_SPLIT),
    Tile(16, 64, 4, 3, LONG_SPLIT),
    Tile(16, 64, 4, 4, LONG_SPLIT),
    Tile(16, 64, 8, 3, SHORT_SPLIT),
    Tile(16, 64, 8, 4, SHORT_SPLIT),
    Tile(16, 32, 4, 4, SHORT_SPLIT),
    Tile(16, 32, 4, 5, SHORT_SPLIT),
    Tile(16, 128, 8, 3, SHORT_SPLIT),
    Tile(16, 128, 4, 3, SHORT_SPLIT),
)
PROMPT_TILES: Final = (
    Tile(64, 64, 4, 3),
    Tile(64, 64, 4, 2),
    Tile(64, 32, 4, 3),
    Tile(64, 32, 4, 4),
    Tile(128, 64, 8, 2),
    Tile(128, 64, 8, 4),
    Tile(128, 32, 8, 4),
    Tile(64, 128, 8, 2),
)
"""With 64 × 64 and four warps, two programs fit on a multiprocessor instead of one; but a thread spills 32 bytes, which
the compile gate would have to allow."""


def measure_tiles(bench: GpuKernelBench) -> Iterator[Section]:
    """Measure the shapes of decodes and of prompts; yields a longer section after every shape."""
    from quire.compute.torch.attention_run import AttentionStep
    from quire.compute.torch.kernels.tile_shape import Use

    decodes = {
        "1 × 1,024": AttentionStep((1024,)),
        "1 × 32,768": AttentionStep((32_768,)),
        "32 × 4,096": AttentionStep((4096,) * 32),
        "128 × 1,024": AttentionStep((1024,) * 128),
    }
    prompts = {
        "a prompt of 8,192": AttentionStep((8192,), num_queries=8192),
        "50 tokens behind 30,000": AttentionStep((30_050,), num_queries=50),
        "8 prompts of 1,024": AttentionStep((1024,) * 8, num_queries=1024),
    }
    yield from _measured(bench, Use.DECODE, decodes, DECODE_TILES)
    yield from _measured(bench, Use.PROMPT, prompts, PROMPT_TILES)


def _measured(
    bench: GpuKernelBench, use: Use, steps: Mapping[str, AttentionStep], tiles: Sequence[Tile]
) -> Iterator[Section]:
    from quire.compute.torch.attention_run import used_shape

    present = used_shape(bench.asked(next(iter(steps.values()))), use, bench.options.device)
    used = Tile(present.rows, present.tokens, present.num_warps, present.num_stages, present.split)
    rows: list[tuple[str, ...]] = [(*_cells(used), *("used",) * len(steps), "1.00")]
    samples: dict[str, object] = {}
    found = {used: 1.0}
    wanted = [tile for tile in tiles if tile != used]
    for tile in wanted[:FEW] if bench.options.small else wanted:
        point = f"tiles of {use.value}s: {tile}"
        times, why = bench.tried(point, partial(_timed, bench, tuple(steps.values()), tile.shape(present)))
        if times is None:
            rows.append((*_cells(tile), why, *("–",) * len(steps)))
        else:
            shares = [summarize(ratios(ours, others)) for ours, others in times]
            found[tile] = prod(share.median for share in shares) ** (1 / len(shares))
            rows.append((*_cells(tile), *map(cell, shares), f"{found[tile]:.2f}"))
            samples[str(tile)] = [{"seconds": ours, "used": others} for ours, others in times]
        header = ("rows", "tokens", "warps", "stages", "split", *steps, "mean")
        yield Section(f"Tiles of {use.value}s", f"{_advice(use, used, found)} {bench.text()}", header, rows, samples)


def _timed(bench: GpuKernelBench, steps: Sequence[AttentionStep], shape: TileShape) -> list[list[list[float]]]:
    """Return the seconds of each step with a shape, and with the shape in use."""
    return [bench.timed(replace(step, shape=shape), step) for step in steps]


def _advice(use: Use, used: Tile, found: Mapping[Tile, float]) -> str:
    """Return a text that names the best tile so far, and the place to set it."""
    best = min(found, key=lambda tile: found[tile])
    if best == used:
        return f"Best of {len(found)}: the tile in use. Ratios of times to those of the tile in use."
    form = f"rows {best.rows}, tokens {best.tokens}, warps {best.num_warps}, stages {best.num_stages}"
    twice = ", where TWICE_THE_ROWS doubles the rows" if use.value == "prompt" else ""
    name = "DECODE_SPLIT" if use.value == "decode" else "SPLIT"
    split = f"; {name} = {best.split}" if best.split != used.split else ""
    return (
        f"**Best of {len(found)}: {form}, split {best.split}: {found[best]:.2f} of the time.** Set it in {PLACE}: "
        f"FORMS, the entry ({use.value == 'decode'}, 128, False){twice}{split}. Then run the compile gate and "
        "tests/gpu. Ratios of times to those of the tile in use."
    )


def _cells(tile: Tile) -> tuple[str, ...]:
    return tuple(map(str, (tile.rows, tile.tokens, tile.num_warps, tile.num_stages, tile.split)))
