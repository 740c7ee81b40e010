"""What a comparison found: from the lines of the runners to sections of a page, and to a plot.

Every repeat runs all engines one after another. A ratio is taken within each repeat, between quire and the best of the
peers in that repeat, and only then summed up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bar_plot import Bar, Panel

from quire.reporting.report import Goal, Section, cell
from quire.reporting.samples import Summary, summarize

QUIRE = "quire"
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Measure:
    """One row of the table: a field of the lines of a workload; `less` is better, or more."""

    workload: str
    field: str
    text: str
    less: bool = False


SINGLE = Measure("single", "decode_tok_s", "single: decode, tok/s")
MIXED = Measure("mixed", "out_tok_s", "mixed: output, tok/s")
PREFIX = Measure("prefix", "out_tok_s", "prefix: output, tok/s")
PARALLEL = Measure("parallel", "out_tok_s", "parallel: output, tok/s")
FIRST_TOKEN = Measure("ttft512", "wall_s", "time to first token, 512 in, s", less=True)
OF_WORKLOADS = (SINGLE, MIXED, PREFIX, PARALLEL, FIRST_TOKEN)

LOAD = Measure("", "load_s", "load to ready, s", less=True)
MEMORY = Measure("", "peak_rss_gib", "peak memory, pool included, GiB", less=True)
OF_ENGINES = (LOAD, MEMORY)
"""An empty workload: any of them, the largest of its values."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What the ratio of an engine of ours to the best of some peers is held to."""

    engine: str
    measure: Measure
    ratio: float
    against: tuple[str, ...] = ("vLLM", "OpenVINO")


BOUNDS = (
    Bound(QUIRE, SINGLE, 1.3),
    Bound(QUIRE, MIXED, 1.4),
    Bound(QUIRE, PREFIX, 1.6),
    Bound(QUIRE, PARALLEL, 1.6),
    Bound(QUIRE, FIRST_TOKEN, 0.85),
    Bound(QUIRE, LOAD, 1.0, ("OpenVINO",)),
    Bound(f"{QUIRE} int8-kv", MIXED, 1.9),
    Bound(f"{QUIRE} int8", SINGLE, 2.3),
    Bound(f"{QUIRE} int8", MIXED, 2.2),
    Bound(f"{QUIRE} int8", FIRST_TOKEN, 0.5),
    Bound(f"{QUIRE} int8", MIXED, 1.8, ("OpenVINO int8",)),
    Bound(f"{QUIRE} int8", SINGLE, 1.2, ("llama.cpp",)),
)
"""Variants by the names that they are to be given: with int8 keys and values, and with int8 weights as well."""


@dataclass(slots=True)
class Comparison:
    """The lines of every engine, repeat by repeat; None where it did not run."""

    engines: dict[str, str] = field(default_factory=dict)  # how each was run: KV type, pool
    repeats: list[dict[str, list[Line] | None]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def values(self, engine: str, measure: Measure) -> list[float | None]:
        """Return the value of each repeat."""
        return [_value(repeat.get(engine), measure) for repeat in self.repeats]

    def summary(self, engine: str, measure: Measure) -> Summary | None:
        """Return median and spread; None where it was never measured."""
        values = _known(self.values(engine, measure))
        return summarize(values) if values else None

    def ratios(self, engine: str, measure: Measure, peers: Sequence[str]) -> list[float]:
        """Return the ratio of an engine to the best of the peers, of each repeat that has both."""
        found = []
        for repeat in self.repeats:
            own = _value(repeat.get(engine), measure)
            others = _known(_value(repeat.get(peer), measure) for peer in peers)
            if own is not None and others:
                found.append(own / (min(others) if measure.less else max(others)))
        return found

    def measures(self) -> list[Measure]:
        """Return what was measured of anything: the known rows, then the output of other workloads."""
        workloads = dict.fromkeys(
            line["workload"] for repeat in self.repeats for lines in repeat.values() for line in lines or ()
        )
        known = {measure.workload for measure in OF_WORKLOADS}
        others = [Measure(name, "out_tok_s", f"{name}: output, tok/s") for name in workloads if name not in known]
        every = [*OF_WORKLOADS, *others, *OF_ENGINES]
        return [each for each in every if any(self.summary(engine, each) for engine in self.engines)]

    def sections(self) -> list[Section]:
        """Return the sections of the page."""
        return [self._engines_section(), self._results_section()]

    def _engines_section(self) -> Section:
        rows = []
        for name, how in self.engines.items():
            line = next((lines[0] for repeat in self.repeats if (lines := repeat.get(name))), None)
            version = self.failures.get(name, "did not run") if line is None else str(line["version"])
            rows.append((name, version, "–" if line is None else str(line["dtype"]), how))
        text = "What ran, and with which KV memory. An engine that is not here was not named."
        return Section(
            "Engines", text, ("engine", "version", "weights", "KV memory"), rows, {"failures": self.failures}
        )

    def _results_section(self) -> Section:
        ours = [name for name in self.engines if name.startswith(QUIRE)]
        peers = [name for name in self.engines if name not in ours]
        rows = []
        for measure in self.measures():
            values = [cell(self.summary(engine, measure)) for engine in self.engines]
            best = [self.ratios(engine, measure, peers) for engine in ours]
            rows.append((measure.text, *values, *(cell(summarize(each), "×") if each else "–" for each in best)))
        text = (
            f"Median of {len(self.repeats)} repeats (min–max); every repeat runs all engines, each in a process of its "
            "own, in turning order. A ratio is that to the best peer of the same repeat."
        )
        header = ("what", *self.engines, *(f"ratio of {name}" for name in ours))
        return Section("Results", text, header, rows, {"repeats": self.repeats}, self._goals())

    def _goals(self) -> list[Goal]:
        goals = []
        for bound in BOUNDS:
            ratios = self.ratios(bound.engine, bound.measure, bound.against)
            if ratios:
                there = [peer for peer in bound.against if peer in self.engines]
                text = f"{bound.measure.text}: {bound.engine} to the best of {', '.join(there)}"
                goals.append(Goal(text, summarize(ratios).median, bound.ratio, at_least=not bound.measure.less))
        return goals

    def panels(self) -> list[Panel]:
        """Return the panels of the plot."""
        return [
            Panel(
                measure.text,
                [
                    Bar(engine, found.median, found.low, found.high)
                    for engine in self.engines
                    if (found := self.summary(engine, measure))
                ],
            )
            for measure in self.measures()
        ]


def _value(lines: list[Line] | None, measure: Measure) -> float | None:
    values = [
        float(line[measure.field])
        for line in lines or ()
        if measure.workload in ("", line["workload"]) and line.get(measure.field) is not None
    ]
    return max(values) if values else None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
