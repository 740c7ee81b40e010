"""Reading a body: its type, its size to the byte, its pace, and that what it held is counted whatever becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request

from quire.core.clock import ManualClock
from quire.core.json_bounds import JsonBounds
from quire.core.validate import RequestLimits
from quire.engine.text.tokenizer import TEXT_BYTES_PER_TOKEN
from quire.serve.config import ServerConfig
from quire.serve.errors import ApiError
from quire.serve.read.body import (
    JSON_BYTES_PER_BYTE,
    JSON_BYTES_PER_ID,
    MAX_NUMBERS,
    OTHER_FIELDS_BYTES,
    BodyLimits,
    read_json_body,
)
from quire.serve.read.body_budget import FREE_BYTES, BodyBudget, HeldBody
from quire.serve.services import Services
from support.bare_server import FakeModel
from support.only_model import make_services

JSON = (b"content-type", b"application/json")


class Model(FakeModel):
    """A model with a context of 100 tokens unless a test says otherwise."""

    context, vocab_size = 100, 300

    @property
    def limits(self) -> RequestLimits:
        return RequestLimits(self.vocab_size, self.context, self.context, 4)


def services(**config: Any) -> Services:
    return make_services(Model(), ServerConfig(**config), ManualClock())


def read(
    parts: Sequence[bytes | None],
    limit: int,
    *headers: tuple[bytes, bytes],
    held: HeldBody | None = None,
    where: Services | None = None,
) -> bytearray:
    """Read a body that comes in parts; None among them: the client has gone. Nothing comes after the last."""
    messages: list[dict[str, Any]] = [
        {"type": "http.disconnect"}
        if part is None
        else {"type": "http.request", "body": part, "more_body": index < len(parts) - 1}
        for index, part in enumerate(parts)
    ]

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    where = where or services()
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "headers": list(headers) or [JSON],
        "app": SimpleNamespace(state=SimpleNamespace(models=SimpleNamespace(server=where))),
        "state": {"context": SimpleNamespace(body=held or where.bodies.open("a"))},
    }
    return asyncio.run(read_json_body(Request(scope, receive), BodyLimits(limit, "send less")))


def refusal(*arguments: Any, **options: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(*arguments, **options)
    return caught.value


@given(st.lists(st.binary(max_size=6), min_size=1, max_size=6), st.integers(-1, 1))
def test_a_body_is_what_came_up_to_its_limit_however_it_was_cut(parts: list[bytes], room: int) -> None:
    whole = b"".join(parts)
    limit = len(whole) + room
    if room >= 0:
        assert read(parts, limit) == whole
        assert read(parts, limit, JSON, (b"content-length", b"%d" % len(whole))) == whole
    elif limit >= 0 and whole:
        for headers in ([JSON], [JSON, (b"content-length", b"%d" % len(whole))]):
            error = refusal(parts, limit, *headers)
            words = f"the body of the request is over the limit of {limit} bytes: send less"
            assert (error.status, error.detail.message) == (413, words)


def test_what_is_announced_as_too_much_is_not_waited_for() -> None:
    assert refusal([], 10, JSON, (b"content-length", b"11")).status == 413
    for digits in (b"9" * 30, b"9" * 5000, b"0" * 5000 + b"11"):
        assert refusal([], 10, JSON, (b"content-length", digits)).status == 413


def test_a_length_may_begin_with_any_number_of_zeros() -> None:
    for digits in (b"0", b"0" * 5000, b"0" * 5000 + b"5"):
        assert read([b"12345"], 5, JSON, (b"content-length", digits)) == b"12345"


@pytest.mark.parametrize("announced", [b"", b"-1", b"1e3", b"0x10", b" ", b"+5", b"\xb2", b"\xbd"])
def test_what_is_announced_and_is_no_number_announces_nothing(announced: bytes) -> None:
    assert read([b"{}"], 10, JSON, (b"content-length", announced)) == b"{}"


def test_more_than_was_announced_is_counted_as_it_comes() -> None:
    error = refusal([b"12345", b"6"], 5, JSON, (b"content-length", b"2"))
    assert (error.status, error.detail.code) == (413, "body_too_large")


@pytest.mark.parametrize(
    "media_type",
    [b"application/json", b"Application/JSON ; charset=utf-8", b"application/json;", b" application/json"],
)
def test_json_may_be_announced_in_any_spelling(media_type: bytes) -> None:
    for encoding in ((), ((b"content-encoding", b"identity"),), ((b"content-encoding", b" Identity "),)):
        assert read([b"{}"], 10, (b"content-type", media_type), *encoding) == b"{}"


FORM = (b"content-type", b"application/x-www-form-urlencoded")


@pytest.mark.parametrize(
    "header",
    [(b"accept", b"*/*"), (b"content-type", b""), (b"content-type", b" "), FORM, (FORM[0], FORM[1].upper() + b"; a=b")],
)
def test_a_body_that_says_nothing_or_what_curl_says_and_comes_from_no_page_is_json(header: tuple[bytes, bytes]) -> None:
    assert read([b"{}"], 10, header) == b"{}"


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        *(
            ([(b"content-type", kind)], "the body must be JSON, with the header Content-Type: application/json")
            for kind in (b"text/json", b"application/json-patch+json", b"text/plain", b"multipart/form-data")
        ),
        *(
            (
                [kind, (name, b"x")],
                "the body must be JSON, with the header Content-Type: application/json",
            )
            for kind in ((b"accept", b"*/*"), FORM)
            for name in (b"origin", b"referer", b"sec-fetch-site")
        ),
        *(
            ([JSON, (b"content-encoding", kind)], "the body must not be compressed (no Content-Encoding)")
            for kind in (b"gzip", b"identity, gzip", b"br", b"")
        ),
    ],
)
def test_any_other_body_is_refused_before_it_is_read(headers: list[tuple[bytes, bytes]], words: str) -> None:
    error = refusal([], 10, *headers)
    assert (error.status, error.detail.code, error.detail.message) == (415, "unsupported_media_type", words)


def test_a_client_that_leaves_or_falls_silent_is_not_waited_for() -> None:
    for parts in ([None], [b"{", None], [b"", b"", None]):
        with pytest.raises(ClientDisconnect):
            read(parts, 10)
    for parts in ([], [b"{"]):
        silent = read_silent(parts)
        assert (silent.status, silent.detail.code) == (408, "request_timeout")
        assert silent.detail.message == "the body of the request did not arrive within 0.01 seconds"


def read_silent(parts: list[bytes]) -> ApiError:
    """Read a body whose end never comes."""

    async def receive() -> Any:
        if not parts:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": parts.pop(0), "more_body": True}

    where = services(body_timeout_s=0.01)
    scope: dict[str, Any] = {
        "type": "http",
        "headers": [JSON],
        "app": SimpleNamespace(state=SimpleNamespace(models=SimpleNamespace(server=where))),
        "state": {"context": SimpleNamespace(body=where.bodies.open("a"))},
    }
    with pytest.raises(ApiError) as caught:
        asyncio.run(read_json_body(Request(scope, receive), BodyLimits(1000)))
    return caught.value


@given(st.lists(st.integers(0, FREE_BYTES), min_size=1, max_size=5), st.integers(0, 4 * FREE_BYTES))
def test_every_byte_is_held_from_its_coming_until_the_call_ends(sizes: list[int], room: int) -> None:
    budget = BodyBudget(room, room)
    held, total = budget.open("a"), sum(sizes)
    costs = max(total - FREE_BYTES, 0)
    parts = [b"x" * size for size in sizes]
    if costs <= room:
        assert len(read(parts, 1 << 20, held=held)) == total
        assert held.num_bytes == total
        assert budget.held_bytes == costs
    else:
        assert refusal(parts, 1 << 20, held=held).status == 503
        assert budget.held_bytes <= room
        announced = (b"content-length", b"%d" % total)
        assert refusal([], 1 << 20, JSON, announced, held=budget.open("b")).status == 503
    held.release()
    assert budget.held_bytes == 0
    budget.check()


# ---- how large a body may be ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_a_body_has_room_for_all_that_the_context_holds_and_no_more(num_prompts: int) -> None:
    where = services()
    text, ids = TEXT_BYTES_PER_TOKEN * JSON_BYTES_PER_BYTE, JSON_BYTES_PER_ID
    for has_text, per_token in ((True, max(text, ids)), (False, ids)):
        limits = BodyLimits.of(where, num_prompts=num_prompts, has_text=has_text)
        assert limits.max_bytes == num_prompts * 100 * per_token + OTHER_FIELDS_BYTES
        assert limits.why == (
            f"a context of 100 tokens has no room for more{'; send less at once' if num_prompts > 1 else '; send less'}"
        )
        assert limits.bounds == JsonBounds(max_numbers=num_prompts * 100 + (300 if has_text else 0))


def test_a_setting_makes_the_limit_smaller_and_never_larger() -> None:
    fits = BodyLimits.of(services()).max_bytes
    assert BodyLimits.of(services(max_body=fits)).why == "a context of 100 tokens has no room for more; send less"
    smaller = BodyLimits.of(services(max_body=fits - 1))
    assert (smaller.max_bytes, smaller.why) == (
        fits - 1,
        "this server accepts no larger body (max_body); send less",
    )
    assert BodyLimits.of(services(max_body=2 * fits)).max_bytes == fits


def test_numbers_are_bounded_except_those_of_one_long_prompt() -> None:
    for context, num_prompts, expected in (
        (MAX_NUMBERS // 2, 4, MAX_NUMBERS),
        (2 * MAX_NUMBERS, 1, 2 * MAX_NUMBERS),
        (MAX_NUMBERS - 300, 1, MAX_NUMBERS),
    ):
        where = services(max_body="64GiB", max_bodies="64GiB")
        where.model.context = context  # type: ignore[attr-defined]
        assert BodyLimits.of(where, num_prompts=num_prompts).bounds.max_numbers == expected
