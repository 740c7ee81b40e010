"""Texts held to grammars, over whole engines: what they say, whatever happens around them, and what is refused."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire import (
    LLM,
    AsyncLLM,
    EngineConfig,
    Grammar,
    InvalidRequestError,
    Request,
    RequestOutput,
    SamplingParams,
)
from quire.compute.grammar import GrammarLimits, HeldText, MaskService
from quire.compute.worker.grammar_rows import GrammarRow
from quire.core.clock import SystemClock
from quire.engine.core import EngineCore
from quire.engine.factory import plan_engine
from quire.engine.records.step_log import StepLogWriter, replay
from quire.engine.replicas.supervised import SupervisedLLM
from support.guesses import Guesser, verify_all_guesses
from support.swaps import noted_swaps
from support.tiny_checkpoint import write_tiny_qwen3
from support.tiny_recurrent import write_tiny_qwen3_5
from support.tiny_tokenizer import byte_level, write_chatml

LIBRARY = byte_level()
END = LIBRARY.token_to_id("<|im_end|>")
LONGEST = 400
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["the", "and", "é"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar.json_schema(PERSON),
    Grammar.regex("[a-f]{4,40}(-[0-9]{2}){3}"),
    Grammar.choice(["hello the", "hello and", "你😀"]),
    Grammar.lark('start: ("the" /[a-z]{1,5}/ " "){2,6} "."'),
    None,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"vocab_size": 384, "eos_token_id": END, "max_position_embeddings": 600}
    return write_chatml(write_tiny_qwen3(tmp_path_factory.mktemp("model"), settings=settings))


def make(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"kv_memory": "8MiB", "max_model_len": LONGEST, "num_threads": 1, **settings})


@pytest.fixture(scope="module")
def usual(folder: Path) -> Iterator[LLM]:
    """An engine of the usual settings, for tests that change nothing in it."""
    with make(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def uncached(folder: Path) -> Iterator[LLM]:
    """An engine that computes every prompt again."""
    with make(folder, enable_prefix_caching=False) as llm:
        yield llm


def workload() -> list[tuple[list[int], SamplingParams]]:
    """Return prompts of several lengths, every grammar greedy and drawn, beside texts that have none."""
    found = []
    for index in range(10):
        prompt = [(5 * i * i + 3 * i + index // 3) % 90 for i in range(11 + 13 * index)]  # whole characters
        sampling = SamplingParams(
            temperature=[0.0, 1.0, 1.6][index % 3],
            top_p=0.9,
            seed=100 + index,
            max_tokens=60,
            logprobs=2,
            frequency_penalty=0.5 if index % 4 == 1 else 0.0,
            grammar=GRAMMARS[index % len(GRAMMARS)],
        )
        found.append((prompt, sampling))
    return found


WORKLOAD = workload()
Text = tuple[list[int], str, str | None, list[Any]]


def run(llm: LLM, workload: Sequence[tuple[list[int], SamplingParams]]) -> list[Text]:
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in workload]
    outputs = llm.generate(prompts, [sampling for _, sampling in workload], use_tqdm=False)
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.memory.pool.num_in_use == 0
    return texts_of(outputs)


def texts_of(outputs: Sequence[RequestOutput]) -> list[Text]:
    return [
        (one.token_ids, one.text, one.finish_reason, [sorted(entry.items()) for entry in one.logprobs or ()])
        for output in outputs
        for one in output.outputs
    ]


@pytest.fixture(scope="module")
def alone(uncached: LLM) -> list[Text]:
    """Each request's text when nothing else runs and nothing is cached."""
    return [run(uncached, [each])[0] for each in WORKLOAD]


def require_text_of(grammar: Grammar, text: str) -> None:
    """Fail unless a text is one of the grammar, as something else than llguidance reads it."""
    if grammar.kind == "json_schema":
        person = json.loads(text)
        assert list(person) == ["name", "age", "tags"]
        assert len(person["name"]) <= 12
        assert type(person["age"]) is int and 0 <= person["age"] <= 130
        assert 1 <= len(person["tags"]) <= 3 and set(person["tags"]) <= {"the", "and", "é"}
    else:
        pattern = grammar.text if grammar.kind == "regex" else r"(the[a-z]{1,5} ){2,6}\."
        assert re.fullmatch(pattern, text), text


def test_what_a_grammar_forces_is_guessed_and_changes_no_text(folder: Path, alone: list[Text]) -> None:
    with make(folder, speculation="auto", max_num_seqs=6, block_size=32) as llm:
        verify_all_guesses(llm)
        assert run(llm, WORKLOAD) == alone
        assert run(llm, WORKLOAD) == alone
        stats = llm.engine.stats()
    assert sum(stats.right_guesses["forced"]) > 10
    assert sum(stats.right_guesses["suffix"]) > 10


def test_texts_are_what_their_grammars_say(alone: list[Text]) -> None:
    num_ended = 0
    for (_, sampling), (tokens, text, reason, _) in zip(WORKLOAD, alone, strict=True):
        assert reason in ("stop", "length")
        if sampling.grammar is None:
            continue
        if reason == "stop":
            require_text_of(sampling.grammar, text)
            num_ended += 1
        else:
            assert len(tokens) == 60
    assert num_ended >= 6


SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "two_threads": {"num_threads": 2},
    "small_chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 9},
    "three_at_once": {"max_num_seqs": 3},
    "steps_ahead": {"max_steps_under_way": 3},
    "reference": {"backend": "reference"},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_is_as_alone(folder: Path, alone: list[Text], name: str) -> None:
    with make(folder, **SCHEDULES[name]) as llm:
        found = run(llm, WORKLOAD)
    if name == "reference":  # its logits are others; its texts are held as well
        for (_, sampling), (_, text, reason, _) in zip(WORKLOAD, found, strict=True):
            if sampling.grammar is not None and reason == "stop":
                require_text_of(sampling.grammar, text)
    else:
        assert found == alone


LONG_ONES = [Grammar.regex("[a-z]{300,}"), Grammar.json_schema({"type": "array", "minItems": 300}), None]
LONGER = [(prompt, replace(sampling, grammar=LONG_ONES[i % 3])) for i, (prompt, sampling) in enumerate(WORKLOAD)]


@pytest.fixture(scope="module")
def longer_alone(uncached: LLM) -> list[Text]:
    return [run(uncached, [each])[0] for each in LONGER]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_is_as_alone(
    folder: Path, longer_alone: list[Text], preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = noted_swaps(monkeypatch)
    settings = {"swap_space": "4MiB"} if preemption == "swap" else {}
    with make(folder, kv_memory="400KiB", max_model_len=240, preemption=preemption, **settings) as llm:
        assert run(llm, LONGER) == longer_alone
        assert llm.engine.scheduler.num_preemptions > 0
        assert any(swapped) == (preemption == "swap")


def test_n_sequences_of_one_request_are_n_requests(usual: LLM, uncached: LLM) -> None:
    prompt, sampling = WORKLOAD[5][0], replace(WORKLOAD[5][1], temperature=1.3)
    assert sampling.grammar == GRAMMARS[0]
    together = run(usual, [(prompt, replace(sampling, n=4)), WORKLOAD[3]])
    best = run(usual, [(prompt, replace(sampling, n=2, best_of=4))])
    single = [run(uncached, [(prompt, replace(sampling, seed=(sampling.seed or 0) + i))])[0] for i in range(4)]
    assert together[:4] == single
    assert all(text in [one for _, one, _, _ in single] for _, text, _, _ in best)
    assert len({text for _, text, _, _ in single}) > 1


def test_drafts_change_no_text_and_the_log_can_be_replayed(folder: Path, alone: list[Text]) -> None:
    """Guesses are right for a while, then wrong, and now and then an end where there can be none."""
    right = {tuple(prompt): tokens for (prompt, _), (tokens, *_) in zip(WORKLOAD, alone, strict=True)}
    guesser = Guesser(right, wrong_each=3, wrong=lambda token: END if token % 2 else (token + 1) % 90)
    config = EngineConfig(
        model=str(folder), kv_memory="8MiB", max_model_len=LONGEST, num_threads=1, speculation="ngram"
    )
    log, clock = io.BytesIO(), SystemClock()
    built = plan_engine(config).build(clock)
    built._executor._proposer = guesser
    engine = EngineCore(built.scheduler, built._executor, clock, log=StepLogWriter(log, clock))
    requests = [Request(str(i), prompt, sampling) for i, (prompt, sampling) in enumerate(WORKLOAD)]
    for request in requests:
        engine.add_request(request)
    while engine.scheduler.requests:
        engine.step()
    engine.close()
    assert [request.tokens[request.num_prompt_tokens :].tolist() for request in requests] == [
        tokens for tokens, *_ in alone
    ]
    assert guesser.num_guesses > 50
    assert replay(io.BytesIO(log.getvalue())) > 20


def test_a_guess_counts_only_where_its_mask_was_made(
    folder: Path, alone: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some masks behind guesses are not made, as where a lexer meets a limit while it looks ahead."""
    right = {tuple(prompt): tokens for (prompt, _), (tokens, *_) in zip(WORKLOAD, alone, strict=True)}
    wait, chance, num_lost = MaskService.wait, Random(5), 0

    def wait_and_lose(masks: MaskService, texts: Iterable[HeldText], seconds: float, enough: Any = all) -> None:
        nonlocal num_lost
        awaited = list(texts)
        wait(masks, awaited, 60.0)
        for text in awaited:
            if text.masks and len(text.masks) > 1:
                num_lost += 1
                text.masks = text.masks[: chance.randrange(1, len(text.masks))]

    monkeypatch.setattr(MaskService, "wait", wait_and_lose)
    monkeypatch.setattr(MaskService, "is_cheap", lambda masks, text: True)
    monkeypatch.setattr(GrammarRow, "allowed", lambda row, guesses: guesses)
    with make(folder, speculation="ngram") as llm:
        verify_all_guesses(llm)
        guesser = llm.engine._executor._proposer = Guesser(right)
        assert run(llm, WORKLOAD) == alone
    assert guesser.num_guesses > 50 and num_lost > 20


def test_log_probabilities_are_those_of_the_model(usual: LLM) -> None:
    """The first token's alternatives are those of a text that nothing holds."""
    prompt, sampling = WORKLOAD[0]
    held, free = run(usual, [(prompt, sampling), (prompt, replace(sampling, grammar=None))])
    likeliest = {token: entry.logprob for token, entry in free[3][0]}
    assert likeliest.items() <= {token: entry.logprob for token, entry in held[3][0]}.items()
    assert held[0][0] not in likeliest or held[0][0] == free[0][0]


def test_it_ends_by_length_and_by_stop_strings_too(usual: LLM) -> None:
    endless = SamplingParams(temperature=0.0, max_tokens=7, grammar=Grammar.regex("[a-z]{50,}"))
    tokens, text, reason, _ = run(usual, [([1, 2, 3], endless)])[0]
    assert (len(tokens), reason) == (7, "length")
    stopped = replace(endless, stop=text[2], max_tokens=30)
    assert run(usual, [([1, 2, 3], stopped)])[0][1:3] == (text[: text.index(text[2])], "stop")


def test_leaving_in_the_middle_frees_everything(usual: LLM) -> None:
    endless = SamplingParams(temperature=0.0, n=3, grammar=Grammar.regex("[a-z]{300,}"))
    stream = usual.stream([[1, 2, 3], [4, 5, 6]], endless)
    while len(next(stream).outputs[0].token_ids) < 5:
        pass
    stream.close()
    usual.engine.scheduler.check()
    assert usual.engine.scheduler.memory.pool.num_in_use == 0
    assert run(usual, [WORKLOAD[0]])[0][2] == "stop"


def test_a_text_that_cannot_go_on_fails_alone(folder: Path, alone: list[Text], monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar whose lexer outgrows its limits in the middle of a text."""
    narrow = GrammarLimits(max_states=150)
    monkeypatch.setattr("quire.compute.grammar.mask_service.GrammarLimits", lambda: narrow)
    hungry = Grammar.regex("([a-z]{1,30} ){1,30}([0-9]{5,50}-){9}")
    failing = ([1, 2, 3], SamplingParams(temperature=1.5, seed=1, max_tokens=200, grammar=hungry))
    with make(folder) as llm:
        found = run(llm, [WORKLOAD[2], failing, WORKLOAD[4]])
        assert [found[0], found[2]] == [alone[2], alone[4]]
        assert found[1][2] == "error"
        with pytest.raises(InvalidRequestError, match="this grammar could not be enforced"):
            run(llm, [failing])  # what has failed on the way is refused from then on
    with make(folder) as llm:
        output = llm.generate([{"prompt_token_ids": failing[0]}], failing[1], use_tqdm=False)[0].outputs[0]
    assert "grammar cannot be enforced: lexer error: too many states" in output.error


def test_a_grammar_is_not_to_blame_for_a_process_that_cannot_be_started(
    folder: Path, alone: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    with make(folder) as llm:
        with monkeypatch.context() as patched:
            patched.setattr("quire.compute.grammar.mask_service.start_python", no_process)
            output = llm.generate([{"prompt_token_ids": WORKLOAD[2][0]}], WORKLOAD[2][1], use_tqdm=False)[0].outputs[0]
        assert output.error == "the process that makes masks could not be started: no more processes"
        assert run(llm, [WORKLOAD[2]]) == [alone[2]]


BAD = [
    (Grammar.json_schema({"type": "objec"}), "Invalid type"),
    (Grammar.json_schema({"$ref": "https://example.com/a.json"}), "does not fetch"),
    (Grammar.regex("(a"), "unclosed group"),
    (Grammar.lark("start: b"), "b"),
    (
        Grammar.json_schema({"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(30)]}),
        "less to compile",
    ),
]


def test_what_is_no_grammar_is_refused_at_every_door(folder: Path, usual: LLM) -> None:
    async def refused(llm: AsyncLLM | SupervisedLLM) -> None:
        for grammar, reason in BAD[:-1]:  # the last takes a second of work
            with pytest.raises(InvalidRequestError, match=re.escape(reason)) as caught:
                await llm.prepare("hello", SamplingParams(grammar=grammar))
            assert caught.value.field == "grammar"

    async def test() -> None:
        async with AsyncLLM(folder, kv_memory="1MiB", num_threads=1) as llm:
            await refused(llm)
            assert not llm.engine.scheduler.requests
        async with SupervisedLLM(EngineConfig(model=str(folder), kv_memory="1MiB", num_threads=1)) as supervised:
            await refused(supervised)

    for grammar, reason in BAD:
        with pytest.raises(InvalidRequestError, match=re.escape(reason)):
            usual.generate("hello", SamplingParams(grammar=grammar))
    assert not usual.engine.scheduler.requests
    asyncio.run(test())


def test_an_engine_without_a_tokenizer_has_no_grammars(folder: Path) -> None:
    with (
        make(folder, skip_tokenizer_init=True) as llm,
        pytest.raises(InvalidRequestError, match="none, because this engine has no tokenizer"),
    ):
        llm.generate([[1, 2, 3]], SamplingParams(grammar=Grammar.regex("a")))


def test_every_door_gives_the_same_texts(folder: Path, alone: list[Text]) -> None:
    async def read(llm: AsyncLLM | SupervisedLLM) -> list[str]:
        async def text_of(prompt: list[int], sampling: SamplingParams) -> str:
            prepared = await llm.prepare({"prompt_token_ids": prompt}, sampling)
            return "".join([part.text async for delta in llm.deltas(prepared) for part in delta.outputs])

        return await asyncio.gather(*(text_of(*each) for each in WORKLOAD))

    async def test() -> None:
        expected = [text for _, text, _, _ in alone]
        settings: dict[str, Any] = {"kv_memory": "8MiB", "max_model_len": LONGEST, "num_threads": 1}
        async with AsyncLLM(folder, **settings) as llm:
            assert await read(llm) == expected
        async with SupervisedLLM(EngineConfig(model=str(folder), **settings)) as supervised:
            assert await read(supervised) == expected

    asyncio.run(test())


def test_who_leaves_while_masks_are_awaited_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that never comes: others go on, and the request ends when its client leaves."""
    slow = Grammar.regex("slow[a-z]{200,}")
    ask = MaskService.ask

    def unless_slow(masks: MaskService, text: HeldText, drafts: Sequence[int] = (), **options: int) -> None:
        if text.grammar == slow:
            text.asked = 0, ()
        else:
            ask(masks, text, drafts, **options)

    async def test() -> None:
        monkeypatch.setattr(MaskService, "ask", unless_slow)
        async with AsyncLLM(folder, kv_memory="1MiB", num_threads=1) as llm:
            prepared = await llm.prepare("hello", SamplingParams(temperature=0.0, grammar=slow))
            stream = llm.deltas(prepared)
            first = asyncio.create_task(anext(stream))
            for sampling in (SamplingParams(max_tokens=5), SamplingParams(grammar=Grammar.choice(["the"]))):
                other = await llm.prepare("hello", sampling)
                assert [delta.finished async for delta in llm.deltas(other)][-1]  # nobody else waits
            assert len(llm.engine.scheduler.requests) == 1 and not first.done()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await stream.aclose()
            async with asyncio.timeout(300):
                while llm.engine.scheduler.requests:
                    await asyncio.sleep(0.001)
            llm.engine.scheduler.check()
            assert llm.engine.scheduler.memory.pool.num_in_use == 0

    asyncio.run(test())


@pytest.mark.parametrize(
    ("has_states", "num_steps"),
    [
        (False, 1),
        (True, 2),
        pytest.param(False, 2, marks=pytest.mark.long),
        pytest.param(True, 1, marks=pytest.mark.long),
    ],
)
def test_masks_that_come_late_change_no_text_and_replay(
    folder: Path,
    alone: list[Text],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_states: bool,
    num_steps: int,
) -> None:
    """Every other mask comes a step late, whichever row it is of; the log of that run makes the same plans again.

    A token whose mask is late is computed again, also in layers whose state contained it already.
    """
    if has_states:
        settings: dict[str, Any] = {"vocab_size": 384, "eos_token_id": END, "max_position_embeddings": 600}
        folder = write_chatml(write_tiny_qwen3_5(tmp_path, **settings))
        with make(folder, enable_prefix_caching=False) as llm:
            alone = [run(llm, [each])[0] for each in WORKLOAD]
    wait, chance = MaskService.wait, Random(7)

    def late(masks: MaskService, texts: Iterable[HeldText], seconds: float, enough: Any = all) -> None:
        wait(masks, texts, 60.0)
        for text in texts:
            if text.masks is not None and chance.random() < 0.5:
                text.masks, text.asked = None, None  # as if it had not come: it is asked for anew
                masks.ask(text, text.drafts)

    monkeypatch.setattr(MaskService, "wait", late)
    log = io.BytesIO()
    with make(folder, max_steps_under_way=num_steps) as llm:
        engine = llm.engine
        engine._log = StepLogWriter(log, SystemClock())
        engine._log.begin(engine.scheduler)
        found = run(llm, WORKLOAD)
        num_postponed = engine._num_steps
    assert found == alone
    assert num_postponed > 100
    replay(io.BytesIO(log.getvalue()))


def test_a_mask_process_that_is_killed_changes_no_text(folder: Path, alone: list[Text]) -> None:
    with make(folder) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in WORKLOAD]
        found: list[RequestOutput] = []
        num_masked = num_killed = 0
        for output in llm.stream(prompts, [sampling for _, sampling in WORKLOAD]):
            num_masked += WORKLOAD[int(output.request_id)][1].grammar is not None
            if num_masked in (20, 60, 61):
                num_killed += kill_workers()
            if output.finished:
                found.append(output)
        found.sort(key=lambda output: int(output.request_id))
        assert texts_of(found) == alone and num_killed > 1


def kill_workers() -> int:
    """Kill the processes that make masks for this one, those that a child of it has forked; return their number."""
    found = [
        int(process.name)
        for process in Path("/proc").iterdir()
        if process.name.isdigit() and str(os.getpid()) == parent_of(parent_of(process.name))
    ]
    for process in found:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return len(found)


def parent_of(process: str) -> str:
    try:
        stat = Path("/proc", process, "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "0"
    return stat.rpartition(")")[2].split()[1]


def test_the_guide_answers_in_json() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"term": {"type": "string", "maxLength": 30}},
        "required": ["term"],
    }
    schema["additionalProperties"] = False
    with LLM("guide", kv_memory="4MiB") as llm:
        outputs = llm.generate(
            ["A block is"] * 3, temperature=0.8, seed=4, max_tokens=60, grammar=Grammar.json_schema(schema)
        )
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop"
        assert isinstance(json.loads(output.outputs[0].text)["term"], str)
