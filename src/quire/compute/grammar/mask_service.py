"""MaskService: computes the allowed next tokens in other processes, while steps run.

    ask ──► job ──► quick worker of the tenant ──► masks                         wait: with a time limit
                       └── took more than QUICK_JOB_S, or the grammar has
                           been slow: ──► slow worker of the tenant

A mask cannot be interrupted: even under all limits of llguidance, one has taken 14 seconds. So the process of the steps
makes no masks. A worker process can be killed, and another one can follow the text again, because its state depends
only on its tokens. Every tenant has its own workers, so that no tenant waits for another tenant's grammar. Within a
tenant, cheap grammars do not wait for expensive ones (`is_expensive`), which run at the lowest priority.

A job has a limit of CPU time. A worker that exceeds it dies, and other workers follow its texts. A text fails if it
takes more than `GrammarLimits` allow in total, or if slow workers keep dying in its jobs. Time decides only whether and
when a mask arrives, never its content.
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
from contextlib import ExitStack, suppress
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
"""The limit of CPU time for a quick worker's job."""
QUICK_GRAMMAR_S: Final = 0.05
QUICK_ANSWER_S: Final = 0.0005
"""The time that the texts of a grammar may take, in total and per answer, before it counts as expensive."""
DEAR_NICENESS: Final = 19
SILENCE_S: Final = 60.0
"""Wall-clock time: the service gives up on a worker that sends no answer for this long."""
START_S: Final = 120.0
MAX_IDLE_WORKERS: Final = 4
MAX_KNOWN_COSTS: Final = 512
MAX_FALSE_STARTS: Final = 4
MAX_DEATHS: Final = 3
"""Of slow workers in the jobs of a text: something other than its grammar may have killed them."""


@dataclass(slots=True)
class Cost:
    """The time that the texts of a grammar have taken so far."""

    spent_s: float = 0.0
    num_answers: int = 0

    @property
    def is_expensive(self) -> bool:
        """Whether the grammar is too expensive for quick workers."""
        return self.spent_s > self._allowed_s

    @property
    def is_cheap(self) -> bool:
        """Whether the grammar is known to be cheap."""
        return self.num_answers > 0 and self.spent_s <= QUICK_ANSWER_S * self.num_answers

    def note_death(self) -> None:
        """Note that a worker died in a job: the grammar is expensive until many answers were cheap. Mutates."""
        self.spent_s = max(self.spent_s, self._allowed_s) + QUICK_JOB_S

    @property
    def _allowed_s(self) -> float:
        return QUICK_GRAMMAR_S + QUICK_ANSWER_S * self.num_answers


class MaskService:
    """Makes masks over one vocabulary in its own processes. Belongs to one thread, except for `open` and `close`.

    `most_forced`: the most tokens to predict, on request, if a grammar forces them. Each costs a mask, so this is done
    only if masks are known to be cheap: a prediction must not make a text late, or fail it.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        limits: GrammarLimits | None = None,
        clock: Clock | None = None,
        most_forced: int = 0,
    ) -> None:
        self.vocabulary = vocabulary
        self._most_forced = most_forced
        self.limits = limits or GrammarLimits()
        self._clock = clock or SystemClock()
        self._parent = WorkerParent(vocabulary, self.limits)
        self._workers: dict[tuple[str, bool], MaskWorker] = {}
        self._costs: OrderedDict[Grammar, Cost] = OrderedDict()
        self._num_texts = 0
        self._num_jobs = 0
        self._num_false_starts = 0

    @property
    def foresees(self) -> bool:
        """Whether answers include the tokens that a grammar forces."""
        return self._most_forced > 0

    def open(self) -> None:
        """Start to read the vocabulary, so that the first mask need not wait for it. Thread-safe."""
        self._parent.open()

    def follow(self, grammar: Grammar) -> HeldText:
        """Return an empty text that must follow a grammar. Mutates."""
        self._num_texts += 1
        return HeldText(grammar, self._num_texts)

    def ask(self, text: HeldText, drafts: Sequence[int] = (), most_forced: int = 0) -> None:
        """Request the masks of a text with its present tokens, unless already requested. Mutates the text.

        Predicts up to `most_forced` tokens after the drafts that the grammar forces.

        An earlier request with more drafts, beginning with these, suffices. The next `flush` sends the job, together
        with others.
        """
        if text.failure or text.has_asked(drafts):
            return
        text.asked = len(text.tokens), tuple(drafts)
        text.drafts, text.masks = text.asked[1], None
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
        text.limit_s = left_s if worker.is_expensive else QUICK_JOB_S
        grammar, new = text.grammar if is_new else None, text.tokens[text.num_sent :]
        self._num_jobs += 1
        text.job, text.num_sent = self._num_jobs, len(text.tokens)
        if not worker.jobs:
            worker.since_s = self._clock.now()
        worker.jobs[text.job] = text
        most_forced = min(most_forced, self._most_forced) if self.is_cheap(text) else 0
        worker.send(MaskJob(text.job, text.number, text.limit_s, grammar, new, text.drafts, most_forced).to_bytes())

    def flush(self) -> None:
        """Send the jobs. Mutates."""
        for worker in self._workers.values():
            worker.flush()

    def is_expensive(self, text: HeldText) -> bool:
        """Return whether a text's masks are known to be slow. Does not mutate."""
        cost = self._costs.get(text.grammar)
        return cost is not None and cost.is_expensive

    def is_cheap(self, text: HeldText) -> bool:
        """Return whether a text's masks are known to be fast. Does not mutate."""
        cost = self._costs.get(text.grammar)
        return cost is not None and cost.is_cheap

    def wait(self, texts: Iterable[HeldText], seconds: float, enough: Callable[[list[bool]], bool] = all) -> None:
        """Receive answers until enough texts (all or any) have masks, for at most `seconds`. Mutates the texts."""
        awaited, end_s = list(texts), self._clock.now() + seconds
        self.flush()
        self._take_answers(0.0)
        while not enough([not text.is_awaited for text in awaited]):
            left_s = end_s - self._clock.now()
            if left_s <= 0:
                return
            self._take_answers(left_s)

    def drop(self, text: HeldText) -> None:
        """Forget a text. Mutates."""
        self._leave_worker(text)
        text.failure = text.failure or "it was dropped"

    def close(self) -> None:
        """End all processes; may be called twice."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._parent.close()

    # ---- workers --------------------------------------------------------------------------------------------------

    def _worker_for(self, text: HeldText) -> MaskWorker:
        key = text.grammar.owner, self.is_expensive(text)
        worker = self._workers.get(key)
        if worker is None:
            connection = self._parent.fork(DEAR_NICENESS if key[1] else 0)
            worker = self._workers[key] = MaskWorker(connection, is_expensive=key[1], now=self._clock.now())
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
                text.failure, text.is_engine_fault = answer.failure, True
            return
        text = worker.jobs.pop(answer.job)
        text.spent_s += answer.spent_s
        cost = self._cost(text.grammar)
        cost.spent_s += answer.spent_s
        cost.num_answers += 1
        if text.job == answer.job and text.worker is worker:  # the text has no newer request
            size = 4 * self.vocabulary.num_words
            text.masks = [answer.masks[at : at + size] for at in range(0, len(answer.masks), size)]
            text.forced = answer.forced
            if text.asked is not None:  # the answer includes the masks after the forced tokens
                text.asked = text.asked[0], (*text.drafts, *text.forced)
            text.failure = text.failure or answer.failure

    def _bury(self, worker: MaskWorker) -> None:
        """Move the texts of a dead worker to another one, except a text that is too expensive for slow workers."""
        self._workers = {key: each for key, each in self._workers.items() if each is not worker}
        worker.close()
        texts, culprit = list(worker.texts), next(iter(worker.jobs.values()), None)
        worker.texts.clear()
        if not worker.has_begun:
            self._num_false_starts += 1
        elif culprit is not None:
            self._cost(culprit.grammar).note_death()
            if worker.is_expensive:
                culprit.num_deaths += 1
                is_over = self._clock.now() - worker.since_s >= culprit.limit_s
                if is_over or culprit.num_deaths >= MAX_DEATHS:
                    culprit.failure = culprit.failure or TOO_DEAR
        for text in texts:
            text.worker = None
            if self._num_false_starts >= MAX_FALSE_STARTS and not text.failure:
                text.failure, text.is_engine_fault = self._parent.failure or NO_WORKER, True
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

    One thread starts it and communicates with it: only that thread waits for the vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits) -> None:
        self.failure = ""
        self._vocabulary = vocabulary
        self._limits = limits
        self._control: socket.socket | None = None
        self._finalizer: weakref.finalize[..., WorkerParent] | None = None
        self._thread = ThreadPoolExecutor(1, "quire-mask-workers")  # it starts with the first job

    def open(self) -> None:
        """Start the process in the background. Thread-safe."""
        self._thread.submit(self._start)

    def fork(self, niceness: int) -> socket.socket:
        """Return the connection to a future worker; it closes if the fork fails. Does not wait."""
        ours, theirs = socket.socketpair()
        forking = self._thread.submit(self._fork, theirs, niceness)
        forking.add_done_callback(lambda _: theirs.close())  # also if it was cancelled
        return ours

    def close(self) -> None:
        """End the process and its workers; may be called twice."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._finalizer is not None:
            self._finalizer()

    def _fork(self, theirs: socket.socket, niceness: int) -> None:
        try:
            if self._control is not None:
                with suppress(OSError):  # the process was killed: start another one
                    socket.send_fds(self._control, [bytes([niceness])], [theirs.fileno()])
                    return
            socket.send_fds(self._start(), [bytes([niceness])], [theirs.fileno()])
        except (OSError, QuireError) as error:
            self.failure, self._control = f"{NO_WORKER}: {error}", None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as cleanup:
            cleanup.callback(ours.close)
            silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            child, descriptor = "quire.compute.grammar.mask_child", theirs.fileno()
            process = start_python(
                "-m", child, str(descriptor), **silent, pass_fds=[descriptor], start_new_session=True
            )
            cleanup.pop_all()
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
    control.close()  # it then ends its workers and itself
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
