"""The crowd of the demonstration: what one round of it asks for."""

from __future__ import annotations

import json
import random

from quire.cli.demo.crowd import SYSTEM_PROMPT, Visit, request_bytes, visits


def test_a_round_has_all_that_there_is_to_see() -> None:
    found = list(visits(random.Random(1)))
    assert len({visit.question for visit in found[:6]}) == 6
    assert max(visit.num_choices for visit in found) > 1
    assert any(visit.leaves_after for visit in found)
    assert max(len(visit.question) for visit in found) > 500
    assert sum(visit.max_tokens for visit in found[-9:]) > 384 * 16 / 2  # more than half of the memory in a second
    assert found == list(visits(random.Random(1)))
    assert found != list(visits(random.Random(2)))


def test_a_visit_is_a_call_that_a_server_takes() -> None:
    head, _, body = request_bytes("here", Visit(0.0, "What is “a block”?", 7, num_choices=3)).partition(b"\r\n\r\n")
    fields = json.loads(body)
    assert f"Content-Length: {len(body)}".encode() in head.split(b"\r\n")
    assert (fields["n"], fields["max_tokens"], fields["stream"]) == (3, 7, True)
    assert [message["content"] for message in fields["messages"]] == [SYSTEM_PROMPT, "What is “a block”?"]
