"""Expensive grammars over HTTP: who sends them is told, nobody else notices, and no log shows them."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.compute.grammar import GrammarLimits
from support.server import JSON, RunningServer, running_server
from support.server_thread import Answer

KEYS = ("one", "two")
ISSUE = "start: s\ns: s s | W\nW: /[a-z ]/"
AMBIGUOUS = "start: s\ns: s t | t s | s s | u s | s u | W\nt: s s | t t | W\nu: t s | s t | u u | W\nW: /[a-z ]/"
SECRET = "swordfish"
JSON_FORM = {"json": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}}
FORMS: tuple[dict[str, Any], ...] = ({}, {"structured_outputs": JSON_FORM})


@pytest.fixture
def make_server(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Any]:
    def make(text_s: float) -> Any:
        limits = GrammarLimits(text_s=text_s, token_s=0.0)
        monkeypatch.setattr("quire.compute.grammar.mask_service.GrammarLimits", lambda: limits)
        return running_server(api_key=KEYS)

    return make


@pytest.fixture
def server(make_server: Callable[[float], Any]) -> Iterator[RunningServer]:
    with make_server(0.3) as running:
        yield running


def complete(server: RunningServer, key: str, **fields: Any) -> Answer:
    body = {"prompt": "A block is", "max_tokens": 200, "temperature": 1, "seed": 3, **fields}
    headers = {**JSON, "authorization": f"Bearer {key}"}
    return server.ask("POST", "/v1/completions", json.dumps(body).encode(), headers)


def held_to(grammar: str) -> dict[str, Any]:
    return {"structured_outputs": {"grammar": grammar}}


@pytest.mark.parametrize("grammar", [ISSUE, AMBIGUOUS], ids=["of the issue", "more ambiguous"])
def test_it_fails_its_request_once_and_is_known_then_to_that_tenant_alone(server: RunningServer, grammar: str) -> None:
    first = complete(server, "one", **held_to(grammar))
    assert (first.status, first.error["param"]) == (400, "structured_outputs.grammar"), first.body[:200]
    assert "too expensive to follow" in first.error["message"]
    again = complete(server, "one", **held_to(grammar))
    assert (again.status, again.error["param"]) == (400, "structured_outputs.grammar")
    assert "could not be enforced" in again.error["message"]
    other = complete(server, "two", **held_to(grammar))
    assert other.error["message"] == first.error["message"]


def test_another_tenant_goes_on_meanwhile(make_server: Callable[[float], Any]) -> None:
    """Nothing ends the expensive texts here but their client, who leaves."""
    with make_server(1e6) as server:
        expected = [complete(server, "two", max_tokens=20, **form).value["choices"] for form in FORMS]
        over = threading.Event()

        def ask_for_expensive() -> None:
            with server.client(api_key="one") as client:
                asked: dict[str, Any] = {"temperature": 1, "n": 4, "stream": True, "extra_body": held_to(AMBIGUOUS)}
                with client.completions.create(model="guide", prompt="a", max_tokens=400, **asked) as stream:
                    assert next(iter(stream)).choices
                    has_begun.set()
                    over.wait(120)

        has_begun = threading.Event()
        thread = threading.Thread(target=ask_for_expensive)
        thread.start()
        try:
            assert has_begun.wait(60)
            for _ in range(10):
                found = [complete(server, "two", max_tokens=20, **form).value["choices"] for form in FORMS]
                assert found == expected
            assert server.num_under_way, "the expensive texts have ended: this was no trial"
        finally:
            over.set()
            thread.join()


def test_no_log_shows_a_grammar(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server.loop.call_soon_threadsafe(server.loop.set_debug, True)
    bad = [
        {"grammar": f'start: "{SECRET}" missing'},
        {"grammar": f"{ISSUE}\n// {SECRET}"},
        {"grammar": f"{ISSUE}\n// {SECRET}"},
        {"regex": f"({SECRET}"},
        {"json": {"type": SECRET}},
        {"json": {"type": "string", "pattern": "^((((a{1,99}){1,99}){1,99}){1,99}){1,99}$", "title": SECRET}},
    ]
    for form in bad:
        answer = complete(server, "one", structured_outputs=form)
        assert answer.status == 400, form
    assert complete(server, "one", structured_outputs={"choice": [SECRET]}).status == 200
    server.wait_until_idle()
    assert SECRET not in caplog.text
