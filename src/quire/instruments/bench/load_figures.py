"""The figures of a load: rates in its steady middle, percentiles of times, and goodput.

    0 ── warm-up ──┬────────── window ──────────┬─ duration ─── remaining requests end
                   rates: requests that ended here
                   times: requests that were due here

Rates count only the window, without the times when the server fills or empties. A request is good if it was completed
and met every given objective; goodput is good requests per second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quire.core.errors import InvalidValueError
from quire.instruments.bench.load_run import LoadResult
from quire.instruments.bench.streams import Outcome
from quire.reporting.samples import percentile

SHARES = (0.5, 0.9, 0.99)
WARM_UP_SHARE = 0.2

FIRST_TOKEN, PER_TOKEN, BETWEEN_TOKENS, WHOLE = (
    "time to first token",
    "time per output token",
    "between tokens",
    "whole request",
)
MEASURES = {"ttft": FIRST_TOKEN, "tpot": PER_TOKEN, "itl": BETWEEN_TOKENS, "e2el": WHOLE}
"""The measures that objectives can limit, by the names that similar tools use."""

REJECTION = "rejection"


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The p50, p90 and p99 of some times, in milliseconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One level of load, and its results. Rates are per second; `times_ms` has no entry for a measure without times."""

    name: str
    offered: float
    completed: float
    good: float
    output_tokens: float
    num_requests: int
    num_rejected: int
    num_failed: int
    num_cut_off: int
    times_ms: dict[str, Percentiles]
    lateness_ms: float  # p99 of the delay with which this process sent requests
    processor_share: float  # of one processor, used by this process
    first_error: str

    @property
    def summary(self) -> str:
        """The level in one line."""
        times = self.times_ms.get(FIRST_TOKEN)
        first = "no first token" if times is None else f"first token p99 {times.p99:,.0f} ms"
        return f"{self.name}: {self.completed:.2f} completed/s, {self.output_tokens:,.0f} tok/s, {first}"


def read_objectives(texts: Iterable[str]) -> dict[str, float]:
    """Return the objectives of `--goodput`: milliseconds by measure.

    >>> read_objectives(["ttft:500", "tpot:50"])
    {'ttft': 500.0, 'tpot': 50.0}
    """
    found = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            found[name] = float(limit)
        except ValueError:
            found[name] = -1.0
        if name not in MEASURES or not 0 < found[name] < float("inf"):
            raise InvalidValueError("goodput", text, f"{', '.join(MEASURES)}, each with milliseconds, as ttft:500")
    return found


def is_good(outcome: Outcome, objectives: Mapping[str, float]) -> bool:
    """Return whether a request was completed and met all objectives; each gap must meet its own."""
    if not outcome.is_done:
        return False
    return all(max(times_of(outcome, name), default=0.0) <= limit for name, limit in objectives.items())


def times_of(outcome: Outcome, measure: str) -> list[float]:
    """Return the times of a measure in milliseconds; empty if the request has none.

    >>> times_of(Outcome(due_s=1.0, events_s=[1.5]), "ttft")
    [500.0]
    """
    if measure == "itl":
        return [1e3 * gap for gap in outcome.gaps_s]
    value = {
        "ttft": outcome.first_token_s,
        "tpot": outcome.token_s,
        "e2el": outcome.whole_s if outcome.is_done else None,
    }[measure]
    return [] if value is None else [1e3 * value]


def summarize_load(name: str, result: LoadResult, objectives: Mapping[str, float]) -> LoadFigures:
    """Return the figures of a run. Does not mutate."""
    start, end = WARM_UP_SHARE * result.duration_s, result.duration_s
    width = end - start
    due = [outcome for outcome in result.outcomes if start <= outcome.due_s < end]
    ended = [outcome for outcome in result.outcomes if outcome.is_done and start <= outcome.end_s < end]
    times = {
        title: [time for outcome in due if outcome.status in (0, 200) for time in times_of(outcome, measure)]
        for measure, title in MEASURES.items()
    }
    times[REJECTION] = [1e3 * outcome.whole_s for outcome in result.outcomes if outcome.is_rejected]
    failed = [outcome for outcome in result.outcomes if outcome.error and not outcome.is_rejected]
    return LoadFigures(
        name=name,
        offered=len(due) / width,
        completed=len(ended) / width,
        good=sum(is_good(outcome, objectives) for outcome in ended) / width,
        output_tokens=sum(tokens_between(outcome, start, end) for outcome in result.outcomes) / width,
        num_requests=len(result.outcomes),
        num_rejected=len(times[REJECTION]),
        num_failed=len(failed),
        num_cut_off=sum(outcome.is_cut_off for outcome in result.outcomes),
        times_ms={title: percentiles(found) for title, found in times.items() if found},
        lateness_ms=1e3 * percentile([outcome.sent_s - outcome.due_s for outcome in result.outcomes] or [0.0], 0.99),
        processor_share=result.processor_s / max(result.wall_s, 1e-9),
        first_error=next((outcome.error for outcome in failed), ""),
    )


def percentiles(times: Sequence[float]) -> Percentiles:
    """Return the percentiles of at least one time.

    >>> percentiles([float(value) for value in range(100)])
    Percentiles(p50=50.0, p90=90.0, p99=99.0)
    """
    return Percentiles(*(percentile(times, share) for share in SHARES))


def tokens_between(outcome: Outcome, start_s: float, end_s: float) -> float:
    """Return the number of output tokens between two moments, if all events have the same number of tokens.

    >>> tokens_between(Outcome(0.0, events_s=[1.0, 2.0, 3.0], num_output_tokens=6), 1.5, 9.0)
    4.0
    """
    events = outcome.events_s
    if not events:
        return 0.0
    per_event = outcome.num_output_tokens / len(events) if outcome.num_output_tokens else 1.0
    return per_event * sum(start_s <= time < end_s for time in events)
