"""The crowd of the demonstration: simulated clients, so that the dashboard has something to show.

    a round    a class       six questions with one system prompt: they share its blocks
               a chooser     one question, four answers: they share the prompt until they differ
               readers       long prompts; every second reader leaves early
               a rush        more requests than the memory holds: eviction and preemption
               a pause       everything cached, no requests

They are ordinary clients: HTTP over a socket, one stream each. Their questions are drawn from a seed, so that rounds
are similar but not equal.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

SYSTEM_PROMPT: Final = (
    "You are the guide of quire, an engine that serves language models from paged memory. Answer in a few sentences, "
    "and be exact about blocks, tables and reference counts."
)
SUBJECTS: Final = (
    "a block table",
    "copy-on-write",
    "prefix caching",
    "a scheduler",
    "preemption",
    "the prefix tree",
    "eviction",
    "a reference count",
    "the ledger",
    "a step plan",
)
LONG_TEXT: Final = "A block holds the keys and values of sixteen tokens, and a table says where each one lies. "
NUM_CHOICES: Final = 4
NUM_IN_CLASS, NUM_READERS, NUM_IN_RUSH = 6, 4, 9
PAUSE_S: Final = 4.0
END: Final = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Visit:
    """A guest: waits, asks, and leaves after this many pieces of the answer (None: after all)."""

    after_s: float
    question: str
    max_tokens: int
    num_choices: int = 1
    leaves_after: int | None = None


def visits(draw: random.Random) -> Iterator[Visit]:
    """Yield the guests of one round, each with the time since the previous guest. Mutates `draw`."""
    for subject in draw.sample(SUBJECTS, NUM_IN_CLASS):
        yield Visit(0.35, f"What is {subject}?", draw.randint(150, 500))
    yield Visit(1.0, f"Tell me a story about {draw.choice(SUBJECTS)}.", 350, num_choices=NUM_CHOICES)
    for number in range(NUM_READERS):
        text = LONG_TEXT * draw.randint(10, 25)
        yield Visit(0.6, f"{draw.choice(SUBJECTS)}: {text}", 400, leaves_after=40 + 60 * number if number % 2 else None)
    for _ in range(NUM_IN_RUSH):
        yield Visit(0.1, f"How do {draw.choice(SUBJECTS)} and {draw.choice(SUBJECTS)} differ?", draw.randint(600, 1100))


async def crowd(host: str, port: int) -> None:
    """Send requests to a server, round after round, until cancelled."""
    draw = random.Random(0)
    while True:
        async with asyncio.TaskGroup() as guests:
            for visit in visits(draw):
                await asyncio.sleep(visit.after_s)
                guests.create_task(_ask(host, port, visit))
        await asyncio.sleep(PAUSE_S)


async def _ask(host: str, port: int, visit: Visit) -> None:
    """Act as one guest. If the server refuses or disappears, only this visit ends."""
    with suppress(OSError, ValueError):  # ValueError: a line longer than the reader's limit
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(request_bytes(host, visit))
            await writer.drain()
            num_pieces = 0
            async for line in reader:
                num_pieces += line.startswith(b"data: ")
                if line.startswith(END) or num_pieces == visit.leaves_after:
                    return
        finally:
            writer.close()


def request_bytes(host: str, visit: Visit) -> bytes:
    """Return a guest's request. It ignores the end of text, because the guide's own answers would be too short."""
    body = json.dumps(
        {
            "model": "guide",
            "messages": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": visit.question}],
            "stream": True,
            "n": visit.num_choices,
            "max_tokens": visit.max_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
        }
    ).encode()
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        "",
        "",
    )
    return "\r\n".join(lines).encode() + body
