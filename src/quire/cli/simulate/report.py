"""The output of `quire simulate`: a column for each variant; the same as JSON; memory and queue over time as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields

from quire.cli.tables import NOTHING, show_table
from quire.core.byte_sizes import format_bytes
from quire.reporting.document.axis import show_number
from quire.simulate.frames import Frame
from quire.simulate.result import ReplicaResult, SimulationResult
from quire.simulate.timeline import TimelinePoint

LATENCIES = (
    ("ttft_s", "first token"),
    ("itl_s", "between tokens"),
    ("tpot_s", "per token of a request"),
    ("normalised_latency_s", "normalised latency"),
)
"""Latencies: the name in a result, and the label."""


@dataclass(frozen=True, slots=True)
class Run:
    """One variant: its result, and the frames of its first replica, if they were recorded."""

    name: str
    result: SimulationResult
    frames: Sequence[Frame] = ()


class SimulationReport:
    """The results of the variants of a study."""

    def __init__(self, title: str, seed: int, runs: Sequence[Run]) -> None:
        self._title = title
        self._seed = seed
        self._runs = runs

    def __str__(self) -> str:
        """Return the table."""
        head = ["", *(run.name for run in self._runs)]
        return f"{self._title}\n\n{show_table([head, *result_rows(self._runs)])}"

    def as_json(self) -> str:
        """Return all results, including timelines."""
        results = {run.name: run.result.as_json() for run in self._runs}
        return json.dumps({"title": self._title, "seed": self._seed, "results": results}, indent=1)

    def as_csv(self) -> str:
        """Return a line for each moment of each replica."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["seed", "variant", "replica", *(field.name for field in fields(TimelinePoint))])
        for run in self._runs:
            for number, replica in enumerate(run.result.replicas):
                for point in replica.timeline:
                    writer.writerow([self._seed, run.name, number, *(f"{value:.12g}" for value in astuple(point))])
        return text.getvalue()


def result_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return a row, with a label and a cell for each run, for every figure that at least one run has."""
    rows = [(label, *(show(run.result) for run in runs)) for label, show in ROWS]
    return [row for row in rows if set(row[1:]) != {NOTHING}]


def show_blocks(num_blocks: int, bytes_per_block: int) -> str:
    """Return the number of blocks and their size.

    >>> show_blocks(8118, 2 << 20)
    '8,118 blocks of 2.0 MiB'
    """
    return f"{num_blocks:,} blocks of {format_bytes(bytes_per_block)}"


def blocks_of(result: SimulationResult) -> str:
    """Return the number and size of the KV blocks of each replica."""
    ledger = result.replicas[0].ledger
    return show_blocks(ledger.num_blocks, ledger.bytes_per_block)


def _times(name: str) -> Callable[[SimulationResult], str]:
    def show(result: SimulationResult) -> str:
        latency = result.latencies[name]
        return (
            " / ".join(show_number(value, "s") for value in (latency.p50, latency.p95, latency.p99))
            if latency.count
            else NOTHING
        )

    return show


def _share(share: Callable[[ReplicaResult], float]) -> Callable[[SimulationResult], str]:
    def show(result: SimulationResult) -> str:
        busy = [replica for replica in result.replicas if replica.timeline]
        return f"{100 * sum(map(share, busy)) / len(busy):.1f} %" if busy else NOTHING

    return show


def _count(value: int) -> str:
    return f"{value:,}" if value else NOTHING


ROWS: tuple[tuple[str, Callable[[SimulationResult], str]], ...] = (
    ("requests", lambda result: f"{result.num_requests:,}"),
    ("refused: too large", lambda result: _count(result.num_refused)),
    ("moved from replica to replica", lambda result: _count(result.num_moved_requests)),
    (
        "replicas, mean",
        lambda result: f"{mean:.1f}" if (mean := result.mean_replicas) < len(result.replicas) else NOTHING,
    ),
    ("time until the last end", lambda result: show_number(result.duration_s, "s")),
    ("requests a second", lambda result: f"{result.requests_per_s:.2f}"),
    ("output tokens a second", lambda result: f"{result.output_tokens_per_s:,.0f}"),
    ("first token: p50 / p95 / p99", _times("ttft_s")),
    ("between tokens: p50 / p95 / p99", _times("itl_s")),
    ("per token of a request", _times("tpot_s")),
    ("latency: p50 / p95 / p99", _times("latency_s")),
    (
        "normalised latency, mean",
        lambda result: (
            f"{show_number(result.latencies['normalised_latency_s'].mean, 's')}/token"
            if result.latencies["normalised_latency_s"].count
            else NOTHING
        ),
    ),
    ("sequences running, mean", lambda result: f"{result.mean_running:.1f}"),
    ("prompt tokens from the cache", lambda result: f"{100 * result.hit_rate:.1f} %"),
    (
        "of all prompt tokens, from the host",
        lambda result: f"{100 * result.host_hit_rate:.1f} %" if result.host_hit_rate else NOTHING,
    ),
    (
        "of all prompt tokens, from disk",
        lambda result: f"{100 * result.disk_hit_rate:.1f} %" if result.disk_hit_rate else NOTHING,
    ),
    ("preemptions", lambda result: _count(result.num_preemptions)),
    ("tokens computed again", lambda result: _count(result.recomputed_tokens)),
    ("KV memory of a replica", blocks_of),
    ("KV memory in use", _share(lambda replica: replica.mean_share("used_blocks"))),
    ("KV memory holding only the cache", _share(lambda replica: replica.mean_share("cached_blocks"))),
    ("of the memory in use, holding tokens", _share(lambda replica: replica.stored_share_of_used)),
    ("steps", lambda result: f"{result.num_steps:,}"),
)
