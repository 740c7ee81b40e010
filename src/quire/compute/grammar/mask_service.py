"""MaskService: which tokens may come next, computed by other processes while the steps go on.

    ask ──► job ──► quick worker of the tenant ──► masks                         wait: for so long, not longer
                       └── took more than QUICK_JOB_S, or the grammar has
                           been taking long: ──► dear worker of the tenant

A mask cannot be interrupted: under all limits of llguidance, one of them has taken 14 seconds. So none is made in the
process that computes steps. A process can be ended, and a text can be followed anew by another one, because its state
is a function of its tokens. Every tenant has workers of its own, so that nobody waits for another tenant's grammar, and
within a tenant those that are cheap do not wait for the dear ones, which run at the lowest priority.

A job has a limit of processor time. A worker that exceeds it dies, and the texts that were with it are followed by
others. A text that takes more than `GrammarLimits` grant it in total has failed, and so has one in whose job a dear
worker has died. Time decides only when a mask comes, or that none will: never what is in it.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from quire.compute.grammar.limits import GrammarLimits
from quire.compute.grammar.mask_messages import BEGUN, MaskAnswer, MaskJob, forget_frame
from quire.compute.grammar.mask_worker import HeldText, MaskWorker
from quire.compute.grammar.vocabulary import Vocabulary
from quire.core.clock import Clock, SystemClock
from quire.core.errors import QuireError
from quire.core.grammar import Grammar
from quire.core.python_process import start_python

TOO_DEAR: Final = "it is too expensive to follow; make it smaller or less ambiguous"
NO_WORKER: Final = "the process that makes masks could not be started"
QUICK_JOB_S: Final = 0.1
"""Of processor time, for a job of a quick worker."""
QUICK_GRAMMAR_S: Final = 0.05
QUICK_ANSWER_S: Final = 0.0005
"""What the texts of a grammar may take, in total and for each answer, before it counts as dear."""
DEAR_NICENESS: Final = 19
SILENCE_S: Final = 60.0
"""Of any clock: a worker from which no answer comes for so long is given up."""
START_S: Final = 120.0
MAX_IDLE_WORKERS: Final = 4
MAX_KNOWN_COSTS: Final = 512
MAX_FALSE_STARTS: Final = 2


@dataclass(slots=True)
class Cost:
    """What the texts of a grammar have taken so far."""

    spent_s: float = 0.0
    num_answers: int = 0

    @property
    def is_dear(self) -> bool:
        """Whether it is more than what goes to quick workers may take."""
        return self.spent_s > self._allowed_s

    @property
    def is_cheap(self) -> bool:
        """Whether it is known to be little."""
        return self.num_answers > 0 and self.spent_s <= QUICK_ANSWER_S * self.num_answers

    def note_death(self) -> None:
        """A worker has died in a job: it is dear, until many answers have cost little. Mutates."""
        self.spent_s = max(self.spent_s, self._allowed_s) + QUICK_JOB_S

    @property
    def _allowed_s(self) -> float:
        return QUICK_GRAMMAR_S + QUICK_ANSWER_S * self.num_answers


class MaskService:
    """Makes masks over one vocabulary in processes of its own. Belongs to one thread, `open` and `close` aside."""

    def __init__(
        self, vocabulary: Vocabulary, *, limits: GrammarLimits | None = None, clock: Clock | None = None
    ) -> None:
        self.vocabulary = vocabulary
        self.limits = limits or GrammarLimits()
        self._clock = clock or SystemClock()
        self._parent = WorkerParent(vocabulary, self.limits)
        self._workers: dict[tuple[str, bool], MaskWorker] = {}
        self._costs: OrderedDict[Grammar, Cost] = OrderedDict()
        self._num_texts = 0
        self._num_jobs = 0
        self._num_false_starts = 0

    def open(self) -> None:
        """Have the vocabulary read, which the first mask would wait for. From any thread."""
        self._parent.open()

    def follow(self, grammar: Grammar) -> HeldText:
        """Return a text without tokens that is to be held to a grammar. Mutates."""
        self._num_texts += 1
        return HeldText(grammar, self._num_texts)

    def ask(self, text: HeldText, drafts: Sequence[int] = ()) -> None:
        """Have the masks made of a text as its tokens are now, unless that was asked already. Mutates the text.

        The job goes out with the next `flush`, together with others.
        """
        wanted = len(text.tokens), tuple(drafts)
        if text.failure or text.asked == wanted:
            return
        text.asked, text.drafts, text.masks = wanted, wanted[1], None
        worker = self._worker_for(text)
        is_new = worker is not text.worker
        if is_new:
            self._leave_worker(text)
            text.worker, text.num_sent, text.spent_s = worker, 0, 0.0
            worker.texts.add(text)
        left_s = self.limits.text_s + self.limits.token_s * len(text.tokens) - text.spent_s
        if left_s <= 0:
            text.failure = TOO_DEAR
            return
        limit_s = left_s if worker.is_dear else QUICK_JOB_S
        grammar, new = text.grammar if is_new else None, text.tokens[text.num_sent :]
        self._num_jobs += 1
        text.job, text.num_sent = self._num_jobs, len(text.tokens)
        if not worker.jobs:
            worker.since_s = self._clock.now()
        worker.jobs[text.job] = text
        worker.send(MaskJob(text.job, text.number, limit_s, grammar, new, text.drafts).to_bytes())

    def flush(self) -> None:
        """Send what was asked. Mutates."""
        for worker in self._workers.values():
            worker.flush()

    def is_dear(self, text: HeldText) -> bool:
        """Return whether a text's masks are known to take long. Does not mutate."""
        cost = self._costs.get(text.grammar)
        return cost is not None and cost.is_dear

    def is_cheap(self, text: HeldText) -> bool:
        """Return whether a text's masks are known to take little. Does not mutate."""
        cost = self._costs.get(text.grammar)
        return cost is not None and cost.is_cheap

    def wait(self, texts: Iterable[HeldText], seconds: float, enough: Callable[[list[bool]], bool] = all) -> None:
        """Take answers in until texts have theirs, all or any, and for so long at most. Mutates the texts."""
        awaited, end_s = list(texts), self._clock.now() + seconds
        self.flush()
        self._take_answers(0.0)
        while not enough([not text.is_awaited for text in awaited]):
            left_s = end_s - self._clock.now()
            if left_s <= 0:
                return
            self._take_answers(left_s)

    def drop(self, text: HeldText) -> None:
        """Let a text go. Mutates."""
        self._leave_worker(text)
        text.failure = text.failure or "it was let go"

    def close(self) -> None:
        """End all processes. May be called twice."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._parent.close()

    # ---- workers --------------------------------------------------------------------------------------------------

    def _worker_for(self, text: HeldText) -> MaskWorker:
        key = text.grammar.owner, self.is_dear(text)
        worker = self._workers.get(key)
        if worker is None:
            connection = self._parent.fork(DEAR_NICENESS if key[1] else 0)
            worker = self._workers[key] = MaskWorker(connection, is_dear=key[1], now=self._clock.now())
        return worker

    def _leave_worker(self, text: HeldText) -> None:
        worker, text.worker = text.worker, None
        if worker is None:
            return
        worker.texts.discard(text)
        worker.send(forget_frame(text.number))
        idle = [key for key, each in self._workers.items() if not each.texts and not each.is_busy]
        for key in idle[: max(0, len(idle) - MAX_IDLE_WORKERS)]:
            self._workers.pop(key).close()

    def _take_answers(self, seconds: float) -> None:
        busy = {worker.fileno(): worker for worker in self._workers.values() if worker.is_busy or worker.has_outgoing}
        poll = select.poll()
        for descriptor, worker in busy.items():
            poll.register(descriptor, select.POLLIN | (select.POLLOUT if worker.has_outgoing else 0))
        now = self._clock.now()
        for descriptor, _ in poll.poll(1000 * seconds):
            worker = busy.pop(descriptor)
            worker.flush()
            answers, is_alive = worker.receive()
            for answer in answers:
                self._note(worker, answer)
            if not is_alive:
                self._bury(worker)
        for worker in busy.values():
            if worker.is_busy and now - worker.since_s > (SILENCE_S if worker.has_begun else START_S):
                self._bury(worker)

    def _note(self, worker: MaskWorker, answer: MaskAnswer) -> None:
        worker.since_s = self._clock.now()
        if answer.job == BEGUN:
            worker.has_begun, self._num_false_starts = True, 0
            for text in worker.texts if answer.failure else ():
                text.failure = answer.failure
            return
        text = worker.jobs.pop(answer.job)
        text.spent_s += answer.spent_s
        cost = self._cost(text.grammar)
        cost.spent_s += answer.spent_s
        cost.num_answers += 1
        if text.job == answer.job and text.worker is worker:  # nothing else was asked meanwhile
            size = 4 * self.vocabulary.num_words
            text.masks = [answer.masks[at : at + size] for at in range(0, len(answer.masks), size)]
            text.failure = text.failure or answer.failure

    def _bury(self, worker: MaskWorker) -> None:
        """A worker is gone: its texts are followed by another one, but for one that was too much for a dear worker."""
        self._workers = {key: each for key, each in self._workers.items() if each is not worker}
        worker.close()
        texts, culprit = list(worker.texts), next(iter(worker.jobs.values()), None)
        worker.texts.clear()
        if not worker.has_begun:
            self._num_false_starts += 1
        elif culprit is not None:
            self._cost(culprit.grammar).note_death()
            if worker.is_dear:
                culprit.failure = culprit.failure or TOO_DEAR
        for text in texts:
            text.worker = None
            if self._num_false_starts >= MAX_FALSE_STARTS:
                text.failure = text.failure or self._parent.failure or NO_WORKER
            if text.is_awaited:
                text.asked = None
                self.ask(text, text.drafts)

    def _cost(self, grammar: Grammar) -> Cost:
        cost = self._costs.setdefault(grammar, Cost())
        self._costs.move_to_end(grammar)
        if len(self._costs) > MAX_KNOWN_COSTS:
            self._costs.popitem(last=False)
        return cost


class WorkerParent:
    """The process that has read the vocabulary and forks workers; see `mask_child`.

    It is started, and spoken to, in a thread of its own: that waits for the vocabulary, and nobody waits for it.
    """

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits) -> None:
        self.failure = ""
        self._vocabulary = vocabulary
        self._limits = limits
        self._control: socket.socket | None = None
        self._finalizer: weakref.finalize[..., WorkerParent] | None = None
        self._thread = ThreadPoolExecutor(1, "quire-mask-workers")  # it starts with the first job

    def open(self) -> None:
        """Have the process started. From any thread."""
        self._thread.submit(self._start)

    def fork(self, niceness: int) -> socket.socket:
        """Return the connection to a worker that is to be; at its end if there is none. Does not wait."""
        ours, theirs = socket.socketpair()
        forking = self._thread.submit(self._fork, theirs, niceness)
        forking.add_done_callback(lambda _: theirs.close())  # and where it was cancelled
        return ours

    def close(self) -> None:
        """End the process and its workers. May be called twice."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._finalizer is not None:
            self._finalizer()

    def _fork(self, theirs: socket.socket, niceness: int) -> None:
        try:
            if self._control is not None:
                with suppress(OSError):  # it was ended from outside: start another one
                    socket.send_fds(self._control, [bytes([niceness])], [theirs.fileno()])
                    return
            socket.send_fds(self._start(), [bytes([niceness])], [theirs.fileno()])
        except (OSError, QuireError) as error:
            self.failure, self._control = f"{NO_WORKER}: {error}", None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            child, descriptor = "quire.compute.grammar.mask_child", theirs.fileno()
            process = start_python(
                "-m", child, str(descriptor), **silent, pass_fds=[descriptor], start_new_session=True
            )
        if self._finalizer is not None:
            self._finalizer()
        self._finalizer = weakref.finalize(self, _end, process, ours)
        settings = {
            "tokenizer": self._vocabulary.read(),
            "vocab_size": self._vocabulary.vocab_size,
            "eos_token_ids": sorted(self._vocabulary.eos_token_ids),
            "limits": asdict(self._limits),
        }
        ours.settimeout(START_S)
        ours.sendall(json.dumps(settings).encode() + b"\n")
        if ours.recv(1) != b"\n":
            raise OSError("it has ended")
        self._control = ours
        return ours


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()  # at which it ends its workers, and itself
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
