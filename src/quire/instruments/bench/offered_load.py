"""The load for a server: requests, and the times when they are due.

    open loop      requests are due at times that do not depend on the server, like those of many users
    closed loop    a fixed number of concurrent requests; the next one starts when one ends

An open loop shows the effects of overload; a closed loop never overloads. Everything is drawn from seeds, so the same
load can be repeated. Token ids are shifted from level to level, so that a level has no cache hits from another.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quire.instruments.bench.workload_file import LOWEST_ID, Workload, WorkloadError, WorkloadRequest

COMPLETIONS, CHAT = "completions", "chat"
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}
MAX_ID_SHARE = 0.95
WORDS = ("block", "table", "page", "memory", "token", "cache", "request", "prefix", "copy", "write", "step", "plan")


@dataclass(frozen=True, slots=True)
class DrawnShape:
    """Requests with these lengths in tokens; each length is drawn from `1 - spread` to `1 + spread` times the value."""

    prompt_tokens: int
    output_tokens: int
    spread: float = 0.0


def workload_requests(workload: Workload, vocab_size: int, first_shift: int) -> Iterator[WorkloadRequest]:
    """Yield the requests of a workload repeatedly, each time with other token ids."""
    shift = first_shift
    while True:
        yield from workload.shifted(shift, vocab_size).requests
        shift += 1


def drawn_requests(shape: DrawnShape, vocab_size: int, seed: int) -> Iterator[WorkloadRequest]:
    """Yield an endless stream of requests with drawn token ids."""
    rng = random.Random(seed)
    most = max(int(vocab_size * MAX_ID_SHARE), 1)
    least = LOWEST_ID if most > 2 * LOWEST_ID else 0
    while True:
        prompt, output = (
            max(1, round(length * rng.uniform(1 - shape.spread, 1 + shape.spread)))
            for length in (shape.prompt_tokens, shape.output_tokens)
        )
        yield WorkloadRequest(tuple(rng.randrange(least, most) for _ in range(prompt)), output)


def drawn_conversation(request: WorkloadRequest) -> str:
    """Return a text with as many words as a prompt has tokens: chats take no token ids.

    >>> drawn_conversation(WorkloadRequest((0, 1, 12), 1))
    'block table block'
    """
    return " ".join(WORDS[token % len(WORDS)] for token in request.prompt_token_ids)


def request_body(request: WorkloadRequest, endpoint: str, model: str) -> bytes:
    """Return the body for a request: streamed, with usage, and with the request's length."""
    fields: dict[str, Any] = {
        "model": model,
        "max_tokens": request.max_tokens,
        "temperature": request.sampling.temperature,
        "n": request.n,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint == CHAT:
        fields["messages"] = [{"role": "user", "content": drawn_conversation(request)}]
        fields["max_completion_tokens"] = fields.pop("max_tokens")
    else:
        fields["prompt"] = list(request.prompt_token_ids)
    return json.dumps({**fields, **request.fields}, separators=(",", ":")).encode()


def request_source(
    workload: Workload | None, shape: DrawnShape, *, vocab_size: int, seed: int
) -> Callable[[int], Iterator[WorkloadRequest]]:
    """Return a generator function for the requests of a level, by its number; no two levels share token ids."""
    if workload is None:
        return lambda level: drawn_requests(shape, vocab_size, seed * 1_000_003 + level)
    return lambda level: workload_requests(workload, vocab_size, 1_000 * level)


def require_token_ids(workload: Workload | None, endpoint: str) -> None:
    """Raise `WorkloadError` if a workload, which has token ids, would be sent as chats."""
    if workload is not None and endpoint == CHAT:
        raise WorkloadError("endpoint", endpoint, "completions, with a workload: its prompts are token ids")
