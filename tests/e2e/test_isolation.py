"""One request never hurts another: faults to order in the native engine, with the guide model.

Sixteen requests run together; one of them is at fault, or the machine is. The others must have the very tokens and
log-probabilities that they have where nothing fails, and nothing may be left in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quire import LLM, AsyncLLM, EngineConfig, SamplingParams
from quire.core.errors import ExecutionError, ExecutorLostError, InvalidConfigError
from quire.core.failpoints import FAILPOINTS_VARIABLE
from quire.engine.outputs import RequestOutput
from quire.engine.records.stats import ModelState
from quire.engine.replicas.settings import ReplicaSettings
from quire.engine.replicas.supervised import SupervisedLLM

NUM_REQUESTS = 16
CULPRIT = 6
BAD_TOKEN = 777  # nobody but the culprit computes it: `text` and the tests see to that
SHARED = [(11 * i) % 500 + 20 for i in range(40)]
NUM_TOKENS = 24
SETTINGS: dict[str, Any] = {"kv_memory": "8MiB", "num_threads": 1, "max_num_seqs": NUM_REQUESTS}


def text(number: int) -> list[int]:
    """A prompt, of which others share the beginning; no two are equal."""
    return [*SHARED[: 8 * (number % 6)], *((13 * number + 7 * i) % 600 + 20 for i in range(3 + 5 * (number % 4)))]


PROMPTS = [text(number) for number in range(NUM_REQUESTS)]
BAD_PROMPT = [*PROMPTS[CULPRIT][:-1], BAD_TOKEN, PROMPTS[CULPRIT][-1]]
SAMPLING = [
    SamplingParams(
        temperature=0.8 if number % 2 else 0.0,
        seed=number,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logprobs=2,
        n=3 if number % 5 == 4 else 1,
        logit_bias={BAD_TOKEN: -100.0},
    )
    for number in range(NUM_REQUESTS)
]
SAYS_IT = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, allowed_token_ids=[BAD_TOKEN], ignore_eos=True)


def facts(output: RequestOutput) -> list[Any]:
    """All that a caller sees of the sequences of a request."""
    return [(each.index, each.token_ids, each.text, each.logprobs, each.finish_reason) for each in output.outputs]


@contextmanager
def engine(monkeypatch: pytest.MonkeyPatch, failpoints: str = "", **settings: Any) -> Iterator[LLM]:
    """An engine that must be in order when it is left."""
    monkeypatch.setenv(FAILPOINTS_VARIABLE, failpoints)
    with LLM("guide", **(SETTINGS | settings)) as llm:
        yield llm
        scheduler = llm.engine.scheduler
        scheduler.check()
        assert not scheduler.requests
        assert scheduler.memory.pool.num_in_use == 0


@pytest.fixture(scope="module")
def calm() -> list[list[Any]]:
    """What everybody gets where nothing fails."""
    with LLM("guide", **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, SAMPLING)
    assert not any(BAD_TOKEN in each.token_ids for output in outputs for each in output.outputs)
    return [facts(output) for output in outputs]


def check_others(outputs: list[RequestOutput], calm: list[list[Any]], *culprits: int) -> None:
    for number, (output, expected) in enumerate(zip(outputs, calm, strict=True)):
        if number in culprits:
            assert {each.finish_reason for each in output.outputs} == {"error"}
        else:
            assert facts(output) == expected, f"request {number} has changed"


@pytest.mark.parametrize("settings", [{}, {"max_steps_under_way": 2}, {"enable_prefix_caching": False}], ids=str)
def test_a_prompt_that_no_step_survives_ends_alone(
    calm: list[list[Any]], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    prompts = [*PROMPTS[:CULPRIT], BAD_PROMPT, *PROMPTS[CULPRIT + 1 :]]
    with engine(monkeypatch, f"error:token={BAD_TOKEN}", **settings) as llm:
        outputs = llm.generate(prompts, SAMPLING)
        stats = llm.engine.stats()
    check_others(outputs, calm, CULPRIT)
    assert "RuntimeError" in outputs[CULPRIT].error
    assert (stats.culprits_total, stats.corrupted_requests_total) == (1, 0)
    assert stats.failed_steps_total <= 6


@pytest.mark.parametrize("settings", [{}, {"max_steps_under_way": 2}, {"kv_memory": "1MiB"}], ids=str)
def test_a_text_that_no_step_survives_ends_alone(
    calm: list[list[Any]], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """The culprit writes the token by itself, so the step that fails is a decode of everybody."""
    sampling = [*SAMPLING[:CULPRIT], SAYS_IT, *SAMPLING[CULPRIT + 1 :]]
    with engine(monkeypatch, f"error:token={BAD_TOKEN}", **settings) as llm:
        outputs = llm.generate(PROMPTS, sampling)
    check_others(outputs, calm, CULPRIT)
    assert outputs[CULPRIT].outputs[0].token_ids == [BAD_TOKEN]


def test_numbers_that_are_not_finite_end_their_request_only(
    calm: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = [*SAMPLING[:CULPRIT], SAYS_IT, *SAMPLING[CULPRIT + 1 :]]
    with engine(monkeypatch, f"nan:token={BAD_TOKEN}") as llm:
        outputs = llm.generate(PROMPTS, sampling)
        stats = llm.engine.stats()
    check_others(outputs, calm, CULPRIT)
    assert "not finite" in outputs[CULPRIT].error
    assert (stats.corrupted_requests_total, stats.failed_steps_total) == (1, 0)


@pytest.mark.parametrize("number", [1, 2, 9])
def test_a_failure_that_does_not_come_again_ends_nobody(
    calm: list[list[Any]], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with engine(monkeypatch, f"error:step={number}") as llm:
        outputs = llm.generate(PROMPTS, SAMPLING)
        assert llm.engine.stats().failed_steps_total == 1
    check_others(outputs, calm)


def test_memory_that_falls_short_once_makes_steps_smaller(
    calm: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(monkeypatch, "memory:step=3") as llm:
        outputs = llm.generate(PROMPTS, SAMPLING)
        stats = llm.engine.stats()
    check_others(outputs, calm)
    assert stats.memory_failures_total == 1
    assert stats.max_step_tokens < 512


def test_large_steps_without_memory_are_halved_until_they_fit(
    calm: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(monkeypatch, "memory:tokens=7") as llm:
        outputs = llm.generate(PROMPTS, SAMPLING)
        before = llm.engine.stats()
        check_others(llm.generate(PROMPTS, SAMPLING), calm)
        after = llm.engine.stats()
    check_others(outputs, calm)
    assert 1 <= after.max_step_tokens <= 6
    assert before.memory_failures_total == after.memory_failures_total  # it is remembered


def test_a_request_that_never_has_memory_ends_and_steps_stay_as_large(
    calm: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [*PROMPTS[:CULPRIT], BAD_PROMPT, *PROMPTS[CULPRIT + 1 :]]
    with engine(monkeypatch, f"memory:token={BAD_TOKEN}") as llm:
        outputs = llm.generate(prompts, SAMPLING)
        stats = llm.engine.stats()
    check_others(outputs, calm, CULPRIT)
    assert "MemoryError" in outputs[CULPRIT].error
    assert stats.max_step_tokens == 512


def test_an_engine_whose_every_step_fails_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINTS_VARIABLE, "error:tokens=1")
    with LLM("guide", **SETTINGS) as llm:
        with pytest.raises(ExecutorLostError):
            llm.generate(PROMPTS, SAMPLING)
        with pytest.raises(ExecutionError, match="the engine has failed"):
            llm.generate(PROMPTS[:1], SAMPLING[:1])


def test_streams_of_others_go_on(calm: list[list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINTS_VARIABLE, f"error:token={BAD_TOKEN}")

    async def read(llm: AsyncLLM, number: int) -> RequestOutput:
        prompt, sampling = PROMPTS[number], SAYS_IT if number == CULPRIT else SAMPLING[number]
        await asyncio.sleep(0.002 * number)  # some come while others are tried
        return [output async for output in llm.generate(prompt, sampling)][-1]

    async def test() -> list[RequestOutput]:
        async with AsyncLLM("guide", **SETTINGS) as llm:
            return await asyncio.gather(*(read(llm, number) for number in range(NUM_REQUESTS)))

    check_others(asyncio.run(asyncio.wait_for(test(), 60)), calm, CULPRIT)


def test_in_a_process_of_its_own_the_engine_isolates_as_well(
    calm: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAILPOINTS_VARIABLE, f"error:token={BAD_TOKEN}")

    async def read(llm: SupervisedLLM, number: int) -> list[int]:
        sampling = SAYS_IT if number == CULPRIT else SAMPLING[number]
        deltas = [delta async for delta in llm.deltas(await llm.prepare(PROMPTS[number], sampling))]
        assert deltas[-1].outputs[-1].finish_reason == ("error" if number == CULPRIT else "length")
        return [token for delta in deltas for part in delta.outputs if not part.index for token in part.token_ids]

    async def test() -> list[list[int]]:
        async with SupervisedLLM(EngineConfig(model="guide", **SETTINGS)) as llm:
            texts = await asyncio.gather(*(read(llm, number) for number in range(NUM_REQUESTS)))
            assert llm.stats().restarts_total == 0
            return texts

    texts = asyncio.run(asyncio.wait_for(test(), 60))
    assert texts.pop(CULPRIT) == [BAD_TOKEN]
    assert texts == [facts[0][1] for number, facts in enumerate(calm) if number != CULPRIT]


def test_an_engine_that_gave_up_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINTS_VARIABLE, "error:tokens=1")

    async def read(llm: SupervisedLLM, number: int) -> None:
        prepared = await llm.prepare(PROMPTS[number], SAMPLING[number])
        with pytest.raises(ExecutionError):
            async for delta in llm.deltas(prepared):
                if delta.finished and delta.outputs[-1].finish_reason == "error":
                    raise ExecutionError("it was tried alone")

    async def test() -> None:
        async with SupervisedLLM(
            EngineConfig(model="guide", **SETTINGS), replicas=ReplicaSettings(continue_on="never")
        ) as llm:
            await asyncio.gather(*(read(llm, number) for number in range(NUM_REQUESTS)))
            while llm.state is not ModelState.READY:
                await asyncio.sleep(0.01)
            assert llm.stats().restarts_total == 1

    asyncio.run(asyncio.wait_for(test(), 60))


def test_an_armed_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(monkeypatch, "error:token=3, nan:step=1000000") as llm:
        assert "QUIRE_FAILPOINTS: nan:step=1000000 is armed; steps will fail" in str(llm.report)
    with engine(monkeypatch) as llm:
        assert "armed" not in str(llm.report)


def test_what_is_no_failpoint_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InvalidConfigError,
        match=r"QUIRE_FAILPOINTS is 'sometimes'; allowed: EFFECT:TRIGGER=NUMBER; effects: error, nan,",
    ):
        engine(monkeypatch, "sometimes").__enter__()
