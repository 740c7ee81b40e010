"""A reader of Prometheus' text format that forgives nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*"
SAMPLE = re.compile(rf"({NAME})(?:\{{(.*)\}})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')


@dataclass
class Read:
    """One family as it was read; names of samples with their labels."""

    kind: str
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)

    def value(self, suffix: str = "", /, **labels: str) -> float:
        (found,) = [
            number
            for (name_suffix, have), number in self.samples.items()
            if name_suffix == suffix and set(labels.items()) <= set(have)
        ]
        return found


def parse(text: str) -> dict[str, Read]:
    """Return the families; fails for whatever Prometheus would not take."""
    assert text.endswith("\n")
    families: dict[str, Read] = {}
    helped: set[str] = set()
    name = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, _, about = line.removeprefix("# HELP ").partition(" ")
            assert about, line
            assert name not in helped, line
            helped.add(name)
        elif line.startswith("# TYPE "):
            typed, _, kind = line.removeprefix("# TYPE ").partition(" ")
            assert typed == name, line
            assert typed not in families, line
            assert kind in ("counter", "gauge", "histogram"), line
            families[typed] = Read(kind)
        else:
            _add_sample(families[name], name, line)
    for name, family in families.items():
        if family.kind == "counter":
            assert name.endswith("_total") or not family.samples, name
        if family.kind == "histogram":
            _check_histogram(family)
    return families


def _add_sample(family: Read, name: str, line: str) -> None:
    match = SAMPLE.fullmatch(line)
    assert match, line
    suffix = match[1].removeprefix(name)
    assert match[1].startswith(name), line
    assert suffix in (("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)), line
    inside = match[2] or ""
    labels = tuple((label[1], label[2]) for label in LABEL.finditer(inside))
    assert "".join(f'{key}="{value}",' for key, value in labels).rstrip(",") == inside, line
    assert (suffix, labels) not in family.samples, line
    family.samples[suffix, labels] = float(match[3])


def _check_histogram(family: Read) -> None:
    buckets = [
        (float(dict(labels)["le"]), count) for (suffix, labels), count in family.samples.items() if suffix == "_bucket"
    ]
    assert buckets == sorted(buckets)
    assert [count for _, count in buckets] == sorted(count for _, count in buckets)
    assert buckets[-1][0] == float("inf")
    assert buckets[-1][1] == family.value("_count")
