"""GrammarTrial: compiles a client's grammar first in a separate process, which may crash.

    check ──► trial: a child with little stack, little memory and little processor time ──► dies, or answers
                  │
                  └─► only a grammar that it could compile is compiled in the model's process

llguidance counts almost all of its work, but thirty patterns that must all hold keep it busy for hours, and a chain of
3,000 references overflows the stack and ends the process (version 1.9.1; tests cover both). quire cannot add a counter
there, and a hanging thread cannot be killed, but a process can. The child knows the special tokens of the model by id
and otherwise only single bytes, so it starts at once; the full vocabulary would take seconds and 100 MB. Single bytes
suffice, because the danger is in compiling a grammar, not in its first mask.

The limit is on CPU time, so a busy machine refuses no grammar that an idle one accepts. One grammar is tried at a time,
and `verdicts` keeps the reasons, so that no grammar is tried twice.

The death of a child does not prove that the grammar is at fault: an operator, or lack of memory, may have killed it. So
the child reports the start of each trial, and a death refuses a grammar only in two cases: the CPU timer, or two deaths
during its trial, the second in a fresh child. After two deaths outside the trial there is no verdict: nothing is kept,
and the caller may try again. If no answer arrives within `ANSWER_S` seconds, there is no verdict either.
"""

from __future__ import annotations

import contextlib
import json
import signal
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
ANSWER_S: Final = 20.0
STACK_BYTES: Final = 1 << 20
"""The stack size of the child's compiling thread; threads of the server usually have 8 MiB."""
MAX_DEATHS: Final = 2
"""The limit of deaths during the trial of a grammar; the same limit applies outside of trials."""
TOO_MUCH: Final = "one that takes less to compile: make it smaller, or nest and combine less"


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """The settings of the child: the tokens that are not text, by id, and its limits."""

    vocab_size: int
    special_tokens: Mapping[int, str]
    eos_token_ids: Sequence[int]
    limits: GrammarLimits
    budget_s: float = BUDGET_S
    answer_s: float = ANSWER_S


class _Death(Exception):
    """A child has died, or was killed because it was too slow; `in_trial`: after it had begun a trial."""

    def __init__(self, status: int, *, in_trial: bool, was_slow: bool) -> None:
        super().__init__(f"status {status}")
        self.in_trial = in_trial and not was_slow
        self.is_verdict = self.in_trial and status == -signal.SIGPROF


class GrammarTrial:
    """Tries grammars in a child, which the first grammar starts. Threads may share it."""

    def __init__(self, settings: TrialSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._finalizer: weakref.finalize[..., GrammarTrial] | None = None

    def reason(self, grammar: Grammar) -> str:
        """Return the reason why a grammar must not be compiled; empty if it may be. Mutates the child.

        Raises `ExecutionError` if no child lived long enough to decide.
        """
        num_in_trial = num_outside = 0
        with self._lock:
            while True:
                try:
                    return self._try(grammar)
                except _Death as death:
                    num_in_trial += death.in_trial
                    num_outside += not death.in_trial
                    if death.is_verdict or num_in_trial == MAX_DEATHS:
                        return TOO_MUCH
                    if num_outside == MAX_DEATHS:
                        raise ExecutionError(
                            f"the process that tries grammars was ended ({death}); try again"
                        ) from death

    def close(self) -> None:
        """End the child; the next grammar starts another; may be called twice."""
        with self._lock:
            self._end()

    def _try(self, grammar: Grammar) -> str:
        """Return the child's verdict; raises `_Death`, and then the next trial starts a fresh child."""
        child = self._child or self._start()
        has_begun = False
        patience = _Patience(child, self._settings.answer_s)
        try:
            with patience:
                _write(child, {"kind": grammar.kind, "text": grammar.text})
                has_begun = _read(child) == "begun"
                return str(_read(child))
        except (OSError, ValueError) as error:
            self._end()
            raise _Death(child.returncode, in_trial=has_begun, was_slow=patience.is_over) from error

    def _start(self) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        child = start_python("-m", "quire.compute.grammar.trial_child", **pipes, text=True)
        self._child, self._finalizer = child, weakref.finalize(self, _end, child)
        try:
            with _Patience(child, self._settings.answer_s):
                _write(child, asdict(self._settings))
                _read(child)
        except (OSError, ValueError) as error:
            self._end()
            raise _Death(child.returncode, in_trial=False, was_slow=False) from error
        return child

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._child = self._finalizer = None


class _Patience:
    """Kills a child that has not answered in time; the waiting thread then finds it dead."""

    def __init__(self, child: subprocess.Popen[str], seconds: float) -> None:
        self.is_over = False
        self._child = child
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def _end(self) -> None:
        self.is_over = True
        self._child.kill()

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def _write(child: subprocess.Popen[str], question: Mapping[str, Any]) -> None:
    to_child, _ = _pipes(child)
    to_child.write(json.dumps(question) + "\n")
    to_child.flush()


def _read(child: subprocess.Popen[str]) -> object:
    """Return a line of a child; raises `OSError` or `ValueError` if it is gone."""
    _, from_child = _pipes(child)
    return json.loads(from_child.readline())


def _pipes(child: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    if child.stdin is None or child.stdout is None:
        raise OSError("the process has no pipes")
    return child.stdin, child.stdout


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    for pipe in _pipes(child):
        with contextlib.suppress(OSError):  # unwritten bytes no longer have a reader
            pipe.close()
