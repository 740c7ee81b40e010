"""Requests for engines that guess, and everything that they answer."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire import LLM, RequestOutput, SamplingParams
from quire.core.guesses import Guesses
from support.guesses import verify_all_guesses

Known = dict[tuple[int, ...], list[int]]
LONGEST = 300
SHARED = [(5 * i * i + 3 * i + 1) % 120 for i in range(70)]
RULES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4, "logprobs": 3},
    {"repetition_penalty": 1.4, "penalty_window": 20},
    {"presence_penalty": 0.8, "frequency_penalty": 0.5, "prompt_logprobs": 2},
    {"allowed_token_ids": list(range(0, 120, 3)), "min_tokens": 3},
    {"bad_words_ids": [[i] for i in range(0, 60)] + [[i, i + 1] for i in range(60, 110)]},
]


def workload(longest: int = 40) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts of many lengths, some of them alike for a while, greedy and drawn, with rules and without."""
    chance, found = random.Random(3), []
    for index in range(9):
        prompt = SHARED[: chance.choice([0, 16, 64, 70])] + [chance.randrange(120) for _ in range(1 + 7 * index)]
        sampling = SamplingParams(
            temperature=chance.choice([0.0, 0.8, 1.5]),
            top_p=chance.choice([1.0, 0.8]),
            seed=1000 + index,
            max_tokens=longest - 3 * index,
            ignore_eos=index % 2 == 0,
            **RULES[index % len(RULES)],
        )
        found.append((prompt, sampling))
    return found


WORKLOAD = workload()


def said(outputs: Sequence[RequestOutput]) -> list[object]:
    """Return everything that was answered, exactly."""
    return [
        (each.token_ids, each.logprobs, each.finish_reason, each.stop_reason, output.prompt_logprobs)
        for output in outputs
        for each in output.outputs
    ]


def run(llm: LLM, workload: Sequence[tuple[list[int], SamplingParams]]) -> list[object]:
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in workload]
    outputs = llm.generate(prompts, [sampling for _, sampling in workload], use_tqdm=False)
    llm.engine.scheduler.check()
    return said(outputs)


def make(folder: Path, **settings: Any) -> LLM:
    usual = {"skip_tokenizer_init": True, "kv_memory": "8MiB", "max_model_len": LONGEST}
    llm = LLM(folder, **{**usual, **settings})
    verify_all_guesses(llm)
    return llm


def counts_of(llm: LLM, guesser: str) -> tuple[int, int]:
    """Return how many guesses of a proposer were verified, and how many were right."""
    stats = llm.engine.stats()
    return sum(stats.verified_guesses[guesser]), sum(stats.right_guesses[guesser])


def noted_guesses(llm: LLM) -> Known:
    """Return the guesses that an engine makes from now on, by text; each time the same. Mutates the engine."""
    rows, known = llm.engine._executor._layer, Known()
    follow = rows.follow

    def noted(batch: Any, depths: Mapping[int, int]) -> tuple[dict[int, Guesses], int]:
        guesses, pass_us = follow(batch, depths)
        for row, (_, tokens) in guesses.items():
            before = known.setdefault(tuple(batch.tokens(row)), tokens.tolist())
            assert all(one == other for one, other in zip(before, tokens, strict=False))
        return guesses, pass_us

    rows.follow = noted
    return known


def compare(one: Known, other: Known, least: int) -> None:
    """Assert that two engines guess the same after the same texts, at least this many times."""
    texts = one.keys() & other.keys()
    assert len(texts) >= least
    for text in texts:
        assert all(this == that for this, that in zip(one[text], other[text], strict=False)), text
