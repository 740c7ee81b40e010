"""Faults of the disk cache: a server is killed, its files are damaged, and the next server must answer the same."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.instruments.torture.case import Case
from quire.instruments.torture.failure import require
from quire.instruments.torture.stage import ServerSpec, Stage, TortureServer

WORDS = ("blocks", "tables", "slots", "tokens", "of", "the", "memory", "are", "kept", "on", "disk")
PROMPT = " ".join(random.Random(1).choices(WORDS, k=150))
TAILS = (" And?", " So?", " Then?")


def torn_disk(stage: Stage) -> str:
    """F14: the files of a disk cache are damaged; each block is intact or a miss, and the server still serves."""
    with stage.serving() as server:
        expected = [_answer(server, tail)[0] for tail in TAILS]
    counts: list[str] = []
    for name, (damage, may_hit) in list(DAMAGES.items())[: 3 if stage.is_quick else None]:
        folder = stage.folder / "disk cache"
        shutil.rmtree(folder, ignore_errors=True)
        spec = ServerSpec.of(disk_cache=str(folder), disk_cache_size="8MiB", disk_write="always")
        with stage.serving(spec) as server:
            for tail in TAILS:
                _answer(server, tail)
            server.is_spoiled = server.may_lose_bystanders = True
            for process in (*server.process.children(), server.process.pid):
                os.kill(process, signal.SIGKILL)
        damage(folder)
        with stage.serving(spec) as server:
            answers = [_answer(server, tail) for tail in TAILS]
            server.is_spoiled = True
        require([text for text, _ in answers] == expected, f"{name}: the texts have changed")
        num_hit = sum(count for _, count in answers)
        require(num_hit > 0 if may_hit else num_hit == 0, f"{name}: {num_hit} tokens came from disk")
        counts.append(f"{name} {num_hit}")
    return f"tokens from disk: {', '.join(counts)}"


def _answer(server: TortureServer, tail: str) -> tuple[str, int]:
    """Return the text after the shared prompt, and the number of tokens that came from disk."""
    answer = server.complete(prompt=PROMPT + tail)
    require(answer.status == 200, f"a completion got {answer.status}")
    value: dict[str, Any] = answer.json()
    tiers = value["usage"]["prompt_tokens_details"].get("by_tier", {})
    return value["choices"][0]["text"], tiers.get("disk", 0)


def _each(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    for path in folder.glob(f"*/{name}"):
        path.write_bytes(change(path.read_bytes()))


def _flipped(data: bytes) -> bytes:
    """Return the bytes with a bit of each page flipped."""
    changed = bytearray(data)
    for at in range(0, len(data), 4096):
        changed[at] ^= 1
    return bytes(changed)


DAMAGES: dict[str, tuple[Callable[[Path], None], bool]] = {
    "killed": (lambda folder: None, True),
    "half of the bytes": (lambda folder: _each(folder, "blocks.bin", lambda data: data[: len(data) // 2]), True),
    "flipped bits": (lambda folder: _each(folder, "blocks.bin", _flipped), False),
    "no bytes": (lambda folder: _each(folder, "blocks.bin", lambda data: b""), False),
    "half of a record": (lambda folder: _each(folder, "slots.idx", lambda data: data[:300]), False),
    "records of zeros": (lambda folder: _each(folder, "slots.idx", lambda data: bytes(len(data))), False),
    "no meta.json": (lambda folder: _each(folder, "meta.json", lambda data: b""), False),
    "no folder": (shutil.rmtree, False),
}
"""The damages to the files, and whether some blocks stay intact."""

DISK_FAULTS = (Case("F14", "a disk that tears what is kept on it", torn_disk),)
