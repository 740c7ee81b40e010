"""Beam search in a whole engine: the texts and scores of transformers, and the same bits whatever happens around."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from quire import LLM, RequestOutput, SamplingParams, _native
from support.tiny_checkpoint import write_tiny_qwen3

PROMPTS = [[(7 * i * i + seed) % 110 for i in range(length)] for seed, length in enumerate((3, 21, 40, 16, 1))]
WINDOWS = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
SEARCHES = [
    SamplingParams(beam_search=True, temperature=0.0, n=n, best_of=width, max_tokens=14, min_tokens=shortest, **more)
    for n, width, shortest, more in (
        (2, 2, 0, {"stop_token_ids": (5, 17, 60)}),
        (1, 4, 0, {"length_penalty": 0.0}),
        (5, 6, 0, {"early_stopping": True, "stop_token_ids": tuple(range(0, 110, 3))}),
        (3, 3, 4, {"early_stopping": "never", "stop_token_ids": (5, 17, 60, 61), "length_penalty": -0.5}),
        (2, 3, 0, {"length_penalty": 2.0, "ignore_eos": True}),
    )
]

Found = list[list[tuple[list[int], float | None, float | None, str | None]]]


def found_by(outputs: list[RequestOutput]) -> Found:
    return [
        [(each.token_ids, each.score, each.cumulative_logprob, each.finish_reason) for each in output.outputs]
        for output in outputs
    ]


def search(llm: LLM, jobs: list[tuple[list[int], SamplingParams]]) -> Found:
    outputs = llm.generate([{"prompt_token_ids": p} for p, _ in jobs], [s for _, s in jobs], use_tqdm=False)
    llm.engine.scheduler.check()
    assert not llm.engine.scheduler.memory.memories
    return found_by(outputs)


JOBS = list(zip(PROMPTS, SEARCHES, strict=True))


def make(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, **{"kv_memory": "8MiB", "max_model_len": 128, **settings})


@pytest.fixture(scope="module", params=["qwen3", "windows"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = WINDOWS if request.param == "windows" else {}
    return write_tiny_qwen3(tmp_path_factory.mktemp(request.param), settings=settings)


ALONE: dict[tuple[Path, str], Found] = {}


def alone(folder: Path, instruction_set: str) -> Found:
    if (folder, instruction_set) not in ALONE:
        with make(folder, num_threads=1, enable_prefix_caching=False) as llm:
            ALONE[folder, instruction_set] = [search(llm, [job])[0] for job in JOBS]
    return ALONE[folder, instruction_set]


SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "one_thread": {"num_threads": 1},
    "blocks_of_64": {"block_size": 64},
    "small_chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 20},
    "few_rows": {"max_num_seqs": 7},
    "steps_ahead": {"max_steps_under_way": 3},
    "no_cache": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("instruction_set", _native.kernel_names())
@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_finds_the_same(
    folder: Path, name: str, instruction_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_ISA", instruction_set)
    sample = SamplingParams(n=3, seed=4, max_tokens=30, ignore_eos=True)
    jobs = [*JOBS, (PROMPTS[1], sample), *JOBS]
    with make(folder, **{"num_threads": 2, **SCHEDULES[name]}) as llm:
        found = search(llm, jobs)
    expected = alone(folder, instruction_set)
    assert found[: len(JOBS)] == expected
    assert found[-len(JOBS) :] == expected
    assert [len(each) for each in expected] == [2, 1, 5, 3, 2]
    assert {reason for each in expected for *_, reason in each} == {"stop", "length"}


def test_a_search_that_was_preempted_finds_the_same(folder: Path) -> None:
    longer = [(prompt, replace(sampling, max_tokens=80, stop_token_ids=())) for prompt, sampling in JOBS]
    crowd = [(prompt, SamplingParams(n=4, seed=1, max_tokens=80, ignore_eos=True)) for prompt in PROMPTS]
    with make(folder) as llm:
        expected = search(llm, longer)
    with make(folder, kv_memory="1200KiB") as llm:
        assert search(llm, [*crowd, *longer])[len(crowd) :] == expected
        assert llm.engine.scheduler.num_preemptions > 0


def test_a_search_may_be_over_at_its_first_token(folder: Path) -> None:
    every = tuple(range(100))
    wanted = SamplingParams(beam_search=True, temperature=0.0, n=4, max_tokens=1, stop_token_ids=every)
    with make(folder) as llm:
        ((*first,), (*second,)) = search(llm, [(PROMPTS[0], wanted), (PROMPTS[1], replace(wanted, max_tokens=9))])
    assert [len(tokens) for tokens, *_ in first] == [1, 1, 1, 1]
    scores = [score for _, score, *_ in first]
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert len({tuple(tokens) for tokens, *_ in second}) == 4


def test_a_search_of_one_beam_is_greedy(folder: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with make(folder) as llm:
        (plain,) = search(llm, [(PROMPTS[2], greedy)])
        (beam,) = search(llm, [(PROMPTS[2], replace(greedy, beam_search=True, length_penalty=0.5))])
    assert beam[0][0] == plain[0][0]
    score, total = beam[0][1], beam[0][2]
    assert score is not None
    assert total is not None
    assert score == pytest.approx(total / 12**0.5)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of transformers, and its folder."""
    from support import transformers_models

    model, folder = transformers_models.tiny_qwen3_model(tie_word_embeddings=True), tmp_path_factory.mktemp("theirs")
    model.generation_config.eos_token_id = [5, 17]
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.transformers
@pytest.mark.parametrize(("width", "length_penalty"), [(2, -0.5), (2, 1.0), (3, 0.0), (3, 1.7), (6, 1.0)])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_texts_and_scores_are_those_of_transformers(
    width: int, length_penalty: float, early_stopping: bool | Literal["never"], theirs: tuple[Any, Path]
) -> None:
    import torch

    model, folder = theirs
    wanted = SamplingParams(
        n=width,
        beam_search=True,
        temperature=0.0,
        max_tokens=12,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    jobs = [(prompt, replace(wanted, min_tokens=least)) for prompt in PROMPTS for least in (0, 3)]
    with make(folder, dtype="float32") as llm:
        found = search(llm, jobs)
    for (prompt, sampling), ours in zip(jobs, found, strict=True):
        output = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=12,
            min_new_tokens=sampling.min_tokens or None,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=[5, 17],
            pad_token_id=120,  # in no prompt, where it would be masked
            return_dict_in_generate=True,
            output_scores=True,
        )
        rows = [row[len(prompt) :].tolist() for row in output.sequences]
        for (tokens, *_), row in zip(ours, rows, strict=True):
            assert tokens == row[: len(tokens)]
            assert set(row[len(tokens) :]) <= {120}
        assert [score for _, score, *_ in ours] == pytest.approx(output.sequences_scores.tolist(), abs=1e-4)
