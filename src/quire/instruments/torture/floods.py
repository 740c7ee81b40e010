"""Floods: bodies that cost a server far more than their sender, and measurements of their effects."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire.instruments.http.plain import Answer
from quire.instruments.http.sockets import Address, head, send_raw
from quire.instruments.torture.failure import CaseFailedError
from quire.instruments.torture.prober import start_prober
from quire.instruments.torture.refusals import CHAT, COMPLETIONS, JSON_TYPE

MEBIBYTE: Final = 1 << 20
TOKENIZE, DETOKENIZE, MESSAGES, INFILL = "/tokenize", "/detokenize", "/v1/messages", "/infill"
_LIMIT: Final = re.compile(r"limit of (\d+) bytes")


@dataclass(frozen=True, slots=True)
class Flood:
    """A body of any size: a piece repeated between a beginning and an end. `num_bytes`: its full size."""

    name: str
    path: str
    begin: bytes
    piece: Callable[[int], bytes]
    end: bytes
    num_bytes: int

    def body(self, num_bytes: int) -> bytes:
        """Return a body of at most this many bytes. Does not mutate."""
        left, pieces, index = num_bytes - len(self.begin) - len(self.end), [], 0
        first = self.piece(0)
        if first == self.piece(1):
            return self.begin + first * (left // len(first)) + self.end
        while (left := left - len(piece := self.piece(index))) >= 0:
            pieces.append(piece)
            index += 1
        return self.begin + b"".join(pieces) + self.end


def _same(piece: bytes) -> Callable[[int], bytes]:
    return lambda _: piece


_CHAT: Final = b'{"max_tokens": 1, "messages": [{"role": "user", "content": "'
FLOODS: Final = (
    Flood("emoji to be tokenized", TOKENIZE, b'{"prompt": "', _same("\U0001f600".encode()), b'"}', 32 * MEBIBYTE - 64),
    Flood("`[],` in metadata", COMPLETIONS, b'{"prompt": "a", "metadata": [', _same(b"[],"), b"0]}", 30 * MEBIBYTE),
    Flood("ids to be detokenized", DETOKENIZE, b'{"tokens": [', _same(b"1,"), b"1]}", 32_000_000),
    Flood(
        "entries of logit_bias",
        COMPLETIONS,
        b'{"prompt": "a", "logit_bias": {',
        lambda index: b'"%d":1,' % index,
        b'"x":1}}',
        28 * MEBIBYTE,
    ),
    Flood("a message of 1-byte words", CHAT, _CHAT, _same(b"a "), b'"}]}', 32 * MEBIBYTE - 64),
    Flood(
        "a message of 1-byte words to Anthropic's interface", MESSAGES, _CHAT, _same(b"a "), b'"}]}', 32 * MEBIBYTE - 64
    ),
    Flood("1-byte words before a gap", INFILL, b'{"input_prefix": "', _same(b"a "), b'"}', 32 * MEBIBYTE - 64),
    Flood("a message of escapes", CHAT, _CHAT, _same(b"\\u2028"), b'"}]}', 32 * MEBIBYTE - 64),
    Flood("empty messages", CHAT, b'{"messages": [', _same(b"{},"), b"{}]}", 30 * MEBIBYTE),
    Flood("prompts of a batch", COMPLETIONS, b'{"prompt": [', _same(b'"a",'), b'"a"]}', 30 * MEBIBYTE),
    Flood("keys that stand twice", COMPLETIONS, b'{"prompt": "a"', _same(b',"n":1'), b"}", 30 * MEBIBYTE),
    Flood(
        "arguments of a call",
        CHAT,
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[',
        _same(b"[],"),
        b'0]"}}]}]}',
        30 * MEBIBYTE,
    ),
    Flood(
        "line feeds as a grammar",
        COMPLETIONS,
        b'{"prompt": "a", "structured_outputs": {"grammar": "',
        _same(b"\\n"),
        b'"}}',
        20_000,
    ),
)


def limit_of(address: Address, path: str, headers: dict[str, str]) -> int:
    """Return the size of the largest allowed body, which the refusal of a larger one names."""
    announced = head("POST", path, {**JSON_TYPE, **headers, "Content-Length": str(1 << 40)})
    answer = send_raw(address, announced)
    found = _LIMIT.search(str(answer.error.get("message")))
    if answer.status != 413 or found is None:
        raise CaseFailedError(f"an announced terabyte to {path} got {answer.status}: {answer.body[:120]!r}")
    return int(found[1])


def send_flood(address: Address, path: str, body: bytes, headers: dict[str, str]) -> Answer:
    """Send a body and return the answer."""
    fields = {**JSON_TYPE, **headers, "Content-Length": str(len(body))}
    return send_raw(address, head("POST", path, fields) + body, timeout_s=120.0)


@dataclass(slots=True)
class Watched:
    """The effects on a watched process."""

    growth_bytes: int = 0
    slowest_s: float = 0.0
    num_answers: int = 0


@contextmanager
def watching(pid: int, url: str) -> Iterator[Watched]:
    """Watch the front process: how much its memory grew at the peak, and how slowly it answered /livez."""
    process, found = Path("/proc") / str(pid), Watched()
    prober = start_prober(f"{url}/livez")
    try:
        time.sleep(1.0)  # until the prober has started
        (process / "clear_refs").write_text("5")  # resets the peak
        before = _memory(process, "VmRSS")
        yield found
        time.sleep(0.2)  # enough for one more probe
        found.growth_bytes = _memory(process, "VmHWM") - before
        seconds = json.loads(prober.communicate(timeout=30.0)[0])
        found.slowest_s, found.num_answers = max(seconds, default=0.0), len(seconds)
    finally:
        prober.kill()
        prober.wait()


def _memory(process: Path, name: str) -> int:
    for line in (process / "status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise CaseFailedError("the system does not report the memory of a process")
