"""The peer, vLLM's scheduler and KV cache manager, measured in a separate process.

Its model folder has only a `config.json` with the shape of Qwen3-0.6B: it never loads weights or a tokenizer.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.core.errors import QuireError
from quire.instruments.bench import peer_probe
from quire.instruments.bench.shapes import QWEN3

TIMEOUT_S = 600


class PeerError(QuireError):
    """The peer could not be measured."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Runs the peer's script unchanged, or through the probe; `arguments` are the script's."""

    python: str
    script: str
    arguments: tuple[str, ...]

    def run_script(self) -> dict[str, Any]:
        """Return the output of the script."""
        return self._run([self.script, *self.arguments])

    def run_probe(self, *, stagger: int = 1) -> dict[str, Any]:
        """Return all samples of one run; `stagger` spreads the lengths of prompts over this many tokens."""
        return self._run([peer_probe.__file__, self.script, str(stagger), *self.arguments])

    def _run(self, arguments: Sequence[str]) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [self.python, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerError(f"the peer did not run: {error}") from error
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            *_, last = ["it printed nothing", *done.stderr.splitlines()]
            raise PeerError(f"the peer ended with status {done.returncode}: {last}")
        found: dict[str, Any] = json.loads(lines[-1])
        return found


@contextmanager
def peer_at(python: str, script: str | Path, options: dict[str, int]) -> Iterator[Peer]:
    """Yield the peer, with a model folder that exists during the context."""
    if not Path(script).is_file():
        raise PeerError(f"the peer script {script} does not exist; name it with --peer-script")
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3), encoding="utf-8")
        arguments = ["--model", folder]
        for name, value in options.items():
            arguments += [f"--{name}", str(value)]
        yield Peer(python, str(Path(script).resolve()), tuple(arguments))
