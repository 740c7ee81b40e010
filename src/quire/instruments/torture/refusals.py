"""Probes: single bad requests with their required answers, and the check of the answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.instruments.http.plain import Answer
from quire.instruments.http.sockets import head, send_raw
from quire.instruments.torture.failure import CaseFailedError, require
from quire.instruments.torture.stage import TortureServer

MAX_ANSWER_S = 0.05
NUM_TRIES = 5
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON_TYPE = {"Content-Type": "application/json"}
FIELDS = {"message", "type", "param", "code"}
OTHER_FORMS = {"/api/": {"message"}, "/v1/messages": {"message", "type"}}
"""The fields of an error on the paths of Ollama's and Anthropic's interfaces; `FIELDS`: on all others."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A request and its required answer: one of these statuses, and this code and this parameter unless empty.

    `data`: the bytes of the request; if empty, they are made from the other fields. A `large` request may take longer.
    """

    name: str
    statuses: frozenset[int]
    path: str = COMPLETIONS
    body: bytes | None = None
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    param: str = ""
    host: str = "localhost"
    large: bool = False
    with_key: bool = True
    data: bytes = b""


def bad(fields: Mapping[str, Any] | bytes, *, param: str = "", code: str = "", **more: Any) -> Probe:
    """Return a probe: a completion with these fields, or this body, which must be refused with 400."""
    return _probe(
        fields, {"prompt": "A block is", "max_tokens": 4}, COMPLETIONS, {"param": param, "code": code, **more}
    )


def bad_chat(fields: Mapping[str, Any], *, param: str = "", code: str = "", **more: Any) -> Probe:
    """Return a probe: a chat with these fields, which must be refused with 400."""
    messages = [{"role": "user", "content": "Hi"}]
    return _probe(fields, {"messages": messages, "max_tokens": 4}, CHAT, {"param": param, "code": code, **more})


def _probe(fields: Mapping[str, Any] | bytes, beside: dict[str, Any], path: str, more: dict[str, Any]) -> Probe:
    body = fields if isinstance(fields, bytes) else json.dumps({**beside, **fields}).encode()
    shown = body[:60].decode("latin-1") if isinstance(fields, bytes) else ", ".join(fields)
    return Probe(shown, frozenset({400}), path, body, **more)


def refuse_all(server: TortureServer, probes: Sequence[Probe]) -> str:
    """Send every probe while bystanders run, then again without them; none must reach the engine."""
    slowest = max(_check(server, probe) for probe in probes)
    assert server.bystanders is not None
    server.bystanders.stop()
    server.wait_idle()
    before = server.metric("quire_steps_total")
    for probe in probes:
        if not probe.large:
            _check(server, probe)
    server.wait_idle()
    steps = server.metric("quire_steps_total") - before
    require(steps == 0, f"the engine has done {steps:.0f} steps: something was enqueued")
    return f"{len(probes)} inputs" + (f", {1e3 * slowest:.0f} ms at most" if slowest else "")


def send(server: TortureServer, probe: Probe) -> Answer:
    """Send a probe and return the answer."""
    if probe.data:
        return send_raw(server.address, probe.data)
    fields = dict(JSON_TYPE if probe.body is not None else {}) | (server.headers if probe.with_key else {})
    fields |= probe.headers
    if probe.body is not None:
        fields.setdefault("Content-Length", str(len(probe.body)))
    return send_raw(server.address, head(probe.method, probe.path, fields, probe.host) + (probe.body or b""))


def _check(server: TortureServer, probe: Probe) -> float:
    """Raise unless a probe is refused as required; returns the seconds that it took, or 0 for a large probe."""
    fastest = math.inf
    for _ in range(NUM_TRIES):  # a busy machine may be late once
        answer = _sent(server, probe)
        check_answer(probe, answer)
        fastest = min(fastest, answer.seconds)
        if probe.large or fastest < MAX_ANSWER_S:
            return 0.0 if probe.large else fastest
    raise CaseFailedError(f"{probe.name}: refused only after {1e3 * fastest:.0f} ms")


def _sent(server: TortureServer, probe: Probe) -> Answer:
    try:
        return send(server, probe)
    except OSError as error:
        raise CaseFailedError(f"{probe.name}: no answer: {error}") from error


def check_answer(probe: Probe, answer: Answer) -> None:
    """Raise `CaseFailedError` unless an answer refuses a probe as required."""
    what = f"{probe.name} got {answer.status}"
    require(answer.status in probe.statuses, f"{what}, not {sorted(probe.statuses)}: {answer.body[:120]!r}")
    error = answer.error
    fields = next((fields for begin, fields in OTHER_FORMS.items() if probe.path.startswith(begin)), FIELDS)
    require(set(error) == fields, f"{what} without the error object of its interface: {answer.body[:120]!r}")
    require(isinstance(error["message"], str) and bool(error["message"]), f"{what} without a message")
    require(
        not probe.code or error.get("code") == probe.code,
        f"{what} with the code {error.get('code')!r}, not {probe.code!r}",
    )
    named = str(error.get("param"))
    require(not probe.param or named.startswith(probe.param), f"{what} and names {named!r}, not {probe.param!r}")
