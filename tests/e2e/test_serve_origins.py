"""Web pages of other sites: which may call, and what their browsers are told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.core.errors import InvalidConfigError
from quire.serve.config import ServerConfig
from support.bare_server import BareServer, serving
from support.server import Answer

PAGE = "https://chat.example"
PROGRAM = "app://obsidian.md"
ASKS = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,content-type")


def called(server: BareServer, path: str, *lines: str, method: str = "GET") -> Answer:
    return server.send("\r\n".join((f"{method} {path} HTTP/1.1", "Host: localhost", *lines, "", "")).encode("latin-1"))


@pytest.fixture(scope="module")
def server() -> Iterator[BareServer]:
    """A server with keys, and with pages that may call."""
    with serving(cors_origin=(PAGE, PROGRAM), api_key=("sesame",)) as running:
        yield running


@pytest.fixture(scope="module")
def local() -> Iterator[BareServer]:
    """A server without keys that one page may call."""
    with serving(cors_origin=(PAGE,)) as running:
        yield running


@pytest.mark.parametrize("origin", [PAGE, PROGRAM, PAGE.upper()])
def test_a_page_that_is_named_asks_first_without_a_key(server: BareServer, origin: str) -> None:
    answer = called(server, "/v1/chat/completions", f"Origin: {origin}", *ASKS, method="OPTIONS")
    assert (answer.status, answer.body) == (204, b"")
    told = answer.headers
    assert told["access-control-allow-origin"] == origin
    assert told["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in told["access-control-allow-methods"]
    assert told["vary"] == "origin"
    assert "access-control-allow-credentials" not in told
    assert "access-control-allow-private-network" not in told


def test_a_page_on_the_internet_may_reach_a_server_at_home_if_it_is_named(server: BareServer) -> None:
    private = "Access-Control-Request-Private-Network: true"
    answer = called(server, "/v1/models", f"Origin: {PAGE}", *ASKS, private, method="OPTIONS")
    assert answer.headers["access-control-allow-private-network"] == "true"


def test_the_call_itself_needs_its_key_and_its_answer_can_be_read(server: BareServer) -> None:
    refused = called(server, "/v1/models", f"Origin: {PAGE}")
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE)
    answer = called(server, "/v1/models", f"Origin: {PAGE}", "Authorization: Bearer sesame")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    shown = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "request-id", "retry-after", "retry-after-ms", "x-should-retry"} <= {*shown}


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://chat.example", f"{PAGE}:8443", f"{PAGE}.evil.example", "null", f"{PAGE}/"],
)
def test_any_other_page_is_told_nothing(server: BareServer, local: BareServer, origin: str) -> None:
    asked = called(server, "/v1/models", f"Origin: {origin}", *ASKS, method="OPTIONS")
    assert asked.status == 401
    assert "access-control-allow-origin" not in asked.headers
    answer = called(local, "/v1/models", f"Origin: {origin}")
    assert (answer.status, answer.error["code"]) == (403, "foreign_origin")
    assert "--cors-origin" in answer.error["message"]
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["vary"] == "origin"


def test_a_page_that_is_named_calls_a_server_without_keys(local: BareServer) -> None:
    answer = called(local, "/v1/models", f"Origin: {PAGE}", "Sec-Fetch-Site: cross-site")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    elsewhere = local.send(b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nOrigin: https://chat.example\r\n\r\n")
    assert elsewhere.status == 421, "a name that was pointed at this machine is none of ours, whatever the page"


def test_a_star_means_every_page(local: BareServer) -> None:
    with serving(cors_origin=("*",)) as server:
        for origin in ("https://any.example", "null"):
            assert called(server, "/v1/models", f"Origin: {origin}").headers["access-control-allow-origin"] == origin


def test_without_the_setting_nothing_is_said_of_origins() -> None:
    with serving() as server:
        assert "vary" not in called(server, "/v1/models").headers
        assert called(server, "/v1/models", *ASKS, method="OPTIONS").status == 405
        assert called(server, "/v1/models", f"Origin: {PAGE}", *ASKS, method="OPTIONS").status == 403


@pytest.mark.parametrize("wanted", ["x" * 3000, "a\tb", "a: b", 'a"b', "a;b"])
def test_what_a_browser_never_asks_for_is_not_repeated(server: BareServer, wanted: str) -> None:
    lines = f"Origin: {PAGE}", ASKS[0], f"Access-Control-Request-Headers: {wanted}"
    answer = called(server, "/v1/models", *lines, method="OPTIONS")
    assert (answer.status, answer.headers["access-control-allow-headers"]) == (204, "content-type")


@pytest.mark.parametrize(
    "name", ["chat.example", "https://", f"{PAGE}/chat", f"{PAGE}, {PROGRAM}", "https://*.a.b", "a b"]
)
def test_a_setting_that_is_no_origin_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"^cors_origin is .*; allowed: an origin as browsers send it"):
        ServerConfig(cors_origin=(name,))
