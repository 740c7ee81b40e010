"""OutputProcessor: turns the updates of sequences into a caller's outputs. All work on generated text is done here.

    SequenceUpdate ──► tokens ──► IncrementalDetokenizer ──► StopStrings ──► text
                                                                 └── found: send `Stop` for the sequence

It runs on the door's side of the `EngineClient`. A failure in the text of one request (such as a broken tokenizer) ends
that request with an error and affects no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from quire.core.clock import Clock
from quire.core.grammar import CANNOT_HOLD, Grammar
from quire.core.logprobs import TokenLogprobs
from quire.core.pooling import vector_numbers
from quire.core.request import FinishReason
from quire.core.sampling_params import SamplingParams
from quire.engine.client import EngineLink, SequenceUpdate
from quire.engine.commands import Abort, Add, Fail, Stop
from quire.engine.outputs import (
    CompletionDelta,
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    RequestDelta,
    RequestMetrics,
    RequestOutput,
)
from quire.engine.text.detokenizer import IncrementalDetokenizer
from quire.engine.text.logprob_list import LogprobList
from quire.engine.text.stop_strings import StopStrings
from quire.engine.text.tokenizer import Tokenizer

Condemn = Callable[[Grammar], None]


class SequenceText:
    """The output of one sequence so far."""

    def __init__(self, index: int, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> None:
        wanted = prepared.wanted
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error = ""
        self.cumulative_logprob = 0.0
        self._pieces: list[str] = []
        self._entries: list[TokenLogprobs] = []  # of the tokens in no delta so far
        self._shown: list[dict[int, Logprob]] = []  # those entries that an output has shown
        self._num_taken = 0  # tokens in earlier deltas
        self._num_taken_pieces = 0
        self._is_told = False  # a delta has reported its end
        self._wanted = wanted
        self._tokenizer = tokenizer
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                prepared.request.prompt_token_ids,
                skip_special_tokens=wanted.skip_special_tokens,
                shown_token_ids=prepared.shown_token_ids,
            )
        self._stops = StopStrings(wanted.stop, wanted.include_stop_str_in_output)

    def extend(self, update: SequenceUpdate) -> None:
        """Add an update; a stop string ends the sequence, and the tokens after it are dropped. Mutates."""
        if update.cumulative_logprob is not None:
            self.cumulative_logprob = update.cumulative_logprob
        ends_by_token = update.finish_reason is FinishReason.STOP
        last = len(update.token_ids) - 1
        for position, token in enumerate(update.token_ids):
            self.token_ids.append(token)
            self._note_logprobs(update.logprobs[position : position + 1])
            shown = not (ends_by_token and position == last) or self._wanted.include_stop_str_in_output
            if shown and self._detokenizer is not None and self._show(self._detokenizer.append([token])):
                return
        if update.finish_reason is not None:
            self._finish(update)

    def fail(self, message: str) -> None:
        """End the sequence with an error. Mutates."""
        self.finish_reason, self.error = FinishReason.ERROR, message

    @property
    def score(self) -> float:
        """The score that ranks the sequences of a request."""
        if not self._wanted.beam_search or not self.token_ids:
            return self.cumulative_logprob
        length: float = len(self.token_ids) ** self._wanted.length_penalty
        return self.cumulative_logprob / length

    def output(self) -> CompletionOutput:
        """Return the sequence in the caller's form, without the log-probabilities of deltas. Does not mutate."""
        asked, is_found = self._wanted.logprobs is not None, self._wanted.beam_search
        return CompletionOutput(
            index=self.index,
            text="".join(self._pieces),
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob if asked or is_found else None,
            logprobs=self._shown_logprobs() if asked else None,
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
            error=self.error,
            score=self.score if is_found else None,
        )

    def take_delta(self) -> CompletionDelta | None:
        """Return the new output since the last call; None if nothing is new. Mutates."""
        tokens, pieces = self.token_ids[self._num_taken :], self._pieces[self._num_taken_pieces :]
        text = "".join(pieces)
        if self._is_told or (self.finish_reason is None and not tokens and not text):
            return None
        asked = self._wanted.logprobs is not None
        delta = CompletionDelta(
            index=self.index,
            text=text,
            token_ids=tokens,
            logprobs=LogprobList(tokens, self._entries, self._tokenizer) if asked else None,
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
            error=self.error,
        )
        self._entries, self._shown = [], []
        self._num_taken += len(tokens)
        self._num_taken_pieces += len(pieces)
        self._is_told = self.finish_reason is not None
        return delta

    def _show(self, text: str) -> bool:
        """Add text; return whether a stop string ends the sequence, which needs more than `min_tokens` tokens."""
        self._pieces.append(self._stops.push(text, may_end=len(self.token_ids) > self._wanted.min_tokens))
        if self._stops.matched is None:
            return False
        self.finish_reason, self.stop_reason = FinishReason.STOP, self._stops.matched
        return True

    def _finish(self, update: SequenceUpdate) -> None:
        if self._detokenizer is not None and self._show(self._detokenizer.finish()):
            return
        self._pieces.append(self._stops.finish())
        self.finish_reason, self.error = update.finish_reason, update.error
        if self.token_ids and update.finish_reason is FinishReason.STOP:
            token = self.token_ids[-1]
            self.stop_reason = token if token in self._wanted.stop_token_ids else None

    def _note_logprobs(self, entries: list[TokenLogprobs]) -> None:
        for entry in entries:
            self.cumulative_logprob += entry.logprob
            if self._wanted.logprobs is not None:
                self._entries.append(entry)

    def _shown_logprobs(self) -> list[dict[int, Logprob]]:
        """Return the log-probabilities; makes only the new ones, because a text is shown again after each token."""
        count = len(self._shown)
        tokens = self.token_ids[self._num_taken + count :]
        self._shown += LogprobList[dict[int, Logprob]](tokens, self._entries[count:], self._tokenizer)
        return list(self._shown)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that the engine can serve, with the caller's own id, prompt text and sampling parameters.

    The special tokens `shown_token_ids` are part of its texts even if special tokens are skipped.
    """

    request: Add
    shown_id: str
    prompt: str | None
    wanted: SamplingParams
    shown_token_ids: frozenset[int] = frozenset()


class RequestText:
    """A running request: its prompt, its sequences, its times."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer | None, now: float) -> None:
        prompt, wanted = prepared.request.prompt_token_ids, prepared.wanted
        self.request_id = prepared.request.request_id
        self.shown_id = prepared.shown_id
        self.num_prompt_tokens = len(prompt)
        self.grammar = prepared.request.sampling.grammar
        self._arrival_s = now
        self._first_token_s: float | None = None
        self._finished_s: float | None = None
        self._num_steps = self._num_before = 0
        self.sequences = [SequenceText(index, prepared, tokenizer) for index in range(wanted.num_sequences)]
        self._prompt = prepared.prompt
        self._prompt_token_ids = prompt
        self._wanted = wanted
        self._tokenizer = tokenizer
        self._prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
        self._has_prompt_logprobs = False
        self.num_cached_tokens = self.num_disk_tokens = self.num_host_tokens = 0
        self.waited_s: float | None = None
        self.vector = b""

    @property
    def finished(self) -> bool:
        """Whether all its sequences have ended."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def metrics(self) -> RequestMetrics:
        """The times so far."""
        return RequestMetrics(
            self._arrival_s, self._first_token_s, self._finished_s, self._num_generated, self._num_steps
        )

    @property
    def _num_generated(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    def note_start(self, update: SequenceUpdate) -> None:
        """Record the facts of a first update. A text that continues in another engine has them already. Mutates."""
        if update.waited_s is not None:
            self.waited_s = update.waited_s
            self.num_cached_tokens, self.num_disk_tokens = update.num_cached_tokens, update.num_disk_tokens
            self.num_host_tokens = update.num_host_tokens

    def note_prompt(self, entries: Sequence[TokenLogprobs]) -> None:
        """Record the log-probabilities of the prompt, whose first token has none. Mutates."""
        if self._wanted.prompt_logprobs is None or self._has_prompt_logprobs:
            return
        self._has_prompt_logprobs = True
        told = [None, *entries[: len(self._prompt_token_ids) - 1]]  # a prompt that failed has fewer entries
        self._prompt_logprobs = LogprobList(self._prompt_token_ids, told, self._tokenizer)

    def note_progress(self, now: float) -> None:
        """Record the times, and count the step if it generated a token. Mutates."""
        num_generated = self._num_generated
        if num_generated > self._num_before:
            self._num_before, self._num_steps = num_generated, self._num_steps + 1
        if self._first_token_s is None and num_generated:
            self._first_token_s = now
        if self.finished:
            self._finished_s = now

    def output(self) -> RequestOutput:
        """Return the output so far; once all `best_of` sequences have ended, the n best. Does not mutate.

        It lacks the log-probabilities of earlier deltas.
        """
        prompt_logprobs = None if self._prompt_logprobs is None else list(self._prompt_logprobs)
        self._prompt_logprobs = prompt_logprobs  # made once
        outputs = [sequence.output() for sequence in self._chosen]
        if self._is_ranked:
            outputs = [replace(output, index=index) for index, output in enumerate(outputs)]
        return RequestOutput(
            request_id=self.shown_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids.tolist(),
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            num_disk_tokens=self.num_disk_tokens,
            num_host_tokens=self.num_host_tokens,
            metrics=self.metrics,
            prompt_logprobs=prompt_logprobs,
        )

    @property
    def _chosen(self) -> list[SequenceText]:
        """The sequences that are returned, the best first once all have ended."""
        if not self._is_ranked:
            return self.sequences
        good_first = sorted(self.sequences, key=lambda text: (bool(text.error), -text.score, text.index))
        return (good_first if self.finished else self.sequences)[: self._wanted.n]

    def embedding(self) -> EmbeddingOutput:
        """Return the vector of a pooled request that has ended. Does not mutate."""
        return EmbeddingOutput(
            request_id=self.shown_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids.tolist(),
            embedding=vector_numbers(self.vector).tolist(),
            num_cached_tokens=self.num_cached_tokens,
            error=self.sequences[0].error,
        )

    def take_delta(self) -> RequestDelta:
        """Return the new output since the last call; if texts are ranked, it comes at the end. Mutates."""
        told = self._chosen if self.finished or not self._is_ranked else []
        deltas = [delta for sequence in told if (delta := sequence.take_delta()) is not None]
        if self._is_ranked:
            deltas = [replace(delta, index=index) for index, delta in enumerate(deltas)]
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return RequestDelta(
            outputs=deltas,
            finished=self.finished,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_disk_tokens=self.num_disk_tokens,
            num_host_tokens=self.num_host_tokens,
            num_generated_tokens=self._num_generated,
            prompt_logprobs=prompt_logprobs,
            waited_s=self.waited_s,
            vector=self.vector,
        )

    @property
    def _is_ranked(self) -> bool:
        """Whether only the best of the generated texts are returned, or in the order of their scores."""
        return len(self.sequences) > self._wanted.n or self._wanted.beam_search


class OutputProcessor:
    """Holds the running requests and turns updates into outputs.

    `condemn` is called with a grammar that could not be enforced.
    """

    def __init__(
        self, link: EngineLink, tokenizer: Tokenizer | None, clock: Clock, condemn: Condemn | None = None
    ) -> None:
        self._link = link
        self._condemn = condemn
        self._tokenizer = tokenizer
        self._clock = clock
        self._requests: dict[str, tuple[RequestText, Callable[[RequestText], None]]] = {}

    def add(self, prepared: PreparedRequest, deliver: Callable[[RequestText], None]) -> RequestText:
        """Add a request; its updates call `deliver`. Mutates."""
        request = RequestText(prepared, self._tokenizer, self._clock.now())
        self._requests[request.request_id] = request, deliver
        return request

    def process(self, updates: Iterable[SequenceUpdate]) -> None:
        """Process updates; deliver each request that advanced, and forget those that ended. Mutates."""
        touched: dict[str, tuple[RequestText, Callable[[RequestText], None]]] = {}
        for update in updates:
            entry = self._requests.get(update.request_id)
            if entry is None or entry[0].sequences[update.branch].finish_reason is not None:
                continue  # already ended here, by an abort or a stop string
            touched[update.request_id] = entry
            entry[0].note_start(update)
            self._extend(entry[0], update)
        now = self._clock.now()
        for request, deliver in touched.values():
            request.note_progress(now)
            if request.finished:
                self._requests.pop(request.request_id, None)
            deliver(request)

    def abort(self, request_id: str) -> None:
        """End a request, here and in the engine, and deliver its output; does nothing if it has ended. Mutates."""
        entry = self._requests.pop(request_id, None)
        if entry is None:
            return
        request, deliver = entry
        self._link.send(Abort(request_id))
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = FinishReason.ABORT
        request.note_progress(self._clock.now())
        deliver(request)

    def _extend(self, request: RequestText, update: SequenceUpdate) -> None:
        sequence = request.sequences[update.branch]
        try:
            if update.prompt_logprobs or request.num_prompt_tokens == 1:
                request.note_prompt(update.prompt_logprobs)
            request.vector = update.vector
            sequence.extend(update)
            if request.grammar is not None and self._condemn is not None and update.error.startswith(CANNOT_HOLD):
                self._condemn(request.grammar)
        except Exception as error:  # a tokenizer can raise anything; other requests go on
            message = f"the text of this request cannot be decoded: {type(error).__name__}: {error}"
            for text in request.sequences:
                if text.finish_reason is None:
                    text.fail(message)
            self._link.send(Fail(request.request_id, message))
            return
        if sequence.finish_reason is not None and update.finish_reason is None:
            self._link.send(Stop(request.request_id, update.branch))
