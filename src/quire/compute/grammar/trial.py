"""GrammarTrial: a grammar from outside is compiled in a process of its own first, which it may take down.

    check ──► trial: a child with little stack, little memory and little processor time ──► dies, or answers
                  │
                  └─► only what it could compile is compiled where the model is

llguidance counts its work nearly everywhere. Nearly: thirty patterns that must hold at once keep it busy for hours, and
a chain of 3,000 references ends the whole process for want of stack (version 1.9.1; both are among our tests). No
counter can be put there from outside, and a thread that does not return cannot be ended. A process can. The child
knows the special tokens of the model by their ids and else only single bytes, so it starts in a moment, where the
whole vocabulary would take seconds and 100 MB; what does harm is the making of a grammar, not its first mask.

The time is that of the processor, so a busy machine refuses nothing that an idle one takes. One grammar is tried at a
time, and reasons are kept by the compiler, so the same one is not tried twice. Where the child was ended, the next
grammar starts another.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, Final

from quire.compute.grammar.limits import GrammarLimits
from quire.core.errors import ExecutionError
from quire.core.grammar import Grammar
from quire.core.python_process import start_python

BUDGET_S: Final = 0.4
STACK_BYTES: Final = 1 << 20
"""Of the thread that compiles in the child; threads of the server have 8 MiB as a rule."""
MEMORY_BYTES: Final = 1 << 30
"""Beside what the child has when it starts."""
TOO_MUCH: Final = "it takes too much to compile; make it smaller, or nest and combine less"


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """What the child is told once: the tokens that are not text, by id, and what it may use."""

    vocab_size: int
    special_tokens: Mapping[int, str]
    eos_token_ids: Sequence[int]
    limits: GrammarLimits
    budget_s: float = BUDGET_S


class GrammarTrial:
    """Tries grammars in a child, which is started when the first one comes. Threads may share it."""

    def __init__(self, settings: TrialSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._finalizer: weakref.finalize[..., GrammarTrial] | None = None

    def reason(self, grammar: Grammar) -> str:
        """Return why a grammar is not to be compiled here; empty where it may be. Mutates the child."""
        with self._lock:
            child = self._child or self._start()
            try:
                return str(_ask(child, {"kind": grammar.kind, "text": grammar.text}))
            except (OSError, ValueError):  # it did not live to answer
                self._end()
                return TOO_MUCH

    def close(self) -> None:
        """End the child; the next grammar starts another. May be called twice."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        child = start_python("-m", "quire.compute.grammar.trial_child", **pipes, text=True)
        self._child, self._finalizer = child, weakref.finalize(self, _end, child)
        try:
            _ask(child, asdict(self._settings))
        except (OSError, ValueError) as error:
            self._end()
            raise ExecutionError(f"no process could be started to try grammars in: {error}") from error
        return child

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._child = self._finalizer = None


def _ask(child: subprocess.Popen[str], question: Mapping[str, Any]) -> object:
    """Return the answer of a child; raises `OSError` or `ValueError` where it is gone."""
    to_child, from_child = _pipes(child)
    to_child.write(json.dumps(question) + "\n")
    to_child.flush()
    return json.loads(from_child.readline())


def _pipes(child: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    if child.stdin is None or child.stdout is None:
        raise OSError("the process has no pipes")
    return child.stdin, child.stdout


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    for pipe in _pipes(child):
        with contextlib.suppress(OSError):  # what was not written yet has no reader any more
            pipe.close()
