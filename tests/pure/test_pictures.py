"""Pictures of charts: ticks stand at round numbers, and every bar, line, area and word where its number is."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.reporting.document.axis import Range, show_number
from quire.reporting.document.content import AREAS, BARS, LINEAR, LINES, LOG, Axis, Chart, Series
from quire.reporting.document.svg import (
    EDGE,
    FOOT,
    HEIGHT,
    LEFT,
    LONGEST_NAME,
    MARKED,
    MAX_LABELLED_BARS,
    RIGHT,
    ROW,
    TILTED_FOOT,
    WIDTH,
    bar_edges,
    chart_svg,
    escape,
    shortened,
    stacked,
)

TOP = 44 + 34  # of what is plotted, below one row of the legend
BOTTOM = TOP + HEIGHT
Node = dict[str, str]


def drawn(chart: Chart, *, on_ground: bool = False) -> list[tuple[str, Node, str]]:
    """The parts of a picture: what they are, their attributes, their words."""
    root = ElementTree.fromstring(chart_svg(chart, on_ground=on_ground))
    return [(node.tag.partition("}")[2], dict(node.attrib), node.text or "") for node in root]


def boxes(chart: Chart) -> list[tuple[float, float, float, float]]:
    """Left, top, right and bottom of each bar; the legend is left out."""
    found = []
    for tag, node, _ in drawn(chart):
        if tag == "rect" and node["width"] != "14":
            x, y, width, height = (float(node[name]) for name in ("x", "y", "width", "height"))
            found.append((x, y, x + width, y + height))
    return found


def paths(chart: Chart, sign: str) -> list[list[tuple[float, float]]]:
    """The corners of each line (no sign) or area (sign Z)."""
    words = [node["d"] for tag, node, _ in drawn(chart) if tag == "path" and "H" not in node["d"]]
    return [
        [(float(x), float(y)) for x, y in (spot.split() for spot in path.removesuffix("Z")[1:].split("L"))]
        for path in words
        if path.endswith("Z") == (sign == "Z")
    ]


def down(share: float) -> float:
    return BOTTOM - HEIGHT * share


def right(share: float) -> float:
    return LEFT + (WIDTH - RIGHT - LEFT) * share


# ---- axes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "low", "high", "ticks"),
    [
        ([], 0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ([0.0], 0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ([10.0], 0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        ([10.1], 0.0, 15.0, [0, 5, 10, 15]),
        ([50.0], 0.0, 50.0, [0, 10, 20, 30, 40, 50]),
        ([99.0, 3.0], 0.0, 100.0, [0, 20, 40, 60, 80, 100]),
        ([-5.0, 5.0], -6.0, 6.0, [-5, 0, 5]),
        ([-3.0], -3.0, 1.0, [-3, -2, -1, 0, 1]),
        ([0.003], 0.0, 0.003, [0, 0.001, 0.002, 0.003]),
    ],
)
def test_a_linear_y_axis_has_zero_and_round_numbers(
    values: list[float], low: float, high: float, ticks: list[float]
) -> None:
    found = Range.around(Axis("y"), values)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found.ticks() == [pytest.approx(tick) for tick in ticks]


@pytest.mark.parametrize(
    ("values", "low", "high", "ticks"),
    [
        ([], 1, 10, [1, 2, 5, 10]),
        ([3.0], 2, 5, [2, 5]),
        ([2.0], 2, 20, [2, 5, 10, 20]),
        ([1.0, 100.0], 1, 100, [1, 2, 5, 10, 20, 50, 100]),
        ([1.0, 1000.0], 1, 1000, [1, 10, 100, 1000]),
        ([1.0, 1e10], 1, 1e10, [1, 1e2, 1e4, 1e6, 1e8, 1e10]),
        ([0.013, 0.8], 0.01, 1.0, [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]),
        ([99.0], 50, 100, [50, 100]),
    ],
)
def test_a_logarithmic_y_axis_has_round_ends(values: list[float], low: float, high: float, ticks: list[float]) -> None:
    found = Range.around(Axis("y", scale=LOG), values)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found.ticks() == [pytest.approx(tick) for tick in ticks]


def test_an_x_axis_ends_where_its_values_do_unless_there_is_one_only() -> None:
    assert Range.of(Axis("x"), [3.0, 17.5, 4.0]) == Range(3.0, 17.5, LINEAR)
    assert Range.of(Axis("x", scale=LOG), [3.0, 17.5]) == Range(3.0, 17.5, LOG)
    assert Range.of(Axis("x"), []) == Range(1.0, 2.0, LINEAR)
    assert Range.of(Axis("x"), [10.0]) == Range.around(Axis("x"), [10.0])


@given(st.floats(1e-6, 1e6), st.floats(1.0001, 1e6), st.sampled_from([LINEAR, LOG]))
def test_ticks_are_about_five_evenly_spaced_round_numbers(low: float, ratio: float, scale: str) -> None:
    found = Range(low, low * ratio, scale)
    ticks = found.ticks()
    assert 2 <= len(ticks) <= 11
    assert ticks == sorted(set(ticks))
    gaps = [after - before for before, after in itertools.pairwise(ticks)]
    digits = {f"{tick:e}".partition("e")[0].strip("0").strip(".") for tick in ticks if scale == LOG}
    if not digits <= {"1", "2", "5"}:  # a linear one, or a logarithmic one that is nearly linear
        assert gaps == [pytest.approx(gaps[0])] * len(gaps)
    if scale == LINEAR:
        step = float(f"{gaps[0]:.6g}")
        assert f"{step:e}"[0] in "125"
        assert ticks[0] - low < step * 1.001
        assert low * ratio - ticks[-1] < step * 1.001


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(0, 1))
def test_a_share_of_an_axis_is_that_of_the_length_or_of_the_logarithm(first: float, second: float, at: float) -> None:
    low, high = min(first, second), max(first, second) * 1.01
    assert Range(low, high, LINEAR).share(low + at * (high - low)) == pytest.approx(at, abs=1e-6)
    assert Range(low, high, LOG).share(low * (high / low) ** at) == pytest.approx(at, abs=1e-6)


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0.9994, "s", "999 ms"),
        (0.9995, "s", "1 s"),
        (-0.5, "s", "-500 ms"),
        (0.0, "s", "0 s"),
        (0.5, "x", "0.5 x"),
        (-1234.5, "", "-1,234"),
        (999.49, "tok/s", "999 tok/s"),
    ],
)
def test_numbers_have_their_unit_and_short_times_are_milliseconds(value: float, unit: str, words: str) -> None:
    assert show_number(value, unit) == words


# ---- lines and areas -----------------------------------------------------------------------------------------------


def chart_of(*columns: Sequence[float | None], kind: str = LINES, **axes: Any) -> Chart:
    count = len(columns[0])
    x = tuple(f"n{index}" for index in range(count)) if kind == BARS else tuple(float(index) for index in range(count))
    series = tuple(Series(f"s{number}", tuple(column)) for number, column in enumerate(columns))
    return Chart("title", x, series, axes.get("x_axis", Axis("x")), axes.get("y_axis", Axis("y")), kind)


def test_a_line_has_a_corner_at_each_number_and_none_where_there_is_none() -> None:
    chart = chart_of([0.0, 50.0, None, math.nan, 100.0], [None, 20.0, None, None, None])
    assert paths(chart, "") == [[(right(0), down(0)), (right(0.25), down(0.5)), (right(1), down(1))]]
    circles = [(float(node["cx"]), float(node["cy"])) for tag, node, _ in drawn(chart) if tag == "circle"]
    assert circles == [*paths(chart, "")[0], (right(0.25), down(0.2))], "one point alone is a point and no line"


@pytest.mark.parametrize("count", [MARKED, MARKED + 1])
def test_a_line_of_many_points_does_not_show_them(count: int) -> None:
    tags = [tag for tag, _, _ in drawn(chart_of([1.0] * count))]
    assert tags.count("circle") == (count if count <= MARKED else 0)


def test_logarithmic_axes_have_their_numbers_at_their_logarithms() -> None:
    x_axis, y_axis = Axis("x", scale=LOG), Axis("y", scale=LOG)
    series = (Series("s", (1.0, 100.0, -1.0, 10.0)),)
    chart = Chart("t", (0.0, 1.0, 10.0, 100.0), series, x_axis, y_axis)
    assert paths(chart, "") == [[(right(0), down(1)), (right(1), down(0.5))]], "0 and -1 have no logarithm"


def test_an_area_reaches_from_the_bottom_to_the_sum_of_those_below_it() -> None:
    chart = chart_of([1.0, 2.0], [3.0, None], kind=AREAS)
    assert stacked(chart) == [(1.0, 2.0), (4.0, 2.0)]
    upper, lower = paths(chart, "Z")
    assert lower == [(right(0), BOTTOM), (right(0), down(0.25)), (right(1), down(0.5)), (right(1), BOTTOM)]
    assert upper == [(right(0), BOTTOM), (right(0), down(1.0)), (right(1), down(0.5)), (right(1), BOTTOM)]


# ---- bars ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(0, 5))
def test_the_bars_of_a_place_lie_side_by_side_in_four_fifths_of_it(num_series: int, place: int) -> None:
    edges = [bar_edges(float(place), index, num_series) for index in range(num_series)]
    assert (edges[0][0], edges[-1][1]) == (pytest.approx(place - 0.4), pytest.approx(place + 0.4))
    for (_, before), (after, _) in itertools.pairwise(edges):
        assert before == pytest.approx(after)


def test_bars_go_from_zero_to_their_number_up_or_down() -> None:
    chart = chart_of([10.0, -5.0, None], [0.0, 5.0, 10.0], kind=BARS)
    share = {value: (value + 5) / 15 for value in (-5.0, 0.0, 5.0, 10.0)}  # the axis goes from -5 to 10
    expected = []
    for index, column in enumerate(([(0, 10.0), (1, -5.0)], [(0, 0.0), (1, 5.0), (2, 10.0)])):
        for place, value in column:
            left, end = bar_edges(place, index, 2)
            top, bottom = sorted((down(share[value]), down(share[0.0])))
            expected.append((right((left + 0.5) / 3), top, right((end + 0.5) / 3), bottom))
    for found, wanted in zip(boxes(chart), expected, strict=True):
        assert found == pytest.approx(wanted, abs=0.11)


def test_the_least_bar_of_a_logarithmic_axis_is_seen() -> None:
    chart = chart_of([10.0, 100.0], kind=BARS, y_axis=Axis("y", scale=LOG))
    (_, top, _, bottom), (_, highest, _, base) = boxes(chart)
    assert (bottom, base, highest) == (pytest.approx(BOTTOM), pytest.approx(BOTTOM), pytest.approx(TOP))
    assert BOTTOM - top == pytest.approx(HEIGHT * math.log(2) / math.log(20), abs=0.1)


@pytest.mark.parametrize("count", [MAX_LABELLED_BARS, MAX_LABELLED_BARS + 1])
def test_few_bars_have_their_numbers_above_them_and_many_have_none(count: int) -> None:
    found = [(node, words) for _, node, words in drawn(chart_of([3.25] * count, kind=BARS)) if words == "3.25"]
    assert len(found) == (count if count <= MAX_LABELLED_BARS else 0)
    for (node, _), (left, top, end, _) in zip(found, boxes(chart_of([3.25] * count, kind=BARS)), strict=False):
        assert (float(node["x"]), float(node["y"])) == (pytest.approx((left + end) / 2, abs=0.1), top - 5)


# ---- words ---------------------------------------------------------------------------------------------------------


def words_of(chart: Chart) -> list[tuple[str, float, float]]:
    return [(words, float(node["x"]), float(node["y"])) for tag, node, words in drawn(chart) if tag == "text"]


def test_axes_are_named_and_each_tick_stands_at_its_number() -> None:
    chart = chart_of([0.0, 100.0], x_axis=Axis("time", "s"), y_axis=Axis("rate", "tok/s"))
    found = {words: (x, y) for words, x, y in words_of(chart)}
    assert found["title"] == (EDGE, 22)
    assert found["rate, tok/s"] == (EDGE, TOP - 10)
    assert found["time"] == (pytest.approx((LEFT + WIDTH - RIGHT) / 2), BOTTOM + FOOT - 12)
    for tick in (0, 20, 40, 60, 80, 100):
        assert found[str(tick)] == (LEFT - 8, pytest.approx(down(tick / 100) + 4))
    for share, label in ((0.0, "0 s"), (0.2, "200 ms"), (1.0, "1 s")):
        assert found[label] == (pytest.approx(right(share)), BOTTOM + 18)
    lines = [node["d"] for tag, node, _ in drawn(chart) if tag == "path" and "H" in node["d"]]
    assert lines == [f"M{LEFT} {down(tick / 5):.1f}H{WIDTH - RIGHT}" for tick in range(6)]


@pytest.mark.parametrize(("length", "is_crowded"), [(10, False), (11, True)])
def test_names_that_do_not_fit_side_by_side_are_tilted_and_have_more_room(length: int, is_crowded: bool) -> None:
    names = tuple(f"{index}".ljust(length, "x") for index in range(9))
    chart = Chart("t", names, (Series("s", (1.0,) * 9),), Axis("x"), Axis("y"), BARS)
    root = ElementTree.fromstring(chart_svg(chart))
    foot = TILTED_FOOT if is_crowded else FOOT
    assert (root.attrib["width"], root.attrib["height"]) == (str(WIDTH), str(BOTTOM + foot))
    labels = [node for tag, node, words in drawn(chart) if words in names]
    assert len(labels) == 9
    for index, node in enumerate(labels):
        assert float(node["x"]) == pytest.approx(right((index + 0.5) / 9), abs=0.1)
        expected = f"rotate(-25 {node['x']} {BOTTOM + 18})" if is_crowded else None
        assert (node.get("transform"), node["text-anchor"]) == (expected, "end" if is_crowded else "middle")


def test_a_legend_takes_as_many_rows_as_it_needs_and_the_plot_begins_below() -> None:
    series = tuple(Series("n" * 40, (1.0, 2.0)) for _ in range(5))  # two fit into a row
    chart = Chart("t", (0.0, 1.0), series, Axis("x"), Axis("y"))
    marks = [(float(node["x"]), float(node["y"])) for tag, node, _ in drawn(chart) if tag == "rect"]
    width = 34 + 7.0 * 40
    assert marks == [(EDGE + width * (index % 2), 44 - 8 + ROW * (index // 2)) for index in range(5)]
    assert max(y for path in paths(chart, "") for _, y in path) == down(0.5) + 2 * ROW


def test_a_picture_has_a_ground_where_it_stands_alone() -> None:
    tag, node, _ = drawn(chart_of([1.0, 2.0]), on_ground=True)[1]
    assert (tag, node["width"], node["height"]) == ("rect", str(WIDTH), str(BOTTOM + FOOT))
    assert not [node for tag, node, _ in drawn(chart_of([1.0, 2.0])) if tag == "rect" and node["width"] == str(WIDTH)]


@given(st.text(max_size=60))
def test_a_long_name_keeps_its_beginning_and_its_end(name: str) -> None:
    found = shortened(name)
    if len(name) <= LONGEST_NAME:
        assert found == name
    else:
        assert len(found) == LONGEST_NAME
        assert name.startswith(found.partition("…")[0]) or "…" in name
        assert found[:10] + "…" + found[-10:] == found


@given(st.text(st.characters(), max_size=20))
def test_any_words_can_stand_in_xml(words: str) -> None:
    shown = ElementTree.fromstring(f'<a b="{escape(words)}">{escape(words)}</a>')
    allowed = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
    expected = allowed.sub("\ufffd", words)
    assert (shown.text or "").replace("\r", "\n") == re.sub("\r\n?", "\n", expected).replace("\r", "\n")
