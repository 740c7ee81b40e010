"""The text format of Prometheus, version 0.0.4: counters, gauges and histograms of fixed buckets.

    # HELP quire_requests_running Sequences running in the engine.
    # TYPE quire_requests_running gauge
    quire_requests_running 3

Values are plain Python numbers that one event loop changes, so they need no locks. A library would add process-wide
registries, and locks for threads that we do not have.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Final, Literal, NamedTuple

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[tuple[str, str], ...]
ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})


class Sample(NamedTuple):
    """One line; `suffix` is for the parts of a histogram."""

    value: float
    labels: Labels = ()
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """All samples of one name."""

    name: str
    kind: Kind
    help: str
    samples: Sequence[Sample]

    def labelled(self, name: str, labels: Labels) -> Family:
        """Return the family under another name, with more labels. Does not mutate."""
        samples = [sample._replace(labels=labels + sample.labels) for sample in self.samples]
        return replace(self, name=name, samples=samples)


def gauge(name: str, text: str, value: float) -> Family:
    """Return a family of one number that goes up and down."""
    return Family(name, "gauge", text, [Sample(value)])


def counter(name: str, text: str, value: float) -> Family:
    """Return a family of one number that only grows."""
    return Family(name, "counter", text, [Sample(value)])


def by_label(name: str, kind: Kind, text: str, label: str, values: Mapping[str, float]) -> Family:
    """Return a family with a number for each value of a label."""
    return Family(name, kind, text, [Sample(value, ((label, key),)) for key, value in sorted(values.items())])


def by_outcome(name: str, text: str, counts: Mapping[str, float]) -> Family:
    """Return a counter for each outcome, whose words are joined by underscores."""
    return by_label(name, "counter", text, "outcome", {key.replace(" ", "_"): count for key, count in counts.items()})


@dataclass(slots=True)
class Histogram:
    """Counts values in buckets, by their upper bounds.

    >>> seconds = Histogram((0.1, 1.0))
    >>> for value in (0.05, 0.1, 3.0): seconds.observe(value)
    >>> [(sample.suffix, sample.labels, sample.value) for sample in seconds.samples()][:2]
    [('_bucket', (('le', '0.1'),), 2), ('_bucket', (('le', '1'),), 2)]
    """

    bounds: tuple[float, ...]
    total: float = 0.0
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value. Mutates; O(log bounds)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def samples(self) -> list[Sample]:
        """Return the lines. Does not mutate."""
        edges = [*map(number, self.bounds), "+Inf"]
        sums = list(accumulate(self.counts))
        buckets = [Sample(count, (("le", edge),), "_bucket") for edge, count in zip(edges, sums, strict=True)]
        return [*buckets, Sample(self.total, (), "_sum"), Sample(sums[-1], (), "_count")]


def histogram(name: str, text: str, values: Histogram) -> Family:
    """Return a family of the distribution of values."""
    return Family(name, "histogram", text, values.samples())


def number(value: float) -> str:
    """Return a number in the format's notation.

    >>> number(3), number(0.25), number(float("inf")), number(1e9), number(2.0)
    ('3', '0.25', '+Inf', '1000000000', '2')
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1 << 53 else repr(float(value))


def render(families: Iterable[Family]) -> bytes:
    r"""Return the text of families. Does not mutate.

    >>> render([by_label("n", "gauge", "Things.", "what", {'a "b"': 1})])
    b'# HELP n Things.\n# TYPE n gauge\nn{what="a \\"b\\""} 1\n'
    """
    return "".join(line + "\n" for family in families for line in _lines(family)).encode()


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {family.help.translate(HELP_ESCAPES)}"
    yield f"# TYPE {family.name} {family.kind}"
    for value, labels, suffix in family.samples:
        pairs = ",".join(f'{name}="{text.translate(ESCAPES)}"' for name, text in labels)
        yield f"{family.name}{suffix}{'{' + pairs + '}' if pairs else ''} {number(value)}"
