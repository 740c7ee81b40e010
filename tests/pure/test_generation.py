"""A call under way: several prompts at once, calls that fail, clients that leave, and what is counted of each."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.clock import ManualClock
from quire.core.errors import InvalidRequestError, InvariantError
from quire.core.grammar import CANNOT_HOLD
from quire.core.sampling_params import SamplingParams
from quire.core.validate import RequestLimits
from quire.engine.commands import Add
from quire.engine.door import Ticket
from quire.engine.outputs import CompletionDelta, Logprob, RequestDelta
from quire.engine.text.output_processor import PreparedRequest
from quire.serve.config import ServerConfig
from quire.serve.context import RequestContext
from quire.serve.errors import ApiError
from quire.serve.prometheus import render
from quire.serve.run.generation import Generation, Results, Step, TokenCounts, joined, prepare
from quire.serve.run.prompts import truncated
from quire.serve.run.request import GenerationRequest, RefusedPrompt, Truncation
from quire.serve.tenants import ANYBODY
from support.only_model import make_services
from support.prometheus_text import Read, parse
from support.scripted_model import Script, ScriptedModel, delta, ended, generation_of, model_of, spoken


def run(generation: Generation) -> list[list[Step]]:
    async def read() -> list[list[Step]]:
        async with aclosing(generation.steps()) as steps:
            return [list(each) async for each in steps]

    return asyncio.run(read())


def collected(generation: Generation) -> Results:
    return asyncio.run(generation.collect())


def require_left(generation: Generation) -> None:
    """Nothing of the call is left: no request in the model, no place in the gate."""
    assert model_of(generation).num_open == 0
    assert generation.services.gate.num_visits == 0
    generation.services.gate.check()


def metrics_of(generation: Generation) -> dict[str, Read]:
    services = generation.services
    stats = services.model.stats()
    return parse(render(services.metrics.families(services.gate, services.model.state, stats, "guide")).decode())


def finished_by_reason(generation: Generation) -> dict[str, float]:
    samples = metrics_of(generation)["quire_texts_finished_total"].samples
    return {dict(labels)["reason"]: number for (_, labels), number in samples.items() if number}


TEXTS = st.lists(st.text(max_size=4), min_size=1, max_size=5)
"""One text, in pieces."""

CALLS = st.lists(st.lists(TEXTS, min_size=1, max_size=3), min_size=1, max_size=3).filter(
    lambda prompts: len({len(texts) for texts in prompts}) == 1
)
"""The texts of each prompt of a call; as many for each."""


def script_of(texts: Sequence[Sequence[str]], turns: Sequence[int]) -> Script:
    """The pieces of some texts one after another, whose text `turns` say; each ends with its last piece."""
    left = [list(pieces) for pieces in texts]
    script, generated = [], 0
    for turn in itertools.chain(turns, itertools.cycle(range(len(texts)))):
        index = turn % len(texts)
        if left[index]:
            piece = left[index].pop(0)
            generated += 1
            reason = None if left[index] else "stop" if index % 2 else "length"
            script.append(delta(spoken(piece, [generated], index, finish_reason=reason), generated=generated, cached=2))
        if not any(left):
            return script
    raise AssertionError("the turns go on forever")


@given(CALLS, st.lists(st.integers(0, 5), max_size=12))
def test_the_texts_of_all_prompts_come_whole_in_their_order(prompts: list[list[list[str]]], turns: list[int]) -> None:
    n = len(prompts[0])
    generation = generation_of([script_of(texts, turns) for texts in prompts], SamplingParams(n=n))
    results = collected(generation)
    expected = [(p, "".join(text)) for p, texts in enumerate(prompts) for text in texts]
    assert [(p, output.text) for p, output in results.texts] == expected
    assert [output.finish_reason for _, output in results.texts] == ["length", "stop", "length"][:n] * len(prompts)
    num_pieces = sum(len(text) for texts in prompts for text in texts)
    assert results.counts == TokenCounts(3 * len(prompts), num_pieces, 2 * len(prompts))
    context, metrics = generation.context, generation.services.metrics
    told = (context.num_prompt_tokens, context.num_output_tokens, context.num_cached_tokens)
    assert TokenCounts(*told) == results.counts
    assert (metrics.num_prompt_tokens, metrics.num_generated_tokens, metrics.num_cached_tokens) == told
    assert context.finish_reason == ("length" if n == 1 else "length,stop")
    assert sum(finished_by_reason(generation).values()) == n * len(prompts)
    require_left(generation)


@given(CALLS)
def test_each_step_tells_what_is_new_and_holds_up_who_is_ahead(prompts: list[list[list[str]]]) -> None:
    scripts = [script_of(texts, ()) for texts in prompts]
    generation = generation_of(scripts, SamplingParams(n=len(prompts[0])))
    model, seen = model_of(generation), [0] * len(scripts)

    async def read() -> None:
        async with aclosing(generation.steps()) as all_steps:
            async for steps in all_steps:
                for index, each in steps:
                    assert each is scripts[index][seen[index]]
                    seen[index] += 1
                for _ in range(5):  # the reader is slow: no prompt gets more than one step ahead of it
                    await asyncio.sleep(0)
                assert all(given <= known + 1 for given, known in zip(model.given, seen, strict=True))

    asyncio.run(read())
    assert seen == [len(script) for script in scripts]


def test_what_one_step_of_the_engine_yields_comes_together() -> None:
    scripts = [[delta(spoken(letter), generated=1), delta(ended(reason="stop"), generated=1)] for letter in "abc"]
    steps = run(generation_of(scripts))
    assert [[(index, each.outputs[0].text) for index, each in step] for step in steps] == [
        [(0, "a"), (1, "b"), (2, "c")],
        [(0, ""), (1, ""), (2, "")],
    ]


@pytest.mark.parametrize(
    ("last", "status", "code", "message"),
    [
        (
            ended(reason="error", error="the tokenizer is broken"),
            *(500, "generation_failed", "the request failed in the engine: the tokenizer is broken"),
        ),
        (ended(reason="abort"), 500, "aborted", "the request was aborted"),
        (
            ended(reason="error", error=f"{CANNOT_HOLD}: too expensive"),
            *(400, "invalid_value", f"{CANNOT_HOLD}: too expensive; use a simpler one"),
        ),
    ],
)
@pytest.mark.parametrize("num_prompts", [1, 2])
def test_a_text_that_does_not_end_well_ends_its_whole_call(
    last: CompletionDelta, status: int, code: str, message: str, num_prompts: int
) -> None:
    endless = [delta(spoken("x"), generated=i) for i in range(1, 1000)]
    generation = generation_of([[delta(spoken("a"), generated=1), delta(last, generated=1)], endless][:num_prompts])
    with pytest.raises(ApiError) as caught:
        collected(generation)
    error = caught.value
    assert (error.status, error.detail.code, error.detail.message) == (status, code, message)
    assert error.detail.param == ("grammar" if status == 400 else None)
    assert error.headers == ({} if status == 400 else {"x-should-retry": "false"})
    reason = last.finish_reason
    assert generation.context.finish_reason == (f"{reason}" if num_prompts == 1 or reason == "error" else "abort,error")
    assert sum(finished_by_reason(generation).values()) == num_prompts
    require_left(generation)


def test_the_field_that_held_the_text_is_named_as_the_client_named_it() -> None:
    generation = generation_of([[delta(ended(reason="error", error=CANNOT_HOLD))]])
    named = {"grammar": "response_format.json_schema.schema"}
    object.__setattr__(generation.request, "names", named)
    with pytest.raises(ApiError) as caught:
        collected(generation)
    assert caught.value.detail.param == "response_format.json_schema.schema"


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_what_the_engine_raises_reaches_the_reader_as_it_is(num_prompts: int) -> None:
    failure = RuntimeError("the engine is lost")
    endless = [delta(spoken("x"), generated=i) for i in range(1, 1000)]
    generation = generation_of([[delta(spoken("a"), generated=1), failure], endless, endless][:num_prompts])
    with pytest.raises(RuntimeError) as caught:
        collected(generation)
    assert caught.value is failure
    assert generation.context.finish_reason == "error"
    assert finished_by_reason(generation) == {"error": num_prompts}
    require_left(generation)


@given(st.integers(1, 3), st.integers(0, 6))
def test_a_reader_that_leaves_ends_all_that_is_left(num_prompts: int, num_read: int) -> None:
    endless = [delta(spoken("x"), generated=i) for i in range(1, 1000)]
    short = [delta(ended("x", [1]), generated=1)]
    generation = generation_of([short, endless, endless][-num_prompts:])

    async def read() -> None:
        async with aclosing(generation.steps()) as all_steps:
            for _ in range(num_read):
                await anext(all_steps)

    asyncio.run(read())
    require_left_or_unopened(generation, num_read)


def require_left_or_unopened(generation: Generation, num_read: int) -> None:
    """A call of which nothing was read was never opened: its context ends its visit, as that of any call."""
    assert model_of(generation).num_open == 0
    if num_read:
        require_left(generation)
        had_short = generation.num_choices == 3
        assert generation.context.finish_reason == ("abort,stop" if had_short else "abort")
    else:
        assert generation.services.gate.num_visits == 1


def test_a_call_that_is_cancelled_while_it_waits_has_left() -> None:
    generation = generation_of([[delta(spoken("x"), generated=1)] * 3, [delta(spoken("x"), generated=1)] * 3])

    async def cancelled() -> None:
        task = asyncio.create_task(generation.collect())
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert generation.context.finish_reason == "abort"
    require_left(generation)


def test_a_call_waits_until_each_of_its_prompts_has_its_first_token() -> None:
    silent = asyncio.Event()
    first = [delta(spoken("x"), generated=1), delta(spoken("x"), generated=2), delta(ended(), generated=2)]
    generation = generation_of([first, first])
    model, visit = model_of(generation), generation.context.visit
    assert visit is not None

    async def deltas(prepared: PreparedRequest) -> AsyncGenerator[RequestDelta, None]:
        if prepared.request.request_id == "1":
            await silent.wait()
        for each in first:
            yield each

    model.deltas = deltas

    async def read() -> None:
        async with aclosing(generation.steps()) as all_steps:
            for _ in range(2):
                assert [step.prompt_index for step in await anext(all_steps)] == [0]
                assert visit.is_waiting
            silent.set()
            while not any(step.prompt_index == 1 for step in await anext(all_steps)):
                assert visit.is_waiting
            assert not visit.is_waiting
            assert generation.services.gate.num_waiting_sequences == 0

    asyncio.run(read())


def test_times_are_those_between_the_pieces_of_each_prompt() -> None:
    clock = ManualClock()
    generation = generation_of(
        [[delta(spoken("a"), generated=1), delta(spoken("b"), generated=2), delta(ended(), generated=2)]], clock=clock
    )

    async def read() -> None:
        async with aclosing(generation.steps()) as all_steps:
            clock.advance(0.7)
            async for _ in all_steps:
                clock.advance(0.2)

    asyncio.run(read())
    names = ("time_to_first_token", "inter_token_latency", "request_duration")
    sums = [metrics_of(generation)[f"quire_{name}_seconds"].value("_sum") for name in names]
    assert sums == pytest.approx([0.7, 0.4, 1.1])


def test_tokens_of_texts_that_are_not_shown_are_not_counted() -> None:
    entries: Any = [None, {2: Logprob(-1.0, 1, "b")}, {3: Logprob(-2.0, 1, "c")}]
    generation = generation_of([[delta(ended("x", [9]), generated=1, prompt_logprobs=entries)]], prompts_only=True)
    results = collected(generation)
    assert results.counts == TokenCounts(3, 0, 0)
    assert generation.services.metrics.num_generated_tokens == 0
    assert generation.prompt_logprobs == {0: entries}


def test_an_answer_in_one_piece_has_a_bounded_number_of_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.serve.run.generation.MAX_LOGPROBS_IN_ANSWER", 3000)
    monkeypatch.setattr(ScriptedModel, "limits", RequestLimits(10, 64, 64, 4))

    def count(num_prompts: int = 1, streams: bool = False, **wanted: Any) -> str:
        """Return how many there may be; "": few enough. The context has 64 tokens, a prompt three."""
        generation = generation_of([[]] * num_prompts, SamplingParams(**wanted))
        try:
            generation.require_few_logprobs(streams=streams)
        except RefusedPrompt as refused:
            return f"{refused.error.field}: {refused.error.value}"
        return ""

    assert count(n=40, max_tokens=None) == "", "none were asked for"
    assert count(n=3, max_tokens=None, logprobs=20) == f"logprobs: a request for up to {3 * 61 * 21:,}"
    assert count(n=3, max_tokens=None, logprobs=20, streams=True) == ""
    assert count(n=3, max_tokens=40, logprobs=20) == count(n=2, max_tokens=None, logprobs=20) == ""
    assert count(n=1, best_of=3, max_tokens=None, logprobs=20).startswith("logprobs"), "those of all are kept"
    assert count(num_prompts=3, max_tokens=None, logprobs=20).startswith("logprobs")
    for streams in (False, True):
        asked = count(num_prompts=6, n=8, prompt_logprobs=20, max_tokens=1, streams=streams)
        assert asked == f"prompt_logprobs: a request for up to {6 * 8 * 3 * 21:,}", "each text shows its prompt"
    monkeypatch.setattr("quire.serve.run.generation.MAX_LOGPROBS_IN_ANSWER", 0)
    assert count(max_tokens=None, logprobs=20, prompt_logprobs=20) == "", "one text of the whole context may have them"


PIECES = st.lists(st.tuples(st.text(max_size=3), st.lists(st.integers(0, 9), max_size=3)), min_size=1, max_size=6)


@given(PIECES, st.booleans())
def test_joined_pieces_are_what_one_piece_would_have_been(pieces: list[tuple[str, list[int]]], asked: bool) -> None:
    def entries(ids: list[int]) -> list[dict[int, Logprob]] | None:
        return [{each: Logprob(-each, 1, str(each))} for each in ids] if asked else None

    parts = [CompletionDelta(4, text, ids, entries(ids)) for text, ids in pieces[:-1]]
    text, ids = pieces[-1]
    parts.append(CompletionDelta(4, text, ids, entries(ids), "stop", "end", "why"))
    all_ids = [each for _, ids in pieces for each in ids]
    whole = joined(parts)
    expected = CompletionDelta(4, "".join(text for text, _ in pieces), all_ids, entries(all_ids), "stop", "end")
    told = None if whole.logprobs is None else list(whole.logprobs)
    assert (whole.index, whole.text, whole.token_ids, told) == (
        *(expected.index, expected.text, expected.token_ids),
        expected.logprobs,
    )
    assert (whole.finish_reason, whole.stop_reason) == ("stop", "end")


# ---- from admission to a call that can be run -----------------------------------------------------------------------


class PreparingModel(ScriptedModel):
    """Takes prompts of small token ids; anything else it refuses, as the engine would."""

    def __init__(self) -> None:
        super().__init__([])
        self.tickets: list[Ticket] = []

    @property
    def limits(self) -> RequestLimits:
        return RequestLimits(vocab_size=10, max_model_len=20, max_sequence_tokens=20, max_num_seqs=4)

    async def prepare(self, prompt: Any, sampling: SamplingParams, ticket: Ticket, **_: Any) -> PreparedRequest:
        self.tickets.append(ticket)
        for index, token_id in enumerate(prompt):
            if token_id >= 10:
                raise InvalidRequestError(f"prompt[{index}]", token_id, "a token id from 0 to 9")
        return PreparedRequest(Add("0", array("i", prompt), sampling), "shown", None, sampling)


def prepared(prompts: Sequence[Any], **asked: Any) -> Generation:
    services = make_services(PreparingModel(), ServerConfig(), ManualClock())
    visit = services.gate.enter(ANYBODY, len(prompts), 50)
    context = RequestContext("req-7", "", ANYBODY, 0.0, "", services.bodies.open(""), visit)
    request = GenerationRequest(prompts, SamplingParams(max_tokens=5), {}, **asked)
    try:
        return asyncio.run(prepare(services, context, request))
    except RefusedPrompt:
        assert services.gate.num_waiting_tokens == 50, "a call that is refused was counted right"
        raise


def test_what_waits_is_counted_right_once_its_prompts_are_tokens() -> None:
    generation = prepared([[1, 2, 3], [4]], cache_salt="mine", priority=3)
    gate = generation.services.gate
    assert (gate.num_waiting_sequences, gate.num_waiting_tokens) == (2, 4)
    assert [each.request.prompt_token_ids.tolist() for each in generation.prepared] == [[1, 2, 3], [4]]
    assert generation.prompt_texts == [None, None]
    model = generation.services.model
    assert isinstance(model, PreparingModel)
    assert model.tickets == [Ticket("req-7", ANYBODY.scope_for("mine"), 3)] * 2


@pytest.mark.parametrize(
    ("prompts", "prompt_index"),
    [([[1, 10]], None), ([[1, 10], [1]], 0), ([[1], [2], [3, 11]], 2)],
)
def test_a_refusal_says_which_of_several_prompts_it_is_about(
    prompts: list[list[int]], prompt_index: int | None
) -> None:
    with pytest.raises(RefusedPrompt) as caught:
        prepared(prompts)
    assert caught.value.prompt_index == prompt_index
    assert caught.value.error.field == "prompt[1]"
    assert str(caught.value) == str(caught.value.error)


def test_a_call_that_was_not_admitted_is_a_mistake_of_ours() -> None:
    generation = prepared([[1]])
    generation.context.visit = None
    with pytest.raises(InvariantError, match="prepared before it was admitted"):
        asyncio.run(prepare(generation.services, generation.context, generation.request))


@given(st.lists(st.integers(0, 9), max_size=30), st.none() | st.integers(1, 30), st.booleans())
def test_a_prompt_is_cut_at_the_end_that_was_asked_for(ids: list[int], length: int | None, keeps_start: bool) -> None:
    generation = prepared([[1]], truncation=Truncation(length, keeps_start))
    kept = truncated(ids, generation.request, generation.services)
    most = 15 if length is None else length  # of 20 tokens, 5 are for the answer
    assert len(kept) == min(len(ids), most)
    assert kept == (ids[: len(kept)] if keeps_start else ids[len(ids) - len(kept) :])
    object.__setattr__(generation.request, "truncation", None)
    assert truncated(ids, generation.request, generation.services) is ids
