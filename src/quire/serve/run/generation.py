"""Generation: all prompts of one call, from their checks to the last token.

    admitted call ──► prepare all prompts ──────────► deltas ─┐
                      a bad one refuses the call      deltas ─┼──► steps: new output, as it arrives
                      before anything is enqueued     deltas ─┘

A client sees a call as a unit: the whole call is refused, the whole call fails, and if its reader leaves, all its
requests end at once. So the reader of `steps` must close them (`aclosing`); then the engine keeps nothing of the call.
A stream passes each step on; an answer in one piece is the sum of the same steps, so the two cannot differ.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Final, NamedTuple

from quire.core.errors import InvalidRequestError, InvariantError
from quire.core.grammar import CANNOT_HOLD
from quire.core.sampling_params import MAX_LOGPROBS
from quire.engine.door import Ticket
from quire.engine.outputs import CompletionDelta, Logprob, RequestDelta
from quire.engine.text.logprob_list import JoinedList
from quire.engine.text.output_processor import PreparedRequest
from quire.serve.context import GeneratedText, RequestContext
from quire.serve.errors import generation_aborted, generation_failed, grammar_exhausted
from quire.serve.gate import Visit
from quire.serve.model import ServedModel
from quire.serve.run.prompts import ready_prompt
from quire.serve.run.request import GenerationRequest, RefusedPrompt
from quire.serve.services import Services

MAX_LOGPROBS_IN_ANSWER: Final = 1 << 22
"""The most log-probabilities in one answer: each takes about a hundred bytes while it is encoded. One text as long as
the context may always have them."""


class TokenCounts(NamedTuple):
    """Tokens of a call so far: of all its prompts and all its texts."""

    prompt: int
    output: int
    cached: int
    from_disk: int = 0
    from_host: int = 0


class Step(NamedTuple):
    """New output for one prompt of a call."""

    prompt_index: int
    delta: RequestDelta


class Results(NamedTuple):
    """The complete texts of a call, each with the index of its prompt, and its token counts."""

    texts: list[tuple[int, CompletionDelta]]
    counts: TokenCounts


async def prepare(services: Services, context: RequestContext, request: GenerationRequest) -> Generation:
    """Return an admitted call that can run; raises `RefusedPrompt` for a bad prompt, before any is enqueued."""
    visit = context.visit
    if visit is None:
        raise InvariantError("a request was prepared before it was admitted")
    prompts = []
    for index, prompt in enumerate(request.prompts):
        with _refused(index if len(request.prompts) > 1 else None):
            prompts.append(await ready_prompt(services, context, request, prompt))
    scope = context.tenant.scope_for(request.cache_salt)
    priority = context.tenant.priority_for(request.priority)
    ticket = Ticket(context.request_id, scope, priority, request.pooling, context.adapter)
    shown = frozenset[int]() if request.form is None else request.form.shown_token_ids
    prepared = []
    for index, each in enumerate(prompts):
        if index:
            await asyncio.sleep(0)  # let other calls run
        with _refused(index if len(prompts) > 1 else None):
            made = await services.model.prepare(each.prompt, each.sampling, ticket, chat=request.chat)
        prepared.append(replace(made, shown_token_ids=shown))
        services.live.note_call(made.request.request_id, context.request_id)
    visit.correct(sum(len(each.request.prompt_token_ids) for each in prepared))
    return Generation(services, context, visit, request, prepared, [each.text for each in prompts])


@contextmanager
def _refused(prompt_index: int | None = None) -> Iterator[None]:
    """Add the index of the refused prompt to the error."""
    try:
        yield
    except InvalidRequestError as error:
        raise RefusedPrompt(error, prompt_index) from error


class Generation:
    """A call that is ready to run. It can run once."""

    def __init__(
        self,
        services: Services,
        context: RequestContext,
        visit: Visit,
        request: GenerationRequest,
        prepared: Sequence[PreparedRequest],
        prompt_texts: Sequence[str | None],
    ) -> None:
        self.services = services
        self.context = context
        self.request = request
        self.prepared = prepared
        self.prompt_texts = prompt_texts
        """The prompts as texts; None for a prompt of token ids, or one that was cut."""
        self.created_s = int(time.time())
        """The Unix time at which the call was prepared."""
        self.prompt_logprobs: dict[int, Sequence[dict[int, Logprob] | None]] = {}
        """Log-probabilities of prompts, by prompt index, once known."""
        self.first_token_s = context.arrival_s
        """The clock's time of the first token."""
        self._visit = visit
        self._text = GeneratedText(
            request.chat is not None, services.model_names[0], request.sampling, services.clock.now()
        )
        self._known: list[RequestDelta | None] = [None] * len(prepared)
        self._seen_s = [context.arrival_s] * len(prepared)
        self._reasons: list[str] = []
        self._left = "abort"  # finish reason for texts whose reader left

    @property
    def num_choices(self) -> int:
        """The number of returned texts."""
        return sum(each.wanted.n for each in self.prepared)

    @property
    def counts(self) -> TokenCounts:
        """The call's tokens so far, as reported to the client."""
        known = [delta for delta in self._known if delta is not None]
        return TokenCounts(
            sum(len(each.request.prompt_token_ids) for each in self.prepared),
            0 if self.request.prompts_only else sum(delta.num_generated_tokens for delta in known),
            sum(delta.num_cached_tokens for delta in known),
            sum(delta.num_disk_tokens for delta in known),
            sum(delta.num_host_tokens for delta in known),
        )

    def require_few_logprobs(self, *, streams: bool) -> None:
        """Raise `RefusedPrompt` if an answer may have too many log-probabilities. Does not mutate.

        In a stream only those of the prompts are in one event.
        """
        context, sampling = self.services.model.limits.max_model_len, self.request.sampling
        most = max(MAX_LOGPROBS_IN_ANSWER, context * (1 + MAX_LOGPROBS))
        count = 0
        for each in self.prepared:
            num_prompt, wanted = len(each.request.prompt_token_ids), each.wanted
            if wanted.prompt_logprobs is not None:
                count += num_prompt * (1 + wanted.prompt_logprobs) * (1 if self.request.chat else wanted.n)
            if wanted.logprobs is not None and not streams:
                num_tokens = min(wanted.max_tokens or context, context - num_prompt)
                count += num_tokens * (1 + wanted.logprobs) * wanted.num_sequences
        if count > most:
            field = "prompt_logprobs" if sampling.logprobs is None else "logprobs"
            allowed = f"at most {most:,} in one answer: ask for fewer texts, tokens or likeliest tokens"
            raise RefusedPrompt(InvalidRequestError(field, f"a request for up to {count:,}", allowed))

    def index_of(self, prompt_index: int, output: CompletionDelta) -> int:
        """Return a text's index among the texts of all prompts. Does not mutate."""
        return prompt_index * self.prepared[prompt_index].wanted.n + output.index

    async def steps(self) -> AsyncGenerator[Sequence[Step], None]:
        """Run the call; yield new output as it arrives. A reader that leaves early must close the iterator.

        Raises `ApiError` if a text fails, or is aborted other than by its reader.
        """
        with self._visit as visit:
            try:
                async with aclosing(self._merged()) as merged:
                    async for steps in merged:
                        self._take_in(steps, visit)
                        yield steps
            except Exception:
                self._left = "error"
                raise
            finally:
                self._tell()

    async def collect(self) -> Results:
        """Run the call to its end; return its texts in order."""
        parts: list[tuple[int, list[CompletionDelta]]] = [
            (index, []) for index, each in enumerate(self.prepared) for _ in range(each.wanted.n)
        ]
        async with aclosing(self.steps()) as all_steps:
            async for steps in all_steps:
                for prompt_index, delta in steps:
                    for output in delta.outputs:
                        parts[self.index_of(prompt_index, output)][1].append(output)
        return Results([(prompt_index, joined(each)) for prompt_index, each in parts], self.counts)

    async def vectors(self) -> list[bytes]:
        """Run the call to its end; return the vector of each prompt."""
        found = [b""] * len(self.prepared)
        async with aclosing(self.steps()) as all_steps:
            async for steps in all_steps:
                for prompt_index, delta in steps:
                    found[prompt_index] = delta.vector
        return found

    async def _merged(self) -> AsyncGenerator[Sequence[Step], None]:
        """Yield the deltas of all prompts, those of one engine step together."""
        model = self.services.model
        if len(self.prepared) == 1:  # the usual call needs no extra task
            async with aclosing(model.deltas(self.prepared[0])) as deltas:
                async for delta in deltas:
                    yield (Step(0, delta),)
            return
        inbox = _Inbox()
        tasks = [asyncio.create_task(inbox.fill(index, model, each)) for index, each in enumerate(self.prepared)]
        try:
            while steps := await inbox.take(tasks):
                yield steps
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take_in(self, steps: Sequence[Step], visit: Visit) -> None:
        """Keep the new state of each prompt, and count. Mutates."""
        now = self.services.clock.now()
        for index, delta in steps:
            self._count(self._known[index], delta, now - self._seen_s[index])
            self._seen_s[index] = now
            self._known[index] = delta
            if delta.prompt_logprobs is not None:
                self.prompt_logprobs[index] = delta.prompt_logprobs
            for output in delta.outputs:
                if output.finish_reason is not None:
                    self._finish(output, now)
        if visit.is_waiting and None not in self._known:
            self._text.first_token_s = now
            visit.begin()

    def _count(self, known: RequestDelta | None, delta: RequestDelta, seconds: float) -> None:
        """Count a delta's tokens, and the time since the previous delta: `known`, or None for the first. Mutates."""
        metrics, live, tenant = self.services.metrics, self.services.live, self.context.tenant
        num_prompt = num_cached = 0
        num_generated = 0 if self.request.prompts_only else delta.num_generated_tokens
        if known is None:
            self.first_token_s = self.services.clock.now()
            if self._text.started_s is None and delta.waited_s is not None:
                self._text.started_s = self._text.admitted_s + delta.waited_s
            metrics.note_first_token(seconds)
            live.note_first_token(tenant, seconds)
            num_prompt, num_cached = delta.num_prompt_tokens, delta.num_cached_tokens
        else:
            metrics.note_gap(seconds)
            live.note_gap(tenant, seconds)
            num_generated -= 0 if self.request.prompts_only else known.num_generated_tokens
        metrics.note_tokens(num_prompt, num_generated, num_cached)
        live.note_tokens(tenant, num_prompt, num_generated, num_cached)

    def _finish(self, output: CompletionDelta, now: float) -> None:
        """Count a finished text, and raise if it failed. Mutates."""
        reason = output.finish_reason or ""
        self._reasons.append(reason)
        self.services.metrics.note_finish(reason, now - self.context.arrival_s)
        if reason == "error" and output.error.startswith(CANNOT_HOLD):
            raise grammar_exhausted(output.error, self.request.names.get("grammar", "grammar"))
        if reason == "error":
            raise generation_failed(output.error)
        if reason == "abort":
            raise generation_aborted()

    def _tell(self) -> None:
        """Fill in the context for log and trace; unfinished texts count as abandoned. Mutates."""
        counts, context, metrics = self.counts, self.context, self.services.metrics
        for _ in range(self.num_choices - len(self._reasons)):
            self._reasons.append(self._left)
            metrics.note_finish(self._left, self.services.clock.now() - context.arrival_s)
        metrics.note_lengths(counts.prompt, counts.output)
        context.num_prompt_tokens = counts.prompt
        context.num_cached_tokens = counts.cached
        context.num_output_tokens = counts.output
        context.finish_reason = ",".join(sorted(set(self._reasons)))
        self._text.ended_s = self.services.clock.now()
        context.generated = self._text


class _Inbox:
    """Merges the deltas of several prompts for one reader. A slow reader holds back deltas, not generation."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()

    async def fill(self, index: int, model: ServedModel, prepared: PreparedRequest) -> None:
        """Run a prompt and add its deltas, each after the previous one was taken. Mutates."""
        try:
            async with aclosing(model.deltas(prepared)) as deltas:
                async for delta in deltas:
                    self._steps.append(Step(index, delta))
                    taken = self._taken
                    self._changed.set()
                    await taken.wait()
        finally:
            self._changed.set()

    async def take(self, tasks: Sequence[asyncio.Task[None]]) -> list[Step]:
        """Return new steps, or none once all tasks have ended. Raises the error of a failed task. Mutates."""
        while not self._steps:
            for task in tasks:
                if task.done():
                    task.result()
            if all(task.done() for task in tasks):
                return []
            await self._changed.wait()
            self._changed.clear()
        steps, self._steps = self._steps, []
        self._taken.set()
        self._taken = asyncio.Event()
        return steps


def joined(parts: Sequence[CompletionDelta]) -> CompletionDelta:
    """Return a whole text from all its pieces. Does not mutate.

    >>> whole = joined([CompletionDelta(0, "so ", [1]), CompletionDelta(0, "it is", [2, 3], finish_reason="stop")])
    >>> whole.text, whole.token_ids, whole.finish_reason
    ('so it is', [1, 2, 3], 'stop')
    """
    last = parts[-1]
    if len(parts) == 1:
        return last
    logprobs = None if last.logprobs is None else JoinedList([part.logprobs for part in parts if part.logprobs])
    return CompletionDelta(
        index=last.index,
        text="".join([part.text for part in parts]),
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
