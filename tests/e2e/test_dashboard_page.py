"""The dashboard in a browser: looked at, clicked, typed into, resized, and driven by the keyboard alone.

The browser is Chromium without a window; where there is none, all of this is skipped. Pictures go to the folder that
QUIRE_SCREENSHOTS names, or to a temporary one, and each test says where. At the end of every test the console is empty:
no error, no warning, nothing that the content policy has kept out.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import PIL.ExifTags
import PIL.Image
import pytest

from quire.engine.records.stats import EngineStats
from quire.guide import GUIDE_FOLDER
from quire.memory.block import BlockState
from support.browser import CHROMIUM, CONTRAST, OVERFLOW, Browser, Page
from support.image_models import write_image_model
from support.prometheus_text import parse
from support.served_process import ServedProcess, served_process
from support.server import JSON, RunningServer, running_server
from support.tiny_bert import write_tiny_bert
from support.tiny_images import data_url, file_of, picture

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (on Debian: the package chromium)"),
]

SETTINGS = {"kv_memory": "3MiB"}  # 128 blocks, so that a few requests fill it
QUESTIONS = ("What is a block table?", "What is copy-on-write?", "What is prefix caching?", "What is a scheduler?")
IS_LIVE = "window.quire?.phase === 'live' && quire.model?.numFrames > 0"
STATES = {BlockState.FREE: 0, BlockState.IN_USE: 1, BlockState.CACHED: 2}

ENDLESS = """{ const post = quire.chat.post.bind(quire.chat);
  quire.chat.post = (url, fields, signal) => post(url, {...fields, ignore_eos: true, temperature: 2}, signal); }"""
"""Lets answers of the chat go on until they are stopped, each another way: the guide alone would be done in a blink."""


FOCUSED = """(() => { const one = document.activeElement, style = getComputedStyle(one);
  const name = one.id || one.name || one.className || one.getAttribute("role") || one.tagName;
  return [one === document.body ? "" : name, style.outlineStyle, style.outlineWidth]; })()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(settings=SETTINGS) as running:
        yield running


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages whose consoles are empty at the end."""
    pages: list[Page] = []

    def opened(url: str, width: int = 1440, height: int = 1000) -> Page:
        page = Page(browser, width, height)
        pages.append(page)
        page.goto(url)
        return page

    yield opened
    for page in pages:
        page.evaluate("1")  # whatever was still on its way has been told by now
        assert page.complaints == []
        page.close()


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("QUIRE_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"pictures: {folder}")
    return folder


def ask(server: RunningServer, question: str, **fields: Any) -> None:
    messages = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": question}]
    answer = server.post("/v1/chat/completions", {"model": "guide", "messages": messages, "max_tokens": 60} | fields)
    assert answer.status == 200, answer.body


@contextmanager
def under_way(server: RunningServer, **fields: Any) -> Iterator[None]:
    """A request that goes on until the context is left, and whose client then leaves."""
    body = {"model": "guide", "prompt": "Blocks", "stream": True, "ignore_eos": True, "max_tokens": 1900} | fields
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), dict(JSON))
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        yield
        response.close()


class Reader:
    """Another reader of /live, who writes down all that is told."""

    def __init__(self, server: RunningServer) -> None:
        self.frames: list[dict[str, Any]] = []
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self._connection.request("GET", "/live")
        self._response = self._connection.getresponse()
        self.hello = json.loads(self._response.readline())
        self._take()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _take(self) -> bool:
        line = self._response.readline()
        if line:
            self.frames.append(json.loads(line))
        return bool(line)

    def _run(self) -> None:
        try:
            while self._take():
                pass
        except (OSError, ValueError, AttributeError):
            pass  # closed meanwhile

    def close(self) -> None:
        assert self._connection.sock is not None
        self._connection.sock.shutdown(2)
        self._thread.join(10)
        self._connection.close()

    @property
    def blocks(self) -> dict[int, list[Any]]:
        """What all frames add up to: the rows of blocks that are not free, without their times."""
        found: dict[int, list[Any]] = {}
        for frame in self.frames:
            if frame["full"]:
                found.clear()
            found |= {row[0]: row[1:5] for row in frame["blocks"]}
        return {number: row for number, row in found.items() if row[0]}

    def num_events(self, kind: str) -> int:
        return sum(event[1] == kind for frame in self.frames for event in frame["events"])


BLOCKS = """Object.fromEntries(Array.from({length: quire.model.memory.numBlocks}, (_, at) => at)
  .map((id) => quire.model.memory.block(id)).filter((block) => block.state)
  .map((block) => [block.id, [block.state, block.refs, block.owner, block.parent]]))"""


# ---- what it shows is what there is ---------------------------------------------------------------------------------


def test_the_map_is_what_live_has_told_and_what_the_books_say(
    server: RunningServer, open_page: Callable[..., Page]
) -> None:
    page = open_page(server.url)
    page.wait_for(IS_LIVE)
    reader = Reader(server)
    for number in range(24):
        ask(server, f"{number}: {QUESTIONS[number % 4]}", n=1 + number % 3, max_tokens=200, ignore_eos=True)
    server.wait_until_idle()
    steps = server.call(lambda: server.llm.stats().steps_total)
    page.wait_for(f"quire.model.step >= {steps} && quire.model.requests.size === 0")
    while reader.frames[-1]["step"] < steps:
        time.sleep(0.01)
    shown = {int(number): row for number, row in page.evaluate(BLOCKS).items()}
    reader.close()
    assert shown == reader.blocks

    books = server.llm.engine.scheduler.memory.pool.blocks
    kept = {block.block_id: block for block in books if block.state is not BlockState.FREE}
    assert {number: row[:2] for number, row in shown.items()} == {
        number: [STATES[block.state], block.ref_count] for number, block in kept.items()
    }
    metrics = parse(server.get("/metrics").body.decode())
    numbers = {name: family.value() for name, family in metrics.items() if len(family.samples) == 1}
    counts = page.evaluate("quire.model.memory.counts")
    assert sum(counts) == numbers["quire_kv_blocks"]
    assert counts[1] + counts[2] == numbers["quire_kv_blocks_used"] == 0
    assert counts[3] == numbers["quire_kv_blocks_cached"] > 50
    totals = page.evaluate("quire.model.totals")
    assert totals["evictions"] == numbers["quire_evictions_total"] > 0
    assert totals["generated_tokens"] == numbers["quire_generated_tokens_total"]
    assert page.text("#figure-evictions").replace(",", "") == str(totals["evictions"])

    for kind in ("admitted", "finished"):
        assert page.evaluate(f"quire.model.events.filter((event) => event.kind === '{kind}').length") == (
            reader.num_events(kind)
        )
    assert reader.num_events("finished") == sum(1 + number % 3 for number in range(24))


def test_only_what_changed_is_drawn_again_in_a_million_blocks(
    server: RunningServer, open_page: Callable[..., Page]
) -> None:
    page = open_page(server.url)
    page.wait_for(IS_LIVE)
    page.evaluate("quire.live.onObject = () => {}")  # nothing more from the server
    page.evaluate("window.frame = {...quire.model, type: 'frame', t: 1, blocks: [], requests: [], gone: [], events: [],"
                  " num_ended: 0, ttft_ms: [], itl_ms: [], full: true}")  # fmt: skip
    page.evaluate("quire.take({...quire.model.hello, num_blocks: 1000000})")
    page.evaluate("quire.take({...frame, blocks: Array.from({length: 600000}, (_, at) => [at, 2, 0, 1, at - 1, 1])})")
    page.wait_for("quire.map.memory.numBlocks === 1000000 && !quire.map.isStale && !quire.map.isAsked")
    assert "Each cell shows" in page.wait_for("document.getElementById('map-note').textContent")
    before = page.evaluate("quire.map.numDrawn")
    page.evaluate("quire.take({...frame, full: false, blocks: Array.from({length: 90}, (_, at) => [at * 9999, 1, 1, 3, -2, 2])})")  # fmt: skip # noqa: E501
    page.wait_for("!quire.map.isAsked")
    assert 0 < page.evaluate("quire.map.numDrawn") - before <= 90
    page.move("#map canvas", 0.2, 0.1)
    page.wait_for("document.getElementById('block-details').textContent.startsWith('Blocks ')")
    page.wait_for("document.querySelectorAll('#tree li').length > 0")


# ---- asking ---------------------------------------------------------------------------------------------------------


def test_one_asks_and_watches_ones_own_blocks(server: RunningServer, open_page: Callable[..., Page]) -> None:
    page = open_page(server.url)
    page.wait_for(IS_LIVE)
    page.evaluate("document.querySelector('[name=tokens]').value = '3'")
    page.click("#chat-text")
    page.type(QUESTIONS[0])
    page.click("#chat-form [type=submit]")
    page.wait_for("!quire.chat.call && quire.chat.messages.length === 2")
    answer = page.evaluate("quire.chat.messages[1].content")
    assert answer
    assert answer in page.text("#transcript")
    page.wait_for("quire.model.ended[0]?.total - quire.model.ended[0]?.promptTokens === 3")
    page.wait_for("document.querySelector('#request-rows .own')?.innerText === 'yours'")

    page.evaluate(ENDLESS)
    page.evaluate("document.querySelector('[name=tokens]').value = '400'")
    page.click("#chat-text")
    page.type(QUESTIONS[1])
    page.press("Enter")
    page.wait_for("quire.model.ended[0]?.total - quire.model.ended[0]?.promptTokens === 400")

    page.evaluate("document.querySelector('[name=answers]').value = '8'")
    page.evaluate("document.querySelector('[name=tokens]').value = '1500'")
    page.click("#chat-text")
    page.type("Tell me all that you know of blocks.")
    page.press("Enter")
    page.wait_for("quire.model.memory.counts[2] > 0")  # eight answers share a prompt
    page.wait_for("document.querySelector('.own:not(:empty)')?.innerText === 'yours'")
    assert page.evaluate("quire.chat.call !== null")
    page.click("[name=stop]")
    page.wait_for("!quire.chat.call")
    server.wait_until_idle()
    page.click("[name=anew]")
    assert page.text("#transcript") == ""


def test_short_requests_are_listed_as_ended_and_those_without_a_row_counted(
    server: RunningServer, open_page: Callable[..., Page], pictures: Path
) -> None:
    page = open_page(server.url)
    page.wait_for(IS_LIVE)
    for _ in range(30):
        answer = server.post("/v1/completions", {"model": "guide", "prompt": "Blocks", "max_tokens": 1})
        assert answer.status == 200, answer.body
    page.wait_for("quire.model.numEnded >= 30")  # the end of an earlier request may be in the first frame
    page.wait_for(
        "document.getElementById('requests-note').textContent.includes("
        "`${quire.model.numEnded - 10} ended requests not listed.`)"
    )
    rows = page.evaluate("[...document.querySelectorAll('#request-rows tr')].map((row) => row.innerText)")
    assert len(rows) == 10 and all("finished" in row for row in rows)
    assert not page.evaluate("document.querySelector('.when-idle').checkVisibility()")
    page.screenshot(pictures / "short-requests.png")


def test_a_refusal_is_shown_as_the_server_says_it(server: RunningServer, open_page: Callable[..., Page]) -> None:
    page = open_page(server.url)
    page.wait_for(IS_LIVE)
    page.evaluate("quire.chat.model = 'other'")
    page.click("#chat-text")
    page.type("x")
    page.press("Enter")
    page.wait_for("document.querySelector('#transcript [data-who=error]')")
    assert "model 'other' not found" in page.text("#transcript").lower()
    assert [text for text in page.complaints if "404" not in text] == []  # Chromium tells of every such answer
    page.complaints.clear()


def test_a_model_without_a_chat_template_writes_on(open_page: Callable[..., Page], tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(GUIDE_FOLDER, folder, ignore=shutil.ignore_patterns("chat_template*", "__*"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with running_server(folder, SETTINGS) as server:
        page = open_page(server.url)
        page.wait_for(IS_LIVE)
        page.click("#chat-text")
        for number in (1, 2):
            page.type("A block table is")
            page.press("Enter")
            page.wait_for(f"!quire.chat.call && quire.chat.messages.length === {2 * number}")
        assert page.evaluate("quire.chat.messages[3].content")
        assert len(page.complaints) == 1 and "400" in page.complaints[0]  # it was asked for a chat once
        page.complaints.clear()


def test_a_model_of_vectors_is_not_asked_for_texts(open_page: Callable[..., Page], tmp_path: Path) -> None:
    is_shown = "id => document.getElementById(id).checkVisibility()"
    with running_server(model=write_tiny_bert(tmp_path)) as server:
        page = open_page(server.url)
        page.wait_for(f"({is_shown})('no-chat')")  # with the first frame that is drawn
        assert page.evaluate(f"['chat-form', 'transcript'].map({is_shown})") == [False, False]
        assert "/v1/embeddings" in page.text("#call-terminal")


def test_the_calls_that_are_shown_work_as_printed(open_page: Callable[..., Page]) -> None:
    with running_server(settings=SETTINGS) as server:
        page = open_page(server.url)
        page.wait_for(IS_LIVE)
        page.wait_for("document.querySelector('.when-new').checkVisibility()")
        line = page.evaluate("document.getElementById('call-terminal').textContent")
        if shutil.which("curl"):
            done = subprocess.run(["bash", "-c", f"{line} --silent"], capture_output=True, check=True, timeout=60)
            assert json.loads(done.stdout)["choices"][0]["message"]["content"]
            page.wait_for("!document.querySelector('.when-new').checkVisibility()")
        program = page.evaluate("document.getElementById('call-python').textContent")
        assert f'base_url="{server.url.rstrip("/")}/v1"' in program
        compile(program, "call", "exec")
        facts = page.evaluate("document.getElementById('facts').textContent")
        assert "Qwen3ForCausalLM" in facts and "128 blocks of 16 tokens" in facts


def test_answers_are_shown_as_markdown_and_never_as_html(open_page: Callable[..., Page], server: RunningServer) -> None:
    page = open_page(server.url)
    page.wait_for(IS_LIVE)
    text = "**Bold** <img src=x onerror=alert(1)>\n\n```python\nx = 1\n```\n- [a](javascript:alert(1))"
    choices = {"choices": [{"index": 0, "delta": {"content": text}}]}
    page.evaluate(
        f"""quire.chat.post = async () => new Response("data: " + JSON.stringify({json.dumps(choices)}) + "\\n\\n")"""
    )
    page.click("#chat-text")
    page.type("Show me")
    page.press("Enter")
    page.wait_for("document.querySelector('#transcript pre code')?.textContent === 'x = 1'")
    assert page.evaluate("document.querySelector('#transcript strong').textContent") == "Bold"
    assert page.evaluate("document.querySelectorAll('#transcript :is(img, a, script)').length") == 0


# ---- asking about images --------------------------------------------------------------------------------------------

GIVE = """(type, field, files) => {
  const data = new DataTransfer();
  for (const [name, kind, base64] of files)
    data.items.add(new File([Uint8Array.from(atob(base64), (one) => one.charCodeAt(0))], name, { type: kind }));
  const Given = type === "paste" ? ClipboardEvent : DragEvent;
  const event = new Given(type, { [field]: data, bubbles: true, cancelable: true });
  document.getElementById("chat-text").dispatchEvent(event);
}"""
"""Pastes or drops files: a browser without a window has no clipboard, and nothing to drag from."""
SENT = "quire.chat.messages[0].content.map((part) => part.image_url?.url ?? part.text)"
SHOWN = "[...document.querySelectorAll('#transcript img')].map((image) => [image.naturalWidth, image.naturalHeight])"
NUM_ATTACHED = "document.querySelectorAll('.attached img').length"


@pytest.fixture(scope="module")
def reader_of_images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = write_image_model(tmp_path_factory.mktemp("smolvlm"), context=1024)
    with running_server(str(folder), SETTINGS, max_body="1MiB", max_image_body="1MiB") as running:
        yield running


def give(page: Page, kind: str, *files: tuple[str, str, bytes]) -> None:
    """Paste or drop files: their names, media types and bytes."""
    sent = [(name, media_type, base64.b64encode(data).decode()) for name, media_type, data in files]
    field = "clipboardData" if kind == "paste" else "dataTransfer"
    page.evaluate(f"({GIVE})({json.dumps(kind)}, {json.dumps(field)}, {json.dumps(sent)})")


def pixels(url: str) -> tuple[int, int, Any]:
    """The size of the image in a data URL, and its first pixel."""
    image = PIL.Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    return image.width, image.height, image.getpixel((0, 0))


def stats_of(server: RunningServer) -> EngineStats:
    """The numbers of an engine, once it has nothing to do."""
    server.wait_until_idle()
    return server.call(server.llm.stats)


def photo(width: int, height: int) -> bytes:
    """A photo of a camera that was held upright: its file says that it lies on its side."""
    turned = PIL.Image.Exif()
    turned[PIL.ExifTags.Base.Orientation] = 6
    return file_of(picture(64, 48).resize((width, height)), "JPEG", exif=turned)


def test_one_asks_about_a_photo_and_goes_on(
    reader_of_images: RunningServer, open_page: Callable[..., Page], tmp_path: Path
) -> None:
    page = open_page(reader_of_images.url)
    page.wait_for(f"{IS_LIVE} && document.querySelector('[name=attach]').checkVisibility()")
    page.evaluate("document.querySelector('[name=tokens]').value = '4'")
    before = stats_of(reader_of_images)
    (tmp_path / "photo.jpg").write_bytes(photo(4000, 3000))
    (tmp_path / "small.png").write_bytes(file_of(picture(40, 30)))
    page.choose_files("[name=images]", tmp_path / "photo.jpg", tmp_path / "small.png")
    page.wait_for(f"{NUM_ATTACHED} === 2")
    page.click("#chat-text")
    page.type("What is this?")
    page.press("Enter")
    page.wait_for("!quire.chat.call && quire.chat.messages.length === 2")
    large, small, text = page.evaluate(SENT)
    assert large.startswith("data:image/jpeg;base64,") and len(large) < 1 << 20
    assert small == data_url((tmp_path / "small.png").read_bytes()), "nothing is lost of a small file"
    assert text == "What is this?"
    page.wait_for(f"JSON.stringify({SHOWN}) === '[[1536,2048],[40,30]]'")
    assert page.evaluate(NUM_ATTACHED) == 0
    first = stats_of(reader_of_images)
    page.type("And now?")
    page.press("Enter")
    page.wait_for("!quire.chat.call && quire.chat.messages.length === 4")
    second = stats_of(reader_of_images)
    hits = second.hit_tokens_total - first.hit_tokens_total
    assert hits > first.queried_tokens_total - before.queried_tokens_total - 32, "the images are in the cache"


def test_images_are_pasted_dropped_and_removed_by_keyboard(
    reader_of_images: RunningServer, open_page: Callable[..., Page]
) -> None:
    page = open_page(reader_of_images.url)
    page.wait_for(f"{IS_LIVE} && document.querySelector('[name=attach]').checkVisibility()")
    page.click("#chat-text")
    give(page, "paste", ("cat.png", "image/png", file_of(picture(90, 60, seed=1))))
    give(page, "drop", ("dog.gif", "image/gif", file_of(PIL.Image.new("RGBA", (60, 90)), "GIF")))
    page.wait_for(f"{NUM_ATTACHED} === 2")
    cat, dog = page.evaluate("quire.chat.attached.images.map(({url}) => url)")
    assert cat == data_url(file_of(picture(90, 60, seed=1)))
    assert dog.startswith("data:image/jpeg;base64,")
    assert pixels(dog) == (60, 90, (255, 255, 255)), "what is transparent is white, as for the server"
    page.press("Tab", shift=True)
    assert page.evaluate("document.activeElement.ariaLabel") == "Remove dog.gif"
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    names = {(node["role"]["value"], node.get("name", {}).get("value")) for node in nodes if not node["ignored"]}
    assert {("image", "cat.png"), ("button", "Remove cat.png"), ("list", "Attached images")} <= names
    page.press("Enter")
    assert page.evaluate("document.activeElement.id") == "chat-text"
    give(page, "drop", ("notes.txt", "text/plain", b"no image"))
    page.wait_for("document.querySelector('#transcript [data-who=error]')")
    assert "cannot read notes.txt" in page.text("#transcript")
    assert page.evaluate(NUM_ATTACHED) == 1


def test_a_server_that_refuses_an_image_says_why(
    reader_of_images: RunningServer, open_page: Callable[..., Page]
) -> None:
    page = open_page(reader_of_images.url)
    page.wait_for(IS_LIVE)
    whole = file_of(picture(90, 60))
    for data, reason in ((whole[: len(whole) // 2], "broken"), (bytes(3 << 20), "max_image_body")):
        page.evaluate(f"quire.chat.attached.show({{name: 'cat.png', url: {json.dumps(data_url(data))}}})")
        page.click("#chat-form [type=submit]")
        page.wait_for("!quire.chat.call && document.querySelector('#transcript [data-who=error]')")
        assert reason in page.text("#transcript [data-who=error]")
        page.click("[name=anew]")
    page.complaints.clear()  # Chromium tells of every refusal, and of an image that it cannot show


def test_a_model_of_texts_is_offered_no_images(server: RunningServer, open_page: Callable[..., Page]) -> None:
    page = open_page(server.url)
    page.wait_for(f"{IS_LIVE} && document.getElementById('chat-form').checkVisibility()")
    assert not page.evaluate("document.querySelector('[name=attach]').checkVisibility()")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1100, 1440])
def test_images_can_be_seen(
    reader_of_images: RunningServer, open_page: Callable[..., Page], pictures: Path, theme: str, width: int
) -> None:
    page = open_page(reader_of_images.url, width, 900)
    page.wait_for(IS_LIVE)
    page.prefer(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
    page.evaluate("document.querySelector('[name=tokens]').value = '4'")
    wide, tall, tiny = (file_of(picture(*size, seed=3)) for size in ((900, 200), (150, 600), (16, 16)))
    page.click("#chat-text")
    give(page, "paste", *((f"{index}.png", "image/png", data) for index, data in enumerate((wide, tall, tiny))))
    page.wait_for(f"{NUM_ATTACHED} === 3")
    page.type("What are these?")
    page.press("Enter")
    page.wait_for("!quire.chat.call && quire.chat.messages.length === 2")
    give(page, "paste", *((f"{index}.png", "image/png", data) for index, data in enumerate((wide, tall, tiny) * 3)))
    page.wait_for(f"{NUM_ATTACHED} === 9")
    page.press("Tab", shift=True)
    page.evaluate("document.documentElement.dataset.drop = 'here'")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVERFLOW) == []
    assert page.evaluate(CONTRAST) == []
    page.screenshot(pictures / f"images-{theme}-{width}.png")
    reader_of_images.wait_until_idle()


# ---- pointing -------------------------------------------------------------------------------------------------------


def test_blocks_tell_of_themselves(server: RunningServer, open_page: Callable[..., Page]) -> None:
    page = open_page(server.url)
    page.wait_for(IS_LIVE)
    with under_way(server, n=4, prompt="Blocks and blocks of keys and values. " * 4):
        page.wait_for("quire.model.requests.size === 4")
        # A block that is not full is copied when the first sample writes to it.
        shared = page.wait_for(
            "(id => id >= 0 && [id])(quire.model.memory.refs.findIndex("
            "(refs, id) => refs === 4 && quire.model.memory.isPublished(id)))"
        )[0]
        layout = page.evaluate("quire.map.layout")
        column, row = shared % layout["columns"], shared // layout["columns"]
        page.move("#map canvas", (column + 0.5) / layout["columns"], (row + 0.5) / layout["rows"])
        details = page.wait_for(
            f"(t => t.startsWith('Block {shared}:') && t)(document.getElementById('block-details').innerText)"
        )
        assert "shared · 4 references · taken by #" in details
        before = page.evaluate("quire.map.marked")
        page.move("#request-rows tr")
        page.wait_for("quire.map.marked?.size > 0")
        assert before is None
        page.click("#request-rows button")
        page.move("h1")
        assert page.evaluate("quire.map.marked?.size > 0")
        assert page.evaluate("document.querySelectorAll('#request-rows [aria-pressed=true]').length") == 1
    server.wait_until_idle()
    page.wait_for("quire.model.requests.size === 0 && quire.map.marked === null")


# ---- the keyboard alone, and other senses ---------------------------------------------------------------------------


def test_everything_is_reached_by_the_keyboard_and_shows_that_it_is(
    server: RunningServer, open_page: Callable[..., Page]
) -> None:
    page = open_page(server.url)
    page.wait_for(IS_LIVE)
    ask(server, QUESTIONS[0])
    page.wait_for("document.querySelector('#tree li') && document.querySelector('#event-list li')")
    seen = []
    for _ in range(60):
        page.press("Tab")
        found = page.evaluate(FOCUSED)
        if not found[0] or (seen and found[0] == "skip"):
            break
        seen.append(found[0])
        assert found[1] != "none" and found[2] != "0px", f"{found[0]} does not show its focus"
    for name in ("skip", "theme", "key-button", "map", "chat-text", "answers", "tokens", "treeitem", "event-list"):
        assert name in seen

    page.evaluate("document.getElementById('map').focus()")
    page.press("Home")
    page.press("ArrowRight", times=2)
    page.wait_for("document.getElementById('block-details').innerText.startsWith('Block 2:')")
    page.press("ArrowDown")
    columns = page.evaluate("quire.map.layout.columns")
    page.wait_for(f"document.getElementById('block-details').innerText.startsWith('Block {2 + columns}:')")
    assert page.evaluate("document.getElementById('block-details').ariaLive") == "polite"

    page.evaluate("document.querySelector('#tree [tabindex=\"0\"]').focus()")
    num_items = page.evaluate("document.querySelectorAll('#tree li').length")
    page.press("Home")
    page.press("ArrowLeft")
    page.wait_for(f"document.querySelectorAll('#tree li').length <= {num_items}")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "treeitem"
    assert page.evaluate("quire.map.marked?.size > 0")


def test_a_screen_reader_finds_names_and_landmarks(server: RunningServer, open_page: Callable[..., Page]) -> None:
    ask(server, QUESTIONS[0])
    page = open_page(server.url)
    with under_way(server):
        page.wait_for(f"{IS_LIVE} && document.querySelector('#tree li') && document.querySelector('#request-rows tr')")
        nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    server.wait_until_idle()
    roles: dict[str, list[str]] = {}
    for node in nodes:
        if not node["ignored"]:
            roles.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("button", "combobox", "textbox", "spinbutton", "treeitem", "progressbar", "region", "application"):
        assert roles.get(role), role
        assert all(roles[role]), f"a {role} has no name: {roles[role]}"
    assert len(roles["main"]) == len(roles["banner"]) == len(roles["tree"]) == len(roles["log"]) == 1
    assert {"KV memory", "Requests", "Ask the model", "Prefix tree", "Events"} <= set(roles["heading"])
    assert "cached" in page.text("#map-summary")


def test_the_charts_begin_with_the_last_minutes(server: RunningServer, open_page: Callable[..., Page]) -> None:
    ask(server, QUESTIONS[0])
    page = open_page(server.url)
    page.call("Page.addScriptToEvaluateOnNewDocument", source=f"Date.now = () => {1000 * time.time()}")
    page.goto(server.url)  # where no second ever ends: what is drawn has come with the first line
    page.wait_for(IS_LIVE)
    page.wait_for("quire.plots.plots.every(({plot}) => plot.data[0].length > 0)")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 700, 1100, 1440])
def test_it_can_be_read(
    server: RunningServer, open_page: Callable[..., Page], pictures: Path, theme: str, width: int
) -> None:
    page = open_page(server.url, width, 900)
    page.wait_for(IS_LIVE)
    page.prefer(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
    with under_way(server, n=2):
        ask(server, QUESTIONS[1])
        page.wait_for("quire.history.columns.time.length >= 2 && document.querySelector('#request-rows tr')")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(OVERFLOW) == []
        assert page.evaluate(CONTRAST) == []
        page.screenshot(pictures / f"{theme}-{width}.png")
    server.wait_until_idle()


def test_the_theme_can_be_chosen_and_is_remembered(server: RunningServer, open_page: Callable[..., Page]) -> None:
    page = open_page(server.url)
    page.wait_for(IS_LIVE)
    page.prefer(prefers_color_scheme="light")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(ground)
    page.evaluate("document.getElementById('theme').focus()")
    page.press("ArrowDown", times=2)
    page.wait_for(f"{ground} !== '{light}'")
    page.goto(f"{server.url}/?again")
    page.wait_for(f"{IS_LIVE} && document.getElementById('theme').value === 'dark'")
    assert page.evaluate(ground) != light


def test_the_map_follows_the_width_of_the_window(server: RunningServer, open_page: Callable[..., Page]) -> None:
    page = open_page(server.url)
    page.wait_for(f"{IS_LIVE} && quire.map.layout")
    wide = page.evaluate("quire.map.layout.columns")
    page.resize(400, 900)
    page.wait_for(f"quire.map.layout.columns < {wide}")
    assert page.evaluate("document.querySelector('#map canvas').getBoundingClientRect().right <= innerWidth")
    assert page.evaluate("quire.plots.plots.every(({plot}) => plot.width < 400)")


# ---- keys, and a line that breaks -----------------------------------------------------------------------------------


def test_a_key_is_asked_for_and_says_what_is_shown(open_page: Callable[..., Page], tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: ada, key: ada-key}\n- {name: root, key: root-key, operator: true}\n", encoding="utf-8")
    with running_server(settings=SETTINGS, api_keys_file=str(keys)) as server:
        page = open_page(server.url)
        page.wait_for("document.getElementById('key-dialog').open")
        page.type("wrong-key")
        page.press("Enter")
        page.wait_for("document.getElementById('key-error').textContent")
        page.type("ada-key")
        page.press("Enter")
        page.wait_for(IS_LIVE)
        assert page.text("#scope") == "tenant ada"
        assert page.evaluate("document.querySelector('.for-tenant').checkVisibility()")
        page.click("#chat-text")
        page.type(QUESTIONS[0])
        page.press("Enter")
        page.wait_for("!quire.chat.call && quire.chat.messages.length === 2 && quire.model.memory.counts[3] > 0")
        page.click("#key-button")
        page.type("root-key")
        page.press("Enter")
        page.wait_for("document.getElementById('scope').textContent === 'operator'")
        assert [text for text in page.complaints if "401" not in text] == []
        page.complaints.clear()  # Chromium tells of every answer of 401


def test_a_line_that_breaks_is_told_and_taken_up_again(server: RunningServer, open_page: Callable[..., Page]) -> None:
    page = open_page(server.url)
    page.wait_for(IS_LIVE)
    live = server.services.live
    server.call(live.close)
    page.wait_for("quire.phase === 'lost'")
    assert "Connection lost" in page.text("#banner")
    server.call(lambda: setattr(live, "is_closed", False))
    page.click("#retry")
    page.wait_for(IS_LIVE)
    assert not page.evaluate("document.getElementById('banner').checkVisibility()")


def test_a_server_that_drains_says_so(open_page: Callable[..., Page]) -> None:
    with running_server(settings=SETTINGS) as server:
        page = open_page(server.url)
        page.wait_for(IS_LIVE)
        server.call(server.services.gate.drain)
        page.wait_for("document.getElementById('phase').textContent === 'draining'")
        assert "shutting down" in page.text("#banner")
        page.goto("about:blank")


# ---- several engines ------------------------------------------------------------------------------------------------

ROWS = "[...document.querySelectorAll('#replicas tbody tr')]"
ALL_READY = f"{IS_LIVE} && {ROWS}.length === 3 && {ROWS}.every((row) => row.dataset.state === 'ready')"
NOTE_STATES = """{ const take = quire.take.bind(quire); window.seen = [new Set(), new Set(), new Set()];
  quire.take = (object) => { object.replicas?.forEach(({state}, index) => seen[index].add(state)); take(object); }; }"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    with served_process(tmp_path_factory.mktemp("fleet"), "--replicas", "3", "--kv-memory", "9MiB") as server:
        yield server


def url_of(fleet: ServedProcess) -> str:
    return f"http://127.0.0.1:{fleet.port}"


def test_replicas_are_listed_with_their_blocks_and_why_requests_went_there(
    fleet: ServedProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(url_of(fleet))
    page.wait_for(ALL_READY)
    prompts = [[7 + number] * 64 for number in range(6)]
    for prompt in [*prompts, *prompts]:
        fleet.complete({"prompt": prompt, "max_tokens": 4, "temperature": 0})
    sums = "((name) => quire.model.replicas.reduce((sum, {routes}) => sum + routes[name], 0))"
    page.wait_for(f"{sums}('new') === 6 && {sums}('prefix') === 6 && {sums}('load') + {sums}('only') === 0")
    page.wait_for("quire.model.replicas.every(({texts, used, cached}) => !texts && !used && cached >= 8)")
    assert page.evaluate("quire.model.totals.hit_tokens") == 6 * 63
    assert page.text("#figure-engines") == "3 of 3"
    for index in (1, 2, 0):
        page.click(f"#replicas tbody tr:nth-child({index + 1}) button")
        page.wait_for(f"{ALL_READY} && quire.model.hello.replica === {index}")
        page.wait_for(f"quire.model.memory.counts[3] === quire.model.replicas[{index}].cached")
        assert f"replica={index}" in page.evaluate("location.search")
        assert page.evaluate("document.getElementById('memory-title').textContent") == f"KV memory · replica {index}"
        assert page.evaluate(f"{ROWS}.map((row) => row.querySelector('button').ariaPressed).indexOf('true')") == index
    assert "2 prefix, 2 new" in page.text("#replicas")
    shown = page.evaluate("[...document.querySelectorAll('.figures dt')].map((term) => term.textContent)")
    assert "replicas ready" in shown


def test_a_replica_that_is_killed_is_shown_down_and_back_again(
    fleet: ServedProcess, open_page: Callable[..., Page]
) -> None:
    page = open_page(f"{url_of(fleet)}/?replica=1")
    page.wait_for(f"{ALL_READY} && quire.model.hello.replica === 1")
    page.evaluate(NOTE_STATES)
    before = page.evaluate("quire.model.replicas.map(({restarts}) => restarts)")
    os.kill(fleet.engines[1], signal.SIGKILL)
    page.wait_for("seen.some((states) => states.has('restarting'))")
    lost = page.evaluate("seen.findIndex((states) => states.has('restarting'))")
    page.click(f"#replicas tbody tr:nth-child({lost + 1}) button")
    page.wait_for(f"quire.model.replicas[{lost}]?.restarts === {before[lost] + 1}")
    page.wait_for(f"{ALL_READY} && quire.model.hello.replica === {lost}")
    page.wait_for("!document.getElementById('map-summary').textContent.includes('Replica')")
    assert page.evaluate("quire.model.memory.counts.slice(1)") == [0, 0, 0], "an engine begins with nothing"
    assert page.evaluate("seen.map((states) => states.has('restarting'))").count(True) == 1
    fleet.complete({"prompt": [5] * 64, "max_tokens": 4})
    page.wait_for("quire.model.replicas.some(({routes}) => routes.new > 0)")


def test_a_tenant_chooses_an_engine_and_is_told_nothing_of_any(open_page: Callable[..., Page], tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: ada, key: ada-key}\n- {name: root, key: root-key, operator: true}\n", encoding="utf-8")
    with served_process(tmp_path, "--replicas", "2", "--api-keys-file", str(keys)) as server:
        page = open_page(f"http://127.0.0.1:{server.port}")
        page.wait_for("document.getElementById('key-dialog').open")
        page.type("ada-key")
        page.press("Enter")
        page.wait_for(f"{IS_LIVE} && {ROWS}.length === 2")
        assert page.evaluate("quire.model.replicas") == []
        assert page.text("#replicas").split() == ["show", "replica", "0", "replica", "1"]
        server.complete({"prompt": [5] * 64, "max_tokens": 4}, "ada-key")
        for index in (1, 0):
            page.click(f"#replicas tbody tr:nth-child({index + 1}) button")
            page.wait_for(f"{IS_LIVE} && quire.model.hello.replica === {index}")
            page.wait_for("quire.model.memory.numBlocks > 0 && document.querySelector('.for-tenant').checkVisibility()")
        page.goto("about:blank")
        assert [text for text in page.complaints if "401" not in text] == []
        page.complaints.clear()


def test_a_replica_that_there_is_not_is_refused_in_words(fleet: ServedProcess, open_page: Callable[..., Page]) -> None:
    page = open_page(f"{url_of(fleet)}/?replica=3")
    page.wait_for("quire.phase === 'lost'")
    assert "a number from 0 to 2" in page.text("#banner")
    assert all("400" in text for text in page.complaints)
    page.complaints.clear()


TIERS = """quire.take({...quire.model, type: 'frame', t: quire.model.time, full: false, blocks: [], gone: [],
  events: [], num_ended: quire.model.numEnded, ttft_ms: [], itl_ms: [],
  requests: [[900, 'running', 'ada', 900, 1000, 1000, 700, 0, 'req-0123456789', 300, 200]],
  totals: {...quire.model.totals, disk_slots: 80000, disk_blocks: 71234, disk_tokens: 1e6, host_blocks: 4000,
  host_cached: 3210, host_tokens: 99000, verified_guesses: 100, right_guesses: 61, drafts: 50}})"""
"""A frame of a server with every tier and with guesses: such a server needs a GPU."""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 700, 1100, 1440])
def test_replicas_and_tiers_can_be_read(
    fleet: ServedProcess, open_page: Callable[..., Page], pictures: Path, theme: str, width: int
) -> None:
    page = open_page(url_of(fleet), width, 900)
    page.wait_for(ALL_READY)
    page.prefer(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
    fleet.complete({"prompt": [3] * 100, "max_tokens": 4})
    page.wait_for("quire.model.replicas.some(({cached}) => cached) && quire.model.requests.size === 0")
    page.evaluate("quire.live.onObject = () => {}")  # nothing more from the server
    page.evaluate(TIERS)
    page.wait_for("!document.getElementById('tile-disk').hidden && !document.getElementById('tile-host').hidden")
    # A finished request may still have the first row.
    page.wait_for("document.querySelector('#request-rows [data-id=\"900\"] .from-disk')?.clientWidth > 0")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVERFLOW) == []
    assert page.evaluate(CONTRAST) == []
    page.screenshot(pictures / f"replicas-{theme}-{width}.png")
