"""The processes that make masks: a parent that has read the vocabulary, and workers that it forks.

    engine ── settings, then a connection for each worker ──► parent: the vocabulary, nothing else
                                                                 └── fork ──► worker: texts of one tenant
    engine ◄── jobs and answers, over that connection ──────────────────────────┘

A fork takes a few milliseconds and shares the vocabulary's memory, so a lost worker costs little. A worker ends if a
job takes too much CPU time (a timer, `SIGPROF`) or memory (a limit), or when its connection ends. When the engine's
process ends, the parent and all workers end too.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator

from quire.compute.grammar.compiler import GrammarCompiler
from quire.compute.grammar.limits import GrammarLimits, limit_memory
from quire.compute.grammar.mask_messages import BEGUN, MaskAnswer, MaskJob, take_frames
from quire.compute.grammar.matcher import TextMatcher
from quire.compute.grammar.trial import BUDGET_S
from quire.compute.grammar.vocabulary import Vocabulary
from quire.core.errors import InvalidRequestError

CHUNK_BYTES = 1 << 16
COMPILE_S = 2 * BUDGET_S
"""The limit for a grammar that a trial compiled within `BUDGET_S`, over fewer tokens."""


class MaskMaker:
    """Follows texts and makes their masks."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._matchers: dict[int, TextMatcher] = {}

    def answer(self, job: MaskJob) -> MaskAnswer:
        """Do a job, and return its answer. Mutates the state of its text."""
        signal.setitimer(signal.ITIMER_PROF, COMPILE_S)
        try:
            if job.grammar is not None:
                self._matchers[job.text] = self._compiler.matcher(job.grammar)
        except InvalidRequestError as error:
            signal.setitimer(signal.ITIMER_PROF, 0)
            return MaskAnswer(job.job, 0.0, error.allowed)
        signal.setitimer(signal.ITIMER_PROF, job.limit_s)
        began_s = time.process_time()
        matcher = self._matchers[job.text]
        masks = _masks(matcher, job)
        forced = list[int]()
        if job.most_forced and len(masks) == 1 + len(job.drafts) and not matcher.failure:
            forced, behind = matcher.forced(job.drafts, masks[-1], job.most_forced)
            masks += behind
        signal.setitimer(signal.ITIMER_PROF, 0)
        return MaskAnswer(job.job, time.process_time() - began_s, matcher.failure, b"".join(masks), forced)

    def forget(self, text: int) -> None:
        """Forget a text. Mutates."""
        self._matchers.pop(text, None)


def _masks(matcher: TextMatcher, job: MaskJob) -> list[bytes]:
    if job.tokens:
        matcher.advance(job.tokens)
    if matcher.failure:
        return []
    return [matcher.mask(), *(matcher.masks_behind(job.drafts) if job.drafts else ())]


def work(connection: socket.socket, compiler: GrammarCompiler, failure: str, niceness: int) -> None:
    """Do jobs until the connection ends."""
    os.nice(niceness)
    connection.sendall(MaskAnswer(BEGUN, 0.0, failure).to_bytes())
    maker = MaskMaker(compiler)
    for job in _jobs(connection):
        if job.job == BEGUN:
            maker.forget(job.text)
        else:
            connection.sendall(maker.answer(job).to_bytes())


def _jobs(connection: socket.socket) -> Iterator[MaskJob]:
    received = bytearray()
    while piece := connection.recv(CHUNK_BYTES):
        received += piece
        for frame in take_frames(received):
            yield MaskJob.from_bytes(frame)


def serve(control: socket.socket) -> None:
    """Read the vocabulary, then fork a worker for every connection received, until the engine closes its end."""
    with control.makefile("rb") as lines:
        compiler, failure = _open(lines.readline())
    gc.freeze()
    control.sendall(b"\n")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                control.close()
                _become_worker(connection, compiler, failure, message[0])


def _open(settings: bytes) -> tuple[GrammarCompiler, str]:
    """Return a compiler that has read its vocabulary, and the reason if it cannot work, else an empty text."""
    told = json.loads(settings)
    vocabulary = Vocabulary(
        lambda: told["tokenizer"], vocab_size=told["vocab_size"], eos_token_ids=frozenset(told["eos_token_ids"])
    )
    compiler = GrammarCompiler(vocabulary, limits=GrammarLimits(**told["limits"]))
    try:
        compiler.open()
    except InvalidRequestError as error:
        return compiler, error.allowed
    del told["tokenizer"]
    return compiler, ""


def _become_worker(connection: socket.socket, compiler: GrammarCompiler, failure: str, niceness: int) -> None:
    """Work, and never return to the parent's loop."""
    status = 1
    try:
        limit_memory()
        work(connection, compiler, failure, niceness)
        status = 0
    finally:
        os._exit(status)


def main(descriptor: int) -> None:
    """Serve the engine at the other end of a connection; at its end, end all workers."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):  # SIGCHLD ignored: no zombies
        signal.signal(ignored, signal.SIG_IGN)
    try:
        serve(socket.socket(fileno=descriptor))
    finally:
        os.killpg(0, signal.SIGKILL)  # this process leads its own session: see `mask_service`


if __name__ == "__main__":
    main(int(sys.argv[1]))
