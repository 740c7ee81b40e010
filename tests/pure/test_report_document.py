"""Pages: what comes from outside stays words, pictures are XML, numbers arrive, nothing is asked for."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import zlib
from array import array
from functools import partial
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import resvg_py
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import InvariantError
from quire.reporting.document.axis import Range, show_number
from quire.reporting.document.content import (
    AREAS,
    BARS,
    LINEAR,
    LINES,
    LOG,
    Axis,
    Chart,
    Document,
    Film,
    Section,
    Series,
    Table,
)
from quire.reporting.document.html import document_html, safe_json
from quire.reporting.document.png import require_png, svg_png
from quire.reporting.document.svg import FONT, HEIGHT, chart_svg, stacked
from quire.reporting.document.theme import Theme

EVIL = "</script><script>alert(1)</script><!-- \" ' & <img src=x onerror=alert(2)> ]]> \u2028 `<b>`"
FILM = Film("blocks", (0.0, 1.5), (bytes(range(18)), bytes(18)), ("one", "two"), 3)


class ParsedDocument(HTMLParser):
    """What stands in a page: its elements, its words, and the texts of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._inside: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = [dict(attrs)] if tag == "script" else []

    def handle_endtag(self, tag: str) -> None:
        self._inside = []

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts.append((self._inside[0], data))
        else:
            self.words += data


def evil_document() -> Document:
    """A page in which every word is hostile."""
    axis = Axis(EVIL, EVIL)
    chart = Chart(EVIL, (1.0, 2.0), (Series(EVIL, (1.0, 2.0)),), axis, axis, note=EVIL, group=EVIL)
    bars = Chart(EVIL, (EVIL, "b"), (Series(EVIL, (1.0, 2.0)),), axis, axis, BARS)
    film = Film(EVIL, (0.0,), (bytes(6),), (EVIL,), 1, group=EVIL)
    table = Table((EVIL, EVIL), ((EVIL, EVIL),), EVIL, EVIL)
    return Document(
        EVIL, tuple(Section(EVIL, (EVIL, table, chart, bars, film)) for _ in range(4)), EVIL, ((EVIL, EVIL),)
    )


def calm_document() -> Document:
    """The same page, in which every word is harmless."""
    chart = Chart("t", (1.0, 2.0), (Series("s", (1.0, 2.0)),), Axis("x"), Axis("y"), note="n")
    bars = Chart("t", ("a" * len(EVIL), "b"), (Series("s", (1.0, 2.0)),), Axis("x"), Axis("y"), BARS)
    film = Film("f", (0.0,), (bytes(6),), ("c",), 1)
    table = Table(("a", "b"), (("a", "b" * len(EVIL)),), "t", "n")
    return Document("p", tuple(Section("s", ("w", table, chart, bars, film)) for _ in range(4)), "l", (("a", "b"),))


# ---- what comes from outside ----------------------------------------------------------------------------------------


def test_hostile_names_add_no_element_and_no_attribute() -> None:
    evil, calm = ParsedDocument(document_html(evil_document())), ParsedDocument(document_html(calm_document()))
    assert [tag for tag in evil.tags if tag != "code"] == calm.tags
    code = evil.tags.count("code")
    assert code > 0  # of the backticks, and of nothing else
    assert len(evil.attributes) == len(calm.attributes)
    assert evil.words.count("<img src=x onerror=alert(2)>") > 20


def test_hostile_names_end_no_script() -> None:
    document = ParsedDocument(document_html(evil_document()))
    (data, plots, own) = document.scripts
    content = json.loads(data[1])
    assert content["charts"][0]["title"] == EVIL
    assert content["charts"][1]["names"] == [EVIL, "b"]
    assert content["films"][0]["captions"] == [EVIL]
    assert "alert" not in plots[1] + own[1]


@given(st.text())
def test_json_in_a_script_is_the_same_and_has_no_tag(text: str) -> None:
    found = safe_json({text: [text]})
    assert json.loads(found) == {text: [text]}
    assert "<" not in found and found.isascii()


def test_the_policy_lets_these_two_scripts_run_and_nothing_be_loaded() -> None:
    text = document_html(calm_document())
    document = ParsedDocument(text)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    runnable = [script for attributes, script in document.scripts if attributes.get("type") != "application/json"]
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in runnable]
    assert rules["script-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    assert rules["img-src"] == "data:"
    assert [name for name, _ in document.attributes if name == "src" or name.startswith("on")] == []
    assert [value for name, value in document.attributes if name == "href" and not str(value).startswith("#")] == []
    assert "@import" not in text and "url(" not in text


# ---- values ---------------------------------------------------------------------------------------------------------


def test_tables_of_words_name_the_column_in_each_cell_and_those_of_figures_do_not() -> None:
    long = "a cell of so many words that it must go over several lines"
    tables = Table(("", "why"), (("a", long), ("b", "few"))), Table(("", "figure"), (("a", "1"),))
    document = ParsedDocument(document_html(Document("p", (Section("s", tables),))))
    assert [value for name, value in document.attributes if name == "data-column"] == ["why", "why"]
    assert document.attributes.count(("class", "words")) == 1


@pytest.mark.parametrize("count", [3, 4])
def test_sections_are_listed_and_charts_set_closer_where_there_are_four(count: int) -> None:
    chart = Chart("t", (1.0, 2.0), (Series("s", (1.0, 2.0)),), Axis("x"), Axis("y"))
    sections = tuple(Section(f"part {index}", (chart,) * count if not index else ()) for index in range(count))
    document = ParsedDocument(document_html(Document("p", sections)))
    links = [value for name, value in document.attributes if name == "href"]
    places = [value for name, value in document.attributes if name == "id" and (value or "").startswith("section-")]
    assert places == [f"section-{index}" for index in range(count)]
    assert links == ([f"#{place}" for place in places] if count == 4 else [])
    assert document.attributes.count(("class", "many")) == (count == 4)


def test_what_is_not_said_leaves_no_empty_element() -> None:
    table = Table(("a", "b"), (("1", "2"),))
    chart = Chart("t", (1.0, 2.0), (Series("s", (1.0, 2.0)),), Axis("x"), Axis("y"))
    bare = ParsedDocument(document_html(Document("p", (Section("s", (table, chart)),))))
    assert not {"caption", "dl", "nav"} & set(bare.tags)
    assert ("class", "note") not in bare.attributes
    told = Table(("a", "b"), (("1", "2"),), "title of it", "note of it")
    facts = (("machine", "small"), ("threads", "2"))
    full = ParsedDocument(document_html(Document("p", (Section("s", (told,)),), "the lead", facts)))
    assert (full.tags.count("caption"), full.tags.count("dt"), full.tags.count("dd")) == (1, 2, 2)
    assert full.attributes.count(("class", "note")) == 1
    for words in ("title of it", "note of it", "the lead", "machine", "small", "threads"):
        assert full.words.count(words) == 1


def test_a_film_of_many_blocks_says_how_many_are_in_a_cell() -> None:
    for per_cell, words in ((1, "blocks"), (1500, "blocks, 1,500 blocks in a cell")):
        film = Film("blocks", (0.0,), (bytes(6),), ("c",), per_cell, blocks_per_cell=per_cell)
        document = ParsedDocument(document_html(Document("p", (Section("s", (film,)),))))
        assert words in document.words
        assert ("in a cell" in document.words) == (per_cell > 1)


def test_the_same_page_is_the_same_text() -> None:
    assert document_html(evil_document()) == document_html(evil_document())


def test_numbers_and_pictures_arrive_as_they_were() -> None:
    chart = Chart(
        "t", (0.5, 2.0), (Series("s", (1 / 3, None)), Series("n", (math.nan, math.inf))), Axis("x"), Axis("y")
    )
    (data, *_) = ParsedDocument(document_html(Document("p", (Section("s", (chart, FILM)),)))).scripts
    content = json.loads(data[1])
    assert content["charts"][0]["places"] == [0.5, 2.0]
    assert [one["values"] for one in content["charts"][0]["series"]] == [[0.333333, None], [None, None]]
    film = content["films"][0]
    assert zlib.decompress(base64.b64decode(film["pictures"])) == b"".join(FILM.pictures)
    assert (film["times"], film["captions"], film["numCells"]) == ([0.0, 1.5], ["one", "two"], 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Chart("t", (1.0, 2.0), (Series("s", (1.0,)),), Axis("x"), Axis("y")),
        lambda: Chart("t", (2.0, 1.0), (), Axis("x"), Axis("y")),
        lambda: Chart("t", (1.0,), (), Axis("x"), Axis("y"), BARS),
        lambda: Chart("t", ("a",), (), Axis("x"), Axis("y")),
        lambda: Table(("a", "b"), (("a",),), "t"),
        lambda: Film("t", (0.0,), (bytes(5),), ("c",), 1),
        lambda: Film("t", (0.0,), (bytes(6),), (), 1),
        lambda: chart_svg(Chart("t", (1.0,), (Series("s", (1.0,), "mauve"),), Axis("x"), Axis("y"))),
    ],
)
def test_what_does_not_fit_together_is_refused(make: object) -> None:
    with pytest.raises(InvariantError, match="'t'"):
        make()  # type: ignore[operator]


# ---- pictures -------------------------------------------------------------------------------------------------------

AXES = st.builds(Axis, st.text(max_size=8), st.sampled_from(["", "s", "%"]), st.sampled_from([LINEAR, LOG]))
NUMBERS = st.floats(-1e9, 1e9).map(lambda value: round(value, 6))
VALUES = st.none() | NUMBERS | st.just(math.nan) | st.floats(1e-9, 1.0)


@st.composite
def charts(draw: st.DrawFn) -> Chart:
    kind = draw(st.sampled_from([LINES, AREAS, BARS]))
    size = draw(st.integers(0, 30))
    places = sorted(draw(st.sets(NUMBERS, min_size=size, max_size=size)))
    x = tuple(f"name {number}" for number in range(size)) if kind == BARS else tuple(places)
    columns = draw(st.lists(st.lists(VALUES, min_size=size, max_size=size), max_size=12))
    series = tuple(Series(f"series {number} & <more>", tuple(column)) for number, column in enumerate(columns))
    return Chart(draw(st.text(max_size=20)), x, series, draw(AXES), draw(AXES), kind)


@settings(max_examples=100, deadline=None)
@given(charts(), st.booleans())
def test_every_chart_is_a_picture_and_everything_in_it_has_a_place(chart: Chart, on_ground: bool) -> None:
    picture = chart_svg(chart, on_ground=on_ground)
    root = ElementTree.fromstring(picture)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for one in root.iter():
        for name, limit in (("x", width), ("cx", width), ("y", height), ("cy", height)):
            assert -1 <= float(one.get(name, "0")) <= limit + 1, (one.tag, name)
        assert "nan" not in one.get("d", "")


def test_png_has_words_on_a_machine_without_fonts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resvg_py, "svg_to_bytes", partial(resvg_py.svg_to_bytes, skip_system_fonts=True))
    require_png()

    def drawn(text: str) -> bytes:
        words = f'<text y="15" font-family="{FONT}">{text}</text>'
        return svg_png(f"<svg xmlns='http://www.w3.org/2000/svg' width='20' height='20'>{words}</svg>")

    for letter in "Az9ÄéßπЖ×·…–±−²½“”≤→█■▲►":
        assert drawn(letter) != drawn("\ue000"), f"{letter} is in no font"


def test_a_line_goes_where_its_numbers_are() -> None:
    chart = Chart("t", (0.0, 5.0, 10.0), (Series("s", (0.0, 50.0, 100.0)),), Axis("x"), Axis("y"))
    (path,) = re.findall(r"<path d='M([^']+)' fill='none'", chart_svg(chart))
    spots = [tuple(map(float, spot.split())) for spot in path.split("L")]
    assert spots[1][0] - spots[0][0] == pytest.approx(spots[2][0] - spots[1][0])
    assert spots[0][1] - spots[2][1] == pytest.approx(HEIGHT)


def test_areas_lie_on_one_another() -> None:
    chart = Chart("t", (0.0, 1.0), (Series("a", (1.0, 2.0)), Series("b", (3.0, None))), Axis("x"), Axis("y"), AREAS)
    assert stacked(chart) == [(1.0, 2.0), (4.0, 2.0)]


@given(st.lists(st.floats(1e-6, 1e9), min_size=1), st.sampled_from([LINEAR, LOG]))
def test_ranges_hold_their_values_and_ticks(values: list[float], scale: str) -> None:
    found = Range.around(Axis("x", "", scale), values)
    assert all(-1e-6 <= found.share(value) <= 1 + 1e-6 for value in values)
    ticks = found.ticks()
    assert 1 <= len(ticks) <= 12
    assert all(-1e-6 <= found.share(tick) <= 1 + 1e-6 for tick in ticks)


def test_numbers_are_written_in_three_digits() -> None:
    assert [show_number(value) for value in (0.0, 0.00012, 3.14159, 999.4, 999.5, 1234567.0)] == [
        "0",
        "0.00012",
        "3.14",
        "999",
        "1,000",
        "1,234,567",
    ]  # the same cases as in tests/page/report.test.mjs


def test_both_themes_have_the_same_names() -> None:
    theme = Theme.read()
    assert set(theme.light) == set(theme.dark) and len(theme.light) > 20


def test_a_film_says_how_many_cells_it_has() -> None:
    picture = array("I", [0, 1]).tobytes() + bytes(4)
    assert Film("f", (0.0,), (picture,), ("c",), num_blocks=9, blocks_per_cell=5).num_cells == 2
