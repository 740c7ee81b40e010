"""AsyncLLM from end to end: streams, callers who leave, engines that fail. Every test ends with clean books."""

from __future__ import annotations

import asyncio
import gc
import json
import operator
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.core.errors import ExecutionError, InvalidRequestError, RequestStateError
from quire.core.request import CacheScope
from quire.engine.outputs import RequestOutput
from support.tiny_checkpoint import write_tiny_qwen3
from support.tiny_tokenizer import write_chatml
from support.waiting import run

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)
SYSTEM = [(7 * i) % 120 for i in range(40)]
SETTINGS: dict[str, Any] = {"kv_memory": "1MiB", "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_qwen3(
        tmp_path_factory.mktemp("model"),
        settings={"vocab_size": 384, "eos_token_id": 383, "max_position_embeddings": 600},
    )
    return write_chatml(folder)


@asynccontextmanager
async def running(folder: Path, **settings: Any) -> AsyncIterator[AsyncLLM]:
    """An engine that nobody may leave in disorder."""
    async with AsyncLLM(folder, **(SETTINGS | settings)) as llm:
        yield llm
        await idle(llm)
        llm.engine.scheduler.check()
        assert llm.engine.scheduler.memory.pool.num_in_use == 0


async def idle(llm: AsyncLLM) -> None:
    """Wait until nothing is under way; fail if that takes long."""
    async with asyncio.timeout(300):
        while llm.engine.scheduler.requests:
            await asyncio.sleep(0.001)


async def last(llm: AsyncLLM, prompt: Any, sampling: SamplingParams = GREEDY, **options: Any) -> RequestOutput:
    return [output async for output in llm.generate(prompt, sampling, **options)][-1]


def test_its_counts_are_those_of_an_llm_that_served_the_same(folder: Path) -> None:
    prompts = [SYSTEM, [*SYSTEM, 3], [5] * 40]
    counts = operator.attrgetter(
        "steps_total", "queried_tokens_total", "hit_tokens_total", "num_used_blocks", "num_cached_blocks"
    )
    with LLM(folder, **SETTINGS) as alone:
        for prompt in prompts:
            alone.generate([prompt], GREEDY, use_tqdm=False)
        expected = counts(alone.stats())

    async def test() -> None:
        async with running(folder) as llm:
            for prompt in prompts:
                await last(llm, prompt)
            async with asyncio.timeout(300):
                while llm.stats().steps_total < expected[0]:  # the last ones are told when the engine has nothing to do
                    await asyncio.sleep(0.001)
            assert counts(llm.stats()) == expected

    run(test)


def test_deltas_add_up_to_the_output(folder: Path) -> None:
    samples = SamplingParams(n=3, seed=5, max_tokens=9, logprobs=2, prompt_logprobs=1, stop="a")
    best = SamplingParams(n=2, best_of=4, seed=5, max_tokens=9)
    beams = SamplingParams(n=2, best_of=3, beam_search=True, temperature=0, max_tokens=9)

    async def test() -> None:
        async with running(folder) as llm:
            for wanted in (GREEDY, samples, best, beams):
                expected = await last(llm, "hello", wanted)
                deltas = [delta async for delta in llm.deltas(await llm.prepare("hello", wanted))]
                assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
                for output in expected.outputs:
                    parts = [part for delta in deltas for part in delta.outputs if part.index == output.index]
                    assert "".join(part.text for part in parts) == output.text
                    assert [token for part in parts for token in part.token_ids] == output.token_ids
                    if wanted.logprobs is not None:
                        assert [entry for part in parts for entry in part.logprobs or ()] == output.logprobs
                    assert [part.finish_reason for part in parts if part.finish_reason] == [output.finish_reason]
                    assert parts[-1].stop_reason == output.stop_reason
                told = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
                assert told == ([expected.prompt_logprobs] if wanted.prompt_logprobs is not None else [])
                assert deltas[-1].num_generated_tokens == expected.metrics.num_generated_tokens

    run(test)


def test_snapshots_grow_to_what_the_llm_returns(folder: Path) -> None:
    prompts = [SYSTEM, "hello", [{"role": "user", "content": "hello"}]]
    with LLM(folder, **SETTINGS) as llm:
        expected = [output.outputs for output in llm.generate(prompts, GREEDY)]

    async def test() -> None:
        async with running(folder) as llm:
            texts = [output.outputs[0].text async for output in llm.generate("hello", GREEDY, "mine")]
            assert all(texts[-1].startswith(text) for text in texts)
            outputs = await asyncio.gather(*(last(llm, prompt) for prompt in prompts))
            assert [output.outputs for output in outputs] == expected
            assert (await last(llm, "hello", request_id="mine")).request_id == "mine"

    run(test)


def test_fifty_callers_of_whom_some_leave(folder: Path) -> None:
    chance = random.Random(1)
    plans = [(chance.randrange(1, 60), chance.choice([None, None, 0, 1, 5]), chance.randrange(1, 4)) for _ in range(50)]

    async def test() -> None:
        async with running(folder, max_num_seqs=8, kv_memory="512KiB", swap_space="128KiB") as llm:

            async def call(index: int) -> list[list[int]] | None:
                length, leave_after, n = plans[index]
                sampling = SamplingParams(max_tokens=16, n=n, seed=index, stop="e" if index % 3 else ())
                seen: list[RequestOutput] = []
                async with aclosing(llm.generate([*SYSTEM[:length], index], sampling)) as snapshots:
                    async for output in snapshots:
                        seen.append(output)
                        if leave_after is not None and len(seen) > leave_after:
                            return None
                assert seen[-1].finished
                assert not seen[-1].error
                return [each.token_ids for each in seen[-1].outputs]

            together = await asyncio.gather(*(call(index) for index in range(50)))
            again = await asyncio.gather(*(call(index) for index in range(0, 50, 5)))
            for first, second in zip(together[::5], again, strict=True):
                assert first is None or second is None or first == second  # whatever happens around a request

    run(test)


@pytest.mark.parametrize("way", ["break", "cancel", "raise", "forget"])
def test_whoever_leaves_has_ended_the_request(folder: Path, way: str) -> None:
    async def test() -> None:
        async with running(folder) as llm:

            async def call() -> None:
                async for _ in llm.generate(SYSTEM, ENDLESS):
                    if way == "break":
                        break
                    if way == "raise":
                        raise ZeroDivisionError
                    if way == "forget":
                        return

            task = asyncio.create_task(call())
            if way == "cancel":
                while not llm.engine.scheduler.requests:
                    await asyncio.sleep(0.001)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            gc.collect()
            await idle(llm)
            assert len((await last(llm, SYSTEM)).outputs[0].token_ids) == 12

    run(test)


def test_abort_ends_an_iterator_with_what_there_is(folder: Path) -> None:
    async def test() -> None:
        async with running(folder) as llm:
            outputs = []
            async for output in llm.generate(SYSTEM, ENDLESS, "one"):
                outputs.append(output)
                llm.abort("another")
                if len(output.outputs[0].token_ids) >= 3:
                    llm.abort("one")
            assert outputs[-1].finished
            assert outputs[-1].outputs[0].finish_reason == "abort"

    run(test)


def test_a_slow_reader_misses_snapshots_and_no_text(folder: Path) -> None:
    async def test() -> None:
        async with running(folder) as llm:
            whole = await last(llm, SYSTEM)
            seen = []
            async for output in llm.generate(SYSTEM, GREEDY):
                seen.append(output)
                await idle(llm)
                await asyncio.sleep(0.01)
            assert len(seen) < 12
            assert seen[-1].outputs == whole.outputs

    run(test)


def test_ids_of_callers_may_be_the_same(folder: Path) -> None:
    async def test() -> None:
        async with running(folder) as llm:
            outputs = await asyncio.gather(*(last(llm, [i, i + 1], request_id="same") for i in range(5)))
            for i, output in enumerate(outputs):
                assert output.prompt_token_ids == [i, i + 1]
                assert output.outputs == (await last(llm, [i, i + 1])).outputs

    run(test)


def test_bad_requests_are_refused_and_the_engine_goes_on(folder: Path) -> None:
    async def test() -> None:
        async with running(folder) as llm:
            for prompt, sampling in (("", GREEDY), ([384], GREEDY), ([1] * 700, GREEDY), ([1], SamplingParams(n=0))):
                with pytest.raises(InvalidRequestError):
                    await last(llm, prompt, sampling)
            assert not llm.engine.scheduler.requests
            with pytest.raises(InvalidRequestError, match="maximum context length is 600 tokens"):
                await last(llm, "x" * 20_000)
            assert (await last(llm, [1])).finished

    run(test)


def test_scopes_keep_caches_apart(folder: Path) -> None:
    async def test() -> None:
        async with running(folder) as llm:
            cached = [
                (await last(llm, SYSTEM, scope=CacheScope(salt=salt))).num_cached_tokens for salt in ("a", "b", "a")
            ]
            assert cached == [0, 0, 32]

    run(test)


def test_a_stop_string_frees_the_blocks_of_a_sequence(folder: Path) -> None:
    async def test() -> None:
        async with running(folder) as llm:
            text = (await last(llm, "hello")).outputs[0].text
            output = await last(llm, "hello", SamplingParams(temperature=0.0, ignore_eos=True, stop=text[4:6]))
            assert output.outputs[0].text == text[: text.index(text[4:6])]
            assert output.outputs[0].stop_reason == text[4:6]

    run(test)


def test_an_engine_that_fails_leaves_nobody_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with AsyncLLM(folder, **SETTINGS) as llm:
            schedule, calls = llm.engine.scheduler.schedule, [0]

            def fail() -> Any:
                calls[0] += 1
                if calls[0] > 4:
                    raise ZeroDivisionError("broken")
                return schedule()

            monkeypatch.setattr(llm.engine.scheduler, "schedule", fail)
            results = await asyncio.gather(*(last(llm, [i], ENDLESS) for i in range(5)), return_exceptions=True)
            assert [type(result) for result in results] == [ExecutionError] * 5
            assert "ZeroDivisionError: broken" in str(results[0])
            with pytest.raises(ExecutionError, match="ZeroDivisionError: broken"):
                await last(llm, [1])

    run(test)
    assert "the engine has failed" in caplog.text


def test_a_text_on_which_the_tokenizer_panics_fails_alone(folder: Path, tmp_path: Path) -> None:
    """`Strip` panics on a text that is shorter than what it may strip; a panic is not an `Exception`."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    strip = {"type": "Strip", "content": " ", "start": 0, "stop": 100}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], strip]}
    file.write_text(json.dumps(tokenizer))

    async def test() -> None:
        async with running(tmp_path) as llm:
            good = asyncio.create_task(last(llm, "The memory", replace(ENDLESS, max_tokens=300)))
            space = llm.tokenizer.encode(" ")
            spaces = replace(ENDLESS, max_tokens=20, allowed_token_ids=tuple(space))
            bad = await last(llm, "The memory" + 40 * " ", spaces)
            assert bad.outputs[0].finish_reason == "error"
            assert (
                "the text of this request cannot be decoded: RuntimeError: the tokenizer failed" in bad.outputs[0].error
            )
            assert (await good).outputs[0].finish_reason == "length"

    run(test)


def test_who_leaves_in_the_middle_of_a_prompt_is_gone_within_a_step(folder: Path) -> None:
    async def test() -> None:
        async with running(folder, max_num_batched_tokens=8, max_num_seqs=8) as llm:
            scheduler, num_steps = llm.engine.scheduler, 0
            task = asyncio.create_task(last(llm, [(7 * i) % 120 for i in range(500)]))
            while not any(request.num_computed for request in scheduler.requests.values()):
                await asyncio.sleep(0.0001)
            schedule = scheduler.schedule

            def count() -> Any:
                nonlocal num_steps
                num_steps += 1
                return schedule()

            scheduler.schedule = count  # type: ignore[method-assign]
            task.cancel()
            await idle(llm)
            assert num_steps <= 3  # of some sixty: one that was under way, one before the command is seen

    run(test)


def test_a_mistake_of_ours_in_the_event_loop_leaves_nobody_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with AsyncLLM(folder, **SETTINGS) as llm:
            monkeypatch.setattr(llm._streams._processor, "process", lambda updates: 1 / 0)
            with pytest.raises(ExecutionError, match="ZeroDivisionError"):
                await last(llm, [1])

    run(test)
    assert "cannot be processed" in caplog.text


def test_closing_ends_what_is_under_way(folder: Path) -> None:
    async def test() -> None:
        llm = AsyncLLM(folder, **SETTINGS)
        task = asyncio.create_task(last(llm, SYSTEM, ENDLESS))
        while not llm.engine.scheduler.requests:
            await asyncio.sleep(0.001)
        await llm.close()
        await llm.close()
        with pytest.raises(ExecutionError, match="closed"):
            await task
        with pytest.raises(ExecutionError, match="closed"):
            await last(llm, [1])

    run(test)


def test_one_event_loop_after_another(folder: Path) -> None:
    llm = AsyncLLM(folder, **SETTINGS)
    first = asyncio.run(last(llm, SYSTEM))
    assert asyncio.run(last(llm, SYSTEM)).outputs == first.outputs

    async def test() -> None:
        async with aclosing(llm.generate(SYSTEM, ENDLESS)) as snapshots:
            await anext(snapshots)

            def elsewhere() -> None:
                with pytest.raises(RequestStateError, match="one event loop"):
                    asyncio.run(last(llm, [1]))

            await asyncio.to_thread(elsewhere)
        await llm.close()

    run(test)
