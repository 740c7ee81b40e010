"""The speed-up by threads: the same work, timed with several numbers of threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from quire.reporting.report import Section, cell
from quire.reporting.samples import summarize

Seconds: TypeAlias = dict[str, list[float]]
"""Times by the name of the work, one entry per run."""


def compare_threads(seconds: Mapping[int, Seconds]) -> Section:
    """Return the times for each number of threads, and the speed-up over the smallest number.

    >>> compare_threads({1: {"a product": [0.004]}, 2: {"a product": [0.0025]}}).rows
    [('a product', '4.00 (4.00–4.00)', '2.50 (2.50–2.50)', '1.60')]
    """
    fewest = min(seconds)
    others = [number for number in seconds if number != fewest]
    rows = []
    for name, alone in seconds[fewest].items():
        times = (cell(summarize([1e3 * each for each in found[name]])) for found in seconds.values())
        faster = (summarize(alone).median / summarize(seconds[number][name]).median for number in others)
        rows.append((name, *times, *(f"{ratio:.2f}" for ratio in faster)))
    header = ("what", *(f"ms, threads: {n}" for n in seconds), *(f"speed-up, threads: {n}" for n in others))
    text = (
        f"The times of the tables above, and the speed-up over {fewest} {'thread' if fewest == 1 else 'threads'}. If "
        "memory is the limit, the threads share its bandwidth."
    )
    return Section("Threads", text, header, rows, {str(number): found for number, found in seconds.items()})
