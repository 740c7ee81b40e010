"""The page of a simulation in a browser, from a file: played, pointed at, zoomed, saved, printed, read without scripts.

As with the dashboard, the console is empty at the end of every test; and the page has asked for nothing but itself.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire.cli import main
from support.browser import CHROMIUM, CONTRAST, OVERFLOW, WAIT_S, Browser, Page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (on Debian: the package chromium)"),
]

STUDY = ["simulate", "qwen3-0.6b", "--kv-memory", "256MiB", "--max-model-len", "1024", "--dtype", "bfloat16"]
STUDY += ["--rate", "8", "--duration", "20", "--samples", "2", "--shared-tokens", "64", "--what-if", "block_size=16,32"]
IS_READY = "window.quire?.isReady"
SLIDER = "figure.film input"
PIXELS = "document.querySelector('.map canvas').toDataURL()"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a study of two runs."""
    found = tmp_path_factory.mktemp("page") / "a page.html"
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*STUDY, "--html", str(found)]) == 0
    return found


@pytest.fixture
def open_page(browser: Browser, path: Path) -> Iterator[Callable[..., Page]]:
    """Opens the page, which complains of nothing and asks for nothing."""
    pages: list[Page] = []

    def opened(width: int = 1200, height: int = 900) -> Page:
        page = Page(browser, width, height)
        pages.append(page)
        page.goto(path.as_uri())
        page.wait_for(IS_READY)
        return page

    yield opened
    for page in pages:
        page.evaluate("1")
        assert page.complaints == []
        assert [address for address in page.requests if not address.startswith("data:")] == [path.as_uri()]
        page.close()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("QUIRE_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_the_slider_moves_the_blocks_and_what_is_said_of_them(open_page: Callable[..., Page]) -> None:
    page = open_page()
    num_frames = page.evaluate("quire.films[0].film.times.length")
    assert num_frames > 20
    page.evaluate(f"document.querySelector('{SLIDER}').focus()")
    seen = set()
    for key, index in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("End", num_frames - 1)):
        page.press(key)
        assert page.evaluate("quire.films[0].index") == index
        caption = page.evaluate(f"quire.films[0].film.captions[{index}]")
        assert page.text("figure.film output") == caption
        assert page.evaluate(f"document.querySelector('{SLIDER}').getAttribute('aria-valuetext')") == caption
        marks = page.evaluate("quire.charts.map((view) => view.mark)")
        time_s = page.evaluate(f"quire.films[0].film.times[{index}]")
        assert marks[0] == time_s != marks[1]  # the other run has a film of its own
        seen.add(page.evaluate(PIXELS))
    assert len(seen) == 4


def test_a_film_plays_to_its_end(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.evaluate(f"document.querySelector('{SLIDER}').focus()")
    page.press("End")
    page.press("ArrowLeft", times=2)
    before = page.evaluate("quire.films[0].index")
    page.click("figure.film button")
    page.wait_for(
        f"quire.films[0].index === {before + 2} && document.querySelector('.film button').innerText === 'Play'"
    )
    page.click("figure.film button")  # from the beginning
    page.wait_for("quire.films[0].index > 0")
    page.click("figure.film button")
    assert page.text("figure.film button") == "Play"
    assert page.evaluate("quire.films[0].index") < before


def test_a_block_tells_who_holds_it(open_page: Callable[..., Page]) -> None:
    page = open_page()
    size, cell = page.evaluate("[quire.films[0].layout.columns, quire.films[0].layout.cell]")
    owners = page.evaluate("[...quire.films[0].pictures[quire.films[0].index].owners]")
    assert 1 in owners and max(owners) > 1
    for block in (owners.index(1), owners.index(max(owners))):
        x, y = (block % size + 0.5) * cell, (block // size + 0.5) * cell
        box = page.evaluate("(({width, height}) => [width, height])(quire.films[0].canvas.getBoundingClientRect())")
        page.move(".map canvas", x / box[0], y / box[1])
        who = "by several requests" if owners[block] == 1 else f"by request {owners[block] - 2}"
        assert page.text("figure.film .detail") == f"Block {block}: held {who}"
    page.move("h1")
    assert page.text("figure.film .detail") == ""


def test_a_plot_has_values_a_zoom_and_a_legend_that_switches(open_page: Callable[..., Page]) -> None:
    page = open_page()
    plot = "quire.charts[0].plot"
    page.move("figure.chart .u-over", 0.5, 0.5)
    values = page.evaluate(
        "[...document.querySelector('figure.chart .u-legend').querySelectorAll('.u-value')].map((v) => v.innerText)"
    )
    at = page.evaluate(f"{plot}.cursor.idx")
    assert values[0] == page.evaluate(f"quire.charts[0].showPlace(quire.charts[0].chart.places[{at}])")
    shares = page.evaluate(f"quire.charts[0].chart.series.map((one) => one.values[{at}])")
    assert sum(shares) == pytest.approx(100, abs=0.01)
    assert [float(value.removesuffix(" %")) for value in reversed(values[1:])] == pytest.approx(shares, abs=0.5)

    whole = page.evaluate(f"{plot}.scales.x.max")
    page.move("figure.chart .u-over", 0.2, 0.5)
    for kind, x in (("mousePressed", 0.2), ("mouseMoved", 0.6), ("mouseReleased", 0.6)):
        left, top = page.place("figure.chart .u-over", x, 0.5)
        page.call("Input.dispatchMouseEvent", type=kind, x=left, y=top, button="left", buttons=1, clickCount=1)
    page.wait_for(f"{plot}.scales.x.max < {whole}")

    top_edge = page.evaluate(f"{plot}.data[1].filter((value) => value !== null).at(-1)")
    page.click("figure.chart .u-legend .u-series:nth-child(3) .u-label")
    page.wait_for(f"!{plot}.series[2].show")
    assert page.evaluate(f"{plot}.data[1].filter((value) => value !== null).at(-1)") <= top_edge


def test_a_plot_is_saved_as_a_picture(open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page()
    page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    for number, kind in ((1, "png"), (2, "svg")):
        page.click(f"figure.chart .buttons button:nth-child({number})")
        end, found = time.monotonic() + WAIT_S, tmp_path / f"where-the-kv-memory-is.{kind}"
        while not found.exists():
            assert time.monotonic() < end, list(tmp_path.iterdir())
            time.sleep(0.05)
    png = (tmp_path / "where-the-kv-memory-is.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n") and len(png) > 10_000
    svg = ElementTree.parse(tmp_path / "where-the-kv-memory-is.svg").getroot()
    assert "holding tokens" in "".join(svg.itertext())


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_it_can_be_read(open_page: Callable[..., Page], pictures: Path, theme: str, width: int) -> None:
    page = open_page(width)
    page.prefer(prefers_color_scheme=theme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVERFLOW) == []
    assert page.evaluate(CONTRAST) == []
    page.screenshot(pictures / f"simulation-{theme}-{width}.png")


def test_it_can_be_read_without_scripts_and_printed(browser: Browser, path: Path) -> None:
    page = Page(browser)
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.goto(path.as_uri())
    assert page.complaints == []
    stills = page.evaluate("[...document.querySelectorAll('.still svg')].map((one) => one.checkVisibility())")
    assert len(stills) > 5 and all(stills)
    page.close()
    page = Page(browser)
    page.goto(path.as_uri())
    page.wait_for(IS_READY)
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.evaluate("[...document.querySelectorAll('.still svg')].every((one) => one.checkVisibility())")
    assert not page.evaluate("document.querySelector('.plot').checkVisibility()")
    page.close()


def test_a_screen_reader_finds_names(open_page: Callable[..., Page]) -> None:
    page = open_page()
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    assert all(name for role, name in named if role in ("button", "slider", "link", "heading"))
    assert ("slider", "moment") in named
    assert ("button", "Save “Where the KV memory is” as PNG") in named
