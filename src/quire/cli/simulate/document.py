"""The document of `quire simulate`: the results of all runs side by side, and the blocks over time.

Runs are compared at common moments; the state of a run at a moment is the last point of its timeline before it. So
runs of different lengths share an axis, and the document does not grow with the length of a run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from quire.cli.simulate.report import LATENCIES, Run, blocks_of, result_rows
from quire.reporting.document.axis import show_number
from quire.reporting.document.content import AREAS, BARS, LOG, Axis, Chart, Document, Film, Section, Series, Table
from quire.simulate.frames import blocks_per_cell
from quire.simulate.histogram import CURVE_PERCENTS
from quire.simulate.result import ReplicaResult
from quire.simulate.timeline import TimelinePoint

NUM_MOMENTS = 240
MAX_FILMS = 8
TIME, SEQUENCES, SHARE = Axis("time", "s"), Axis("sequences"), Axis("share", "%")
MEMORY = (
    ("holding tokens", "stored_slots", "accent"),
    ("reserved for tokens to come", "reserved_slots", "owner-3"),
    ("empty in blocks that are held", "fragmented_slots", "warn"),
    ("only cached", "cached_blocks", "cached"),
    ("free", "free_blocks", "free"),
)
"""The uses of the memory: name, count in the timeline, colour."""

Standing = Sequence[tuple[ReplicaResult, TimelinePoint]]
"""The replicas of a run that have started at one moment; empty if the run is over."""


def simulation_document(title: str, facts: Sequence[tuple[str, str]], runs: Sequence[Run]) -> Document:
    """Return the document of a study. Does not mutate."""
    table = Table(("", *(run.name for run in runs)), tuple(result_rows(runs)))
    left_out = (f"Block maps are shown for the first {MAX_FILMS} runs only.",) if len(runs) > MAX_FILMS else ()
    moments = _moments(runs)
    sections = (
        Section("Results", (table, *left_out)),
        *(Section(f"Memory: {run.name}", tuple(_memory(run, moments))) for run in runs[:MAX_FILMS]),
        Section("Through time", tuple(_through_time(runs, moments))),
        Section("How long users wait", tuple(_waiting(runs))),
    )
    return Document(title, sections, facts=tuple(facts))


def main_chart(runs: Sequence[Run]) -> Chart:
    """Return the main chart of a study: memory over time or, for several runs, time to first token."""
    return _memory_chart(runs[0], _moments(runs), "") if len(runs) == 1 else _curves(runs, *LATENCIES[0])


# ---- through time ---------------------------------------------------------------------------------------------------


def _moments(runs: Sequence[Run]) -> tuple[float, ...]:
    end_s = max(map(_end_s, runs))
    return tuple(end_s * number / NUM_MOMENTS for number in range(NUM_MOMENTS + 1)) if end_s else (0.0,)


def _end_s(run: Run) -> float:
    return max((replica.timeline[-1].time_s for replica in run.result.replicas if replica.timeline), default=0.0)


def _standings(run: Run, moments: Sequence[float]) -> Iterator[Standing]:
    timelines = [(replica, [point.time_s for point in replica.timeline]) for replica in run.result.replicas]
    over_s = _end_s(run) + moments[-1] / NUM_MOMENTS
    for moment in moments:
        found = [(replica, bisect_right(times, moment)) for replica, times in timelines]
        yield [(replica, replica.timeline[at - 1]) for replica, at in found if at] if moment < over_s else []


def _along(run: Run, moments: Sequence[float], measure: Callable[[Standing], float]) -> tuple[float | None, ...]:
    return tuple(measure(standing) if standing else None for standing in _standings(run, moments))


def _total(count: str) -> Callable[[Standing], float]:
    return lambda standing: sum(getattr(point, count) for _, point in standing)


def _share_of_memory(count: str) -> Callable[[Standing], float]:
    def measure(standing: Standing) -> float:
        slots = sum(replica.slots(point, count) for replica, point in standing)
        return 100 * slots / sum(replica.num_slots for replica, _ in standing)

    return measure


def _hit_share(standing: Standing) -> float:
    return 100 * _total("hit_tokens")(standing) / max(1.0, _total("queried_tokens")(standing))


def _memory(run: Run, moments: Sequence[float]) -> Iterator[Film | Chart]:
    if run.frames:
        yield _film(run)
    yield _memory_chart(run, moments, run.name)


def _film(run: Run) -> Film:
    frames, num_replicas = run.frames, len(run.result.replicas)
    whose = "" if num_replicas == 1 else f" of the first of {num_replicas:,} replicas"
    captions = (
        f"{show_number(frame.time_s, 's')}: {frame.num_running:,} running, {frame.num_waiting:,} waiting; "
        f"{frame.num_held:,} blocks held, {frame.num_cached:,} only cached, {frame.num_free:,} free"
        for frame in frames
    )
    return Film(
        f"Block map{whose}: {blocks_of(run.result)}",
        tuple(frame.time_s for frame in frames),
        tuple(frame.picture for frame in frames),
        tuple(captions),
        frames[0].num_blocks,
        blocks_per_cell(frames[0].num_blocks),
        run.name,
    )


def _memory_chart(run: Run, moments: Sequence[float], group: str) -> Chart:
    series = (Series(name, _along(run, moments, _share_of_memory(count)), colour) for name, count, colour in MEMORY)
    return Chart("Where the KV memory is", tuple(moments), tuple(series), TIME, SHARE, AREAS, group=group)


def _through_time(runs: Sequence[Run], moments: Sequence[float]) -> Iterator[Chart | str]:
    def chart(title: str, axis: Axis, measure: Callable[[Standing], float]) -> Chart:
        series = tuple(Series(run.name, _along(run, moments, measure)) for run in runs)
        group = runs[0].name if len(runs) == 1 else "all"
        return Chart(title, tuple(moments), series, TIME, axis, group=group)

    yield chart("Sequences that run", SEQUENCES, _total("running"))
    yield chart("Sequences that wait", SEQUENCES, _total("waiting"))
    if any(run.result.num_preemptions for run in runs):
        yield chart("Preemptions so far", Axis("preemptions"), _total("preemptions"))
    else:
        yield "No sequence was preempted."
    if any(run.result.hit_tokens for run in runs):
        yield chart("Prompt tokens from the cache, of all so far", SHARE, _hit_share)
    else:
        yield "No prompt token came from the cache."


# ---- how long users wait --------------------------------------------------------------------------------------------


def _waiting(runs: Sequence[Run]) -> Iterator[Table | Chart]:
    rows = []
    for name, label in LATENCIES:
        for run in runs:
            found = run.result.latencies[name]
            if found.count:
                of_run = label if len(runs) == 1 else f"{label}, {run.name}"
                values = (found.mean, found.p50, found.p90, found.p95, found.p99, found.most)
                rows.append((of_run, *(show_number(value, "s") for value in values)))
    yield Table(("", "mean", "p50", "p90", "p95", "p99", "most"), tuple(rows))
    if len(runs) > 1:
        yield _percentiles(runs)
    for name, label in LATENCIES:
        yield _curves(runs, name, label)


def _percentiles(runs: Sequence[Run]) -> Chart:
    series = (Series(run.name, tuple(run.result.latencies[name].p95 for name, _ in LATENCIES)) for run in runs)
    labels = tuple(label for _, label in LATENCIES)
    return Chart("The 95th percentiles", labels, tuple(series), Axis("of"), Axis("time", "s", LOG), BARS)


def _curves(runs: Sequence[Run], name: str, label: str) -> Chart:
    """Return the cumulative distribution of a latency."""
    curves = [dict(zip(run.result.latencies[name].curve, CURVE_PERCENTS, strict=False)) for run in runs]
    x = sorted({value for curve in curves for value in curve if value > 0})
    series = (Series(run.name, tuple(map(curve.get, x))) for run, curve in zip(runs, curves, strict=True))
    return Chart(f"{label.capitalize()}, cumulative", tuple(x), tuple(series), Axis(label, "s", LOG), SHARE)
