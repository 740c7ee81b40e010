"""Whole engines over the compiled core: the same tokens and log-probabilities, to the bit, whatever happens around.

Log-probabilities of every token are compared exactly, so that a logit that changed in its last bit shows. Most requests
have penalties, biases or bad words, some ask for the log-probabilities of their prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams, _native
from quire.engine.outputs import Logprob
from support.guesses import Guesser, verify_all_guesses
from support.swaps import noted_swaps
from support.tiny_checkpoint import write_tiny_llama, write_tiny_qwen3
from support.tiny_gemma3n import write_tiny_gemma3n
from support.tiny_gemma4 import write_tiny_gemma4
from support.tiny_lfm2 import write_tiny_lfm3
from support.tiny_recurrent import write_tiny_qwen3_5

SHARED = [(5 * i * i + 3 * i + 1) % 120 for i in range(140)]
WINDOWS = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
LONGEST = 300
MOST_LONGER = 80
LITTLE_MEMORY = {"windows": "150KiB", "recurrent": "500KiB", "convolution": "190KiB", "streams": "150KiB"}
"""Less than all requests need; 400 KiB for the others."""

Entry = list[tuple[int, float, int]]
Text = tuple[list[int], list[Entry], list[Entry]]

RULES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "penalty_window": 20},
    {"presence_penalty": 0.8, "frequency_penalty": 0.5, "prompt_logprobs": 2},
    {"logit_bias": {3: 2.0, 40: -5.0, 41: 1.0}, "repetition_penalty": 0.8},
    {"allowed_token_ids": list(range(0, 120, 3)), "frequency_penalty": 2.0, "min_tokens": 3},
    {"bad_words_ids": [[i] for i in range(0, 60)] + [[i, i + 1] for i in range(60, 110)], "prompt_logprobs": 0},
]


def workload() -> list[tuple[list[int], SamplingParams]]:
    """Return prompts of many lengths, some of them alike for a while, greedy and drawn."""
    chance = random.Random(3)
    found = []
    for index in range(10):
        prompt = SHARED[: chance.choice([0, 16, 64, 100, 140, 140])] + [
            chance.randrange(120) for _ in range(1 + 9 * index)
        ]
        sampling = SamplingParams(
            temperature=chance.choice([0.0, 0.8, 1.5]),
            top_k=chance.choice([0, 5]),
            top_p=chance.choice([1.0, 0.8]),
            seed=1000 + index,
            max_tokens=6 + 2 * index // 3,
            ignore_eos=True,
            logprobs=3,
            **RULES[index % len(RULES)],
        )
        found.append((prompt, sampling))
    return found


WORKLOAD = workload()


def texts_of(outputs: Sequence[RequestOutput]) -> list[Text]:
    """Return everything that was generated, exactly: per sequence its tokens, and per token the log-probabilities.

    Last come the log-probabilities of the prompt.
    """
    found = []
    for output, completion in ((each, completion) for each in outputs for completion in each.outputs):
        assert completion.finish_reason == "length", completion.error
        logprobs = entries_of(completion.logprobs)
        assert len(logprobs) == len(completion.token_ids)
        prompt = entries_of(output.prompt_logprobs)
        assert len(prompt) in (0, len(output.prompt_token_ids))
        found.append((completion.token_ids, logprobs, prompt))
    return found


def entries_of(logprobs: Sequence[dict[int, Logprob] | None] | None) -> list[Entry]:
    return [
        [(token, one.logprob, one.rank) for token, one in sorted((entry or {}).items())] for entry in logprobs or ()
    ]


def run(llm: LLM, workload: Sequence[tuple[list[int], SamplingParams]]) -> list[Text]:
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in workload]
    outputs = llm.generate(prompts, [sampling for _, sampling in workload], use_tqdm=False)
    llm.engine.scheduler.check()
    return texts_of(outputs)


NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "weights": "int8"},
    "int8_kv": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "k8v4": {"dtype": "bfloat16", "kv_dtype": "k8v4"},
    "int4": {"dtype": "bfloat16", "kv_dtype": "int4"},
}
MODELS = ("qwen3", "windows", "llama", "mixed", "recurrent", "convolution", "streams")


def everywhere(*, with_numbers: str = "", **axes: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test with each model, each instruction set and each combination of other values, the numbers last.

    The gate has every combination of the other values, each with one model, and these in turn; where there are none,
    it has each model, for a test that computes `with_numbers`. A model and numbers have the same instruction set in
    every test of the gate, so that few texts are computed alone. `make test-long` has the rest.
    """
    names = ["folder", "instruction_set", *axes]
    values = [MODELS, _native.kernel_names(), *map(tuple, axes.values())]
    found = []
    for indices in product(*(range(len(each)) for each in values)):
        model, instruction_set, *others = indices
        turn = sum(others) % len(MODELS) if axes else model
        numbers = with_numbers or values[-1][others[-1]]
        set_in_turn = (turn + 3 * list(NUMBERS).index(numbers) // 2) % len(values[1])
        marks = () if (model, instruction_set) == (turn, set_in_turn) else pytest.mark.long
        found.append(pytest.param(*(each[index] for each, index in zip(values, indices, strict=True)), marks=marks))
    return pytest.mark.parametrize(names, found, indirect=["folder", "instruction_set"])


WRITERS: dict[str, Any] = {
    **{"llama": write_tiny_llama, "recurrent": write_tiny_qwen3_5, "convolution": write_tiny_lfm3},
    **{"mixed": write_tiny_gemma4, "streams": write_tiny_gemma3n},
}


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.getbasetemp() / request.param
    if folder.exists():
        return folder
    folder.mkdir()
    if request.param in WRITERS:
        return WRITERS[request.param](folder)
    return write_tiny_qwen3(folder, settings=WINDOWS if request.param == "windows" else {})


@pytest.fixture(scope="module")
def instruction_set(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def forced(instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ISA", instruction_set)


ALONE: dict[tuple[Path, str, str, bool], list[Text]] = {}


def make(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, **{"kv_memory": "8MiB", "max_model_len": LONGEST, **settings})


def make_small(folder: Path, **settings: Any) -> LLM:
    """Return an engine whose memory does not hold all requests: their blocks differ in size from model to model."""
    return make(folder, kv_memory=LITTLE_MEMORY.get(folder.name, "400KiB"), **settings)


def longer() -> list[tuple[list[int], SamplingParams]]:
    """Return the requests with so many tokens that they do not fit into little memory together."""
    return [
        (prompt, replace(sampling, max_tokens=min(MOST_LONGER, LONGEST - len(prompt) - 10)))
        for prompt, sampling in WORKLOAD
    ]


def alone(folder: Path, instruction_set: str, numbers: str, *, are_longer: bool = False) -> list[Text]:
    """Return each request's text when nothing else runs, nothing is cached, and its prompt is computed whole."""
    key = folder, instruction_set, numbers, are_longer
    if key not in ALONE:
        with make(folder, **NUMBERS[numbers], num_threads=1, enable_prefix_caching=False) as llm:
            ALONE[key] = [run(llm, [each])[0] for each in (longer() if are_longer else WORKLOAD)]
    return ALONE[key]


SCHEDULES: dict[str, dict[str, Any]] = {
    "one_thread": {"num_threads": 1, "prefix_index": "radix_tree"},
    "blocks_of_32": {"block_size": 32},
    "blocks_of_64": {"block_size": 64},
    "blocks_of_128": {"block_size": 128},
    "small_chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 9},
    "steps_ahead": {"max_num_seqs": 3, "max_steps_under_way": 3},
}
WITH_GUESSES: dict[str, dict[str, Any]] = {
    "guesses": {"speculation": "ngram"},
    "guesses_and_steps_ahead": {"speculation": "ngram", "max_steps_under_way": 3, "max_num_batched_tokens": 40},
}


@everywhere(name=SCHEDULES, numbers=NUMBERS)
def test_any_schedule_is_as_alone(folder: Path, instruction_set: str, name: str, numbers: str) -> None:
    with make(folder, **{"num_threads": 2, **NUMBERS[numbers], **SCHEDULES[name]}) as llm:
        assert run(llm, WORKLOAD) == alone(folder, instruction_set, numbers)


@everywhere(name=WITH_GUESSES, numbers=NUMBERS)
def test_any_schedule_with_guesses_is_as_alone(folder: Path, instruction_set: str, name: str, numbers: str) -> None:
    with make(folder, **{"num_threads": 2, **NUMBERS[numbers], **WITH_GUESSES[name]}) as llm:
        assert run(llm, WORKLOAD) == alone(folder, instruction_set, numbers)


@everywhere(with_numbers="float32")  # `test_native_decoder.py` compares them with the reference on each instruction set
def test_the_numbers_are_part_of_the_comparison(folder: Path) -> None:
    texts = []
    for numbers in NUMBERS.values():
        with make(folder, **numbers) as llm:
            texts.append(run(llm, WORKLOAD[:3]))
    assert all(one != other for index, one in enumerate(texts) for other in texts[:index])


@everywhere(numbers=NUMBERS)
def test_from_the_cache_and_in_any_order_is_as_alone(folder: Path, instruction_set: str, numbers: str) -> None:
    expected = alone(folder, instruction_set, numbers)
    with make(folder, num_threads=2, **NUMBERS[numbers]) as llm:
        assert run(llm, WORKLOAD) == expected
        order = random.Random(1).sample(range(len(WORKLOAD)), len(WORKLOAD))
        again = llm.generate(
            [{"prompt_token_ids": WORKLOAD[i][0]} for i in order], [WORKLOAD[i][1] for i in order], use_tqdm=False
        )
        assert texts_of(again) == [expected[i] for i in order]
        hits = {i: output.num_cached_tokens for i, output in zip(order, again, strict=True)}
        assert any(hits.values())


@everywhere(preemption=["recompute", "swap"], numbers=["bfloat16", "int8"])
def test_preempted_is_as_alone(
    folder: Path, instruction_set: str, preemption: str, numbers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = noted_swaps(monkeypatch)
    settings: dict[str, Any] = NUMBERS[numbers] | ({"swap_space": "4MiB"} if preemption == "swap" else {})
    with make_small(folder, preemption=preemption, **settings) as llm:
        texts = run(llm, longer())
        assert llm.engine.scheduler.num_preemptions > 0
        assert any(swapped) == (preemption == "swap")
    for (tokens, entries, prompt), expected in zip(texts, alone(folder, instruction_set, numbers), strict=True):
        count = len(expected[0])
        assert (tokens[:count], entries[:count], prompt) == expected
    assert texts == alone(folder, instruction_set, numbers, are_longer=True)


WRONG_EACH = {"right": 0, "wrong": 1, "mixed": 4}


@everywhere(guesses=WRONG_EACH, numbers=NUMBERS)
def test_guessed_ahead_is_as_alone(folder: Path, instruction_set: str, guesses: str, numbers: str) -> None:
    """By guesses that are right, wrong, and mixed."""
    expected, wrong_each = alone(folder, instruction_set, numbers), WRONG_EACH[guesses]
    texts = {tuple(prompt): tokens for (prompt, _), (tokens, _, _) in zip(WORKLOAD, expected, strict=True)}
    with make(folder, **NUMBERS[numbers], speculation="ngram", max_num_seqs=5) as llm:
        llm.engine._executor._proposer = Guesser(texts, wrong_each=wrong_each, most=9)
        verify_all_guesses(llm)
        assert run(llm, WORKLOAD) == expected
        drafts = llm.engine.scheduler.drafts
        counts = drafts.counts["ngram"]
        assert sum(counts.verified) > 20
        assert (counts.right == counts.verified) == (wrong_each == 0)
        assert (not any(counts.right)) == (wrong_each == 1)


@everywhere(with_numbers="bfloat16")
def test_guessed_from_earlier_answers_is_as_alone(folder: Path, instruction_set: str) -> None:
    """By the proposers themselves: the second time these texts were answered before."""
    expected = alone(folder, instruction_set, "bfloat16")
    with make(folder, **NUMBERS["bfloat16"], speculation="auto", max_num_seqs=4, block_size=32) as llm:
        verify_all_guesses(llm)
        for _ in range(2):
            assert run(llm, WORKLOAD) == expected
        assert sum(llm.engine.stats().right_guesses["suffix"]) > 20


@everywhere(numbers=["bfloat16"])
def test_guessed_ahead_in_too_little_memory_is_as_alone(folder: Path, instruction_set: str, numbers: str) -> None:
    expected = alone(folder, instruction_set, numbers, are_longer=True)
    texts = {tuple(prompt): tokens for (prompt, _), (tokens, _, _) in zip(WORKLOAD, expected, strict=True)}
    with make_small(folder, **NUMBERS[numbers], speculation="ngram") as llm:
        llm.engine._executor._proposer = Guesser(texts, wrong_each=5, most=9)
        assert run(llm, longer()) == expected
        assert llm.engine.scheduler.num_preemptions > 0
        assert llm.engine.stats().num_right_guesses > 0


@everywhere(with_numbers="bfloat16")
def test_n_sequences_of_one_request_are_n_requests(folder: Path, instruction_set: str) -> None:
    prompt, sampling = WORKLOAD[6][0], replace(WORKLOAD[6][1], temperature=1.2, top_k=0)
    with make(folder, dtype="bfloat16") as llm:
        together = run(llm, [(prompt, replace(sampling, n=4)), WORKLOAD[3]])
    with make(folder, dtype="bfloat16", enable_prefix_caching=False) as llm:
        seed = sampling.seed or 0
        single = [run(llm, [(prompt, replace(sampling, seed=seed + i))])[0] for i in range(4)]
    assert together[:4] == single
    assert len({tuple(tokens) for tokens, _, _ in single}) > 1


@everywhere(with_numbers="float32")
def test_rules_and_reports_are_part_of_the_comparison(folder: Path, instruction_set: str) -> None:
    """What is compared above depends on the rules, and the prompts of those who asked were reported whole."""
    texts = alone(folder, instruction_set, "float32")
    for index, (_, sampling) in enumerate(WORKLOAD):
        assert bool(texts[index][2]) == (sampling.prompt_logprobs is not None)
    plain = [
        (
            prompt,
            SamplingParams(
                seed=each.seed,
                max_tokens=each.max_tokens,
                temperature=each.temperature,
                top_k=each.top_k,
                top_p=each.top_p,
                ignore_eos=True,
                logprobs=3,
            ),
        )
        for prompt, each in WORKLOAD
    ]
    with make(folder, dtype="float32") as llm:
        without = run(llm, plain)
    changed = [without[index][0] != texts[index][0] for index in range(len(WORKLOAD))]
    assert sum(changed) >= 5
    assert not any(changed[:: len(RULES)])
