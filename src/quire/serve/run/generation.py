"""Generation: all prompts of one call, from the check of the first to the last token of the last.

    admitted call ──► prepare all prompts ──────────► deltas ─┐
                      a bad one refuses the call      deltas ─┼──► steps: what is new, whenever anything is
                      before anything is enqueued     deltas ─┘

A call is one thing to its client: it is refused as a whole, it fails as a whole, and when its reader leaves, all its
parts end at once. So the reader of `steps` must close them (`aclosing`); then nothing of the call is left in the
engine. A stream passes each step on; an answer in one piece is the sum of the same steps, so the two cannot differ.
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
"""Log-probabilities that an answer may have in one piece: some hundred bytes each while it is written. One text as long
as the context may always have them."""


class TokenCounts(NamedTuple):
    """Tokens of a call so far: all its prompts and all its texts together."""

    prompt: int
    output: int
    cached: int
    from_disk: int = 0
    from_host: int = 0


class Step(NamedTuple):
    """What is new of one prompt of a call."""

    prompt_index: int
    delta: RequestDelta


class Results(NamedTuple):
    """The texts of a call that has ended, each whole and with the index of its prompt, and its tokens."""

    texts: list[tuple[int, CompletionDelta]]
    counts: TokenCounts


async def prepare(services: Services, context: RequestContext, request: GenerationRequest) -> Generation:
    """Return an admitted call that can be run; raises `RefusedPrompt` for one that cannot, before any is enqueued."""
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
            await asyncio.sleep(0)  # other calls go on meanwhile
        with _refused(index if len(prompts) > 1 else None):
            made = await services.model.prepare(each.prompt, each.sampling, ticket, chat=request.chat)
        prepared.append(replace(made, shown_token_ids=shown))
        services.live.note_call(made.request.request_id, context.request_id)
    visit.correct(sum(len(each.request.prompt_token_ids) for each in prepared))
    return Generation(services, context, visit, request, prepared, [each.text for each in prompts])


@contextmanager
def _refused(prompt_index: int | None = None) -> Iterator[None]:
    """Say of a refusal which prompt it is about."""
    try:
        yield
    except InvalidRequestError as error:
        raise RefusedPrompt(error, prompt_index) from error


class Generation:
    """A call that can be run, once."""

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
        """The prompts as texts; None for one that came as token ids, or was cut."""
        self.created_s = int(time.time())
        """The time of day at which it was prepared, in seconds as Unix counts them."""
        self.prompt_logprobs: dict[int, Sequence[dict[int, Logprob] | None]] = {}
        """Those of the prompts that they are known of, by the index of the prompt."""
        self.first_token_s = context.arrival_s
        """The time of the clock at which the first token came."""
        self._visit = visit
        self._text = GeneratedText(
            request.chat is not None, services.model_names[0], request.sampling, services.clock.now()
        )
        self._known: list[RequestDelta | None] = [None] * len(prepared)
        self._seen_s = [context.arrival_s] * len(prepared)
        self._reasons: list[str] = []
        self._left = "abort"  # why texts end that are left when nobody reads on

    @property
    def num_choices(self) -> int:
        """How many texts are returned."""
        return sum(each.wanted.n for each in self.prepared)

    @property
    def counts(self) -> TokenCounts:
        """The tokens of the call so far, as the client may know them."""
        known = [delta for delta in self._known if delta is not None]
        return TokenCounts(
            sum(len(each.request.prompt_token_ids) for each in self.prepared),
            0 if self.request.prompts_only else sum(delta.num_generated_tokens for delta in known),
            sum(delta.num_cached_tokens for delta in known),
            sum(delta.num_disk_tokens for delta in known),
            sum(delta.num_host_tokens for delta in known),
        )

    def require_few_logprobs(self, *, streams: bool) -> None:
        """Raise `RefusedPrompt` where an answer may have more log-probabilities than there may be. Does not mutate.

        In a stream only those of prompts come together.
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
        """Return the index that a text has among those of all prompts. Does not mutate."""
        return prompt_index * self.prepared[prompt_index].wanted.n + output.index

    async def steps(self) -> AsyncGenerator[Sequence[Step], None]:
        """Run the call; yield new output as it comes. A reader that leaves early must close the iterator.

        Raises `ApiError` if a text fails or is aborted from elsewhere.
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
        """Run the call to its end; return its texts in their order."""
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
        """The deltas of all prompts. Those of one step of the engine come together."""
        model = self.services.model
        if len(self.prepared) == 1:  # the usual call needs no task but its own
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
        """Keep what is told later, and count. Mutates."""
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
        """Count the tokens of a delta, and the time since the one before it: `known`, or None at the first. Mutates."""
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
        """A text has ended: count it, and raise where it did not end well. Mutates."""
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
        """Tell the log what the call has taken; texts that have not ended were given up. Mutates."""
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
    """Deltas of several prompts on their way to one reader. A slow reader holds the prompts up, not their texts."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()

    async def fill(self, index: int, model: ServedModel, prepared: PreparedRequest) -> None:
        """Run a prompt and put its deltas in, each when the one before it is out. Mutates."""
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
        """Return what is new; nothing once all tasks have ended. Raises what one of them has raised. Mutates."""
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
    """Return the whole of a text from all its pieces. Does not mutate.

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
