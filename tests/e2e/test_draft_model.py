"""A draft model next to the model, over whole engines: the same texts to the bit, whatever it guesses.

A model that is its own draft model must guess every token, drawn ones and those behind rules too: its guesses are drawn
with the same noise. So one hole in its keys, or one slot of another text, shows as a guess that is wrong.
"""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, CheckpointError, Grammar, InvalidConfigError, Request, SamplingParams, _native
from quire.compute.grammar import MaskService
from quire.compute.models import read_model
from quire.compute.models.draft import with_draft
from quire.compute.models.source import ModelFolder
from quire.compute.sampling.draws import Choices, Draws
from quire.core.config import EngineConfig
from quire.engine import factory
from quire.engine.factory import plan_engine
from quire.engine.records.step_log import replay
from quire.guide import GUIDE_FOLDER
from support.guess_runs import WORKLOAD, make, run, said, workload
from support.guess_runs import counts_of as counts_by
from support.guesses import verify_all_guesses
from support.swaps import noted_swaps
from support.tiny_checkpoint import write_tiny_llama, write_tiny_qwen3

END = 127
KV_DTYPES = ("float32", "int8", "k8v4", "int4")
KERNELS = _native.kernel_names()
PAIRS = [(KV_DTYPES[i % 4], KERNELS[i % len(KERNELS)]) for i in range(max(4, len(KERNELS)))]
"""Each form of keys, and each set of kernels, once."""


def counts_of(llm: LLM) -> tuple[int, int]:
    """Return how many guesses of the draft model were verified, and how many were right."""
    return counts_by(llm, "draft_model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of another family, with other heads, that knows nothing of the first."""
    settings = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    return write_tiny_llama(tmp_path_factory.mktemp("draft"), settings=settings)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[object]:
    with make(folder, dtype="bfloat16", num_threads=1, enable_prefix_caching=False) as llm:
        return [text for each in WORKLOAD for text in run(llm, [each])]


@cache
def texts_of(folder: Path, longest: int) -> list[object]:
    """Return the texts of longer requests without guesses, with enough memory."""
    with make(folder, dtype="bfloat16", enable_prefix_caching=False) as llm:
        return run(llm, workload(longest))


SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {"max_num_seqs": 5},
    "small_chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 9},
    "steps_ahead": {"max_steps_under_way": 3, "max_num_batched_tokens": 40, "block_size": 32},
    "radix_tree": {"prefix_index": "radix_tree", "num_threads": 1},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_its_own_draft_model_guesses_every_token(folder: Path, alone: list[object], name: str) -> None:
    """The second time, from cached prompts."""
    with make(folder, dtype="bfloat16", speculation=str(folder), **SCHEDULES[name]) as llm:
        for _ in range(2):
            assert run(llm, WORKLOAD) == alone
        num_verified, num_right = counts_of(llm)
        assert num_verified == num_right > 50
        assert llm.engine.scheduler.memory.num_looked_up[1] > 0


@pytest.mark.parametrize(("kv_dtype", "instruction_set"), PAIRS)
def test_every_form_of_keys_is_kept_for_both(
    folder: Path, kv_dtype: str, instruction_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_ISA", instruction_set)
    with make(folder, kv_dtype=kv_dtype, speculation=str(folder)) as llm:
        guessed = run(llm, WORKLOAD)
        num_verified, num_right = counts_of(llm)
        assert num_verified == num_right > 50
    with make(folder, kv_dtype=kv_dtype) as llm:
        assert guessed == run(llm, WORKLOAD)


@pytest.mark.parametrize(("backend", "num_requests"), [("native", 9), ("reference", 4)])
def test_a_draft_model_that_is_mostly_wrong_changes_nothing(
    folder: Path, other: Path, backend: str, num_requests: int
) -> None:
    requests = WORKLOAD[:num_requests]
    with make(folder, backend=backend, speculation=str(other), max_num_seqs=5) as llm:
        guessed = run(llm, requests)
        num_verified, num_right = counts_of(llm)
        assert num_verified > num_right
        assert num_verified > 20
    with make(folder, backend=backend) as llm:
        assert guessed == run(llm, requests)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_or_swapped_it_goes_on_guessing_every_token(
    folder: Path, preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = texts_of(folder, 200)
    swapped = noted_swaps(monkeypatch)
    settings: dict[str, Any] = {"swap_space": "4MiB"} if preemption == "swap" else {}
    with make(folder, dtype="bfloat16", kv_memory="700KiB", speculation=str(folder), **settings) as llm:
        assert run(llm, workload(200)) == expected
        num_verified, num_right = counts_of(llm)
        assert num_verified == num_right > 50
        assert llm.engine.scheduler.num_preemptions > 0
        assert any(swapped) == (preemption == "swap")


def test_in_memory_for_one_request_it_guesses_as_far_as_there_is_room(folder: Path) -> None:
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 100}
    short = [(prompt[:40], sampling) for prompt, sampling in WORKLOAD]
    with make(folder, **settings) as llm:
        expected = run(llm, short)
    with make(folder, **settings, kv_memory="170KiB", speculation=str(folder)) as llm:
        assert llm.engine.scheduler.memory.pool.num_blocks == 7
        assert run(llm, short) == expected
        num_verified, num_right = counts_of(llm)
        assert num_verified == num_right > 10


def test_n_sequences_of_one_request_are_guessed_each_by_its_own_noise(folder: Path) -> None:
    prompt, sampling = WORKLOAD[5][0], replace(WORKLOAD[5][1], temperature=1.2, n=4, ignore_eos=True)
    with make(folder, dtype="bfloat16", speculation=str(folder)) as llm:
        together = run(llm, [(prompt, sampling), WORKLOAD[3]])
        num_verified, num_right = counts_of(llm)
        assert num_verified == num_right > 50
    with make(folder, dtype="bfloat16", enable_prefix_caching=False) as llm:
        assert together == run(llm, [(prompt, sampling), WORKLOAD[3]])


class Adversary:
    """A sampler that chooses as it was told, whatever the logits are."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._random = random.Random(4)

    def sample(self, logits: Any, draws: Draws) -> Choices:
        """Return a random token, an end, or one that is nearly always wrong for each draw."""
        choices = Choices.of(draws.positions * 0 + END, draws.num_logprobs)
        if self._kind == "random":
            choices.tokens[:] = [self._random.randrange(END + 1) for _ in range(len(draws))]
        elif self._kind == "wrong":
            choices.tokens[:] = logits[draws.logit_rows, : END + 1].argmin(axis=1)
        return choices


@pytest.mark.parametrize(("kind", "steps"), [("random", 3), ("ends", 1), ("wrong", 3)])
def test_an_adversary_changes_nothing(folder: Path, alone: list[object], kind: str, steps: int) -> None:
    with make(folder, dtype="bfloat16", speculation=str(folder), max_num_seqs=4, max_steps_under_way=steps) as llm:
        rows = llm.engine._executor._draft
        rows._draws = replace(rows._draws, sampler=Adversary(kind))
        for _ in range(2):
            assert run(llm, WORKLOAD) == alone
        num_verified, num_right = counts_of(llm)
        assert num_verified > 50
        assert num_right < num_verified / 4


def test_grammars_and_stop_strings_with_a_draft_model_and_the_log_replays(tmp_path: Path) -> None:
    questions = [[{"role": "user", "content": text}] for text in ("What is a block table?", "What is a prefix cache?")]
    person = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
    sampling = [
        SamplingParams(temperature=0.7, seed=1, max_tokens=60, stop=["cache", " of "]),
        SamplingParams(temperature=0.0, max_tokens=40, grammar=Grammar.json_schema(person)),
    ]
    texts, log = [], tmp_path / "run.steplog"
    for settings in ({}, {"speculation": "guide", "step_log": log}):
        with LLM("guide", kv_memory="16MiB", max_num_seqs=4, **settings) as llm:
            texts.append([said(llm.chat(questions, sampling, use_tqdm=False)) for _ in range(2)])
    assert texts[0] == texts[1]
    assert replay(io.BytesIO(log.read_bytes())) > 10


def test_behind_a_grammar_its_own_draft_model_guesses_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws under the masks, where they come in time; none of its guesses is one that the grammar refuses."""
    wait = MaskService.wait
    monkeypatch.setattr(MaskService, "wait", lambda masks, texts, seconds, enough=all: wait(masks, texts, 60.0))
    monkeypatch.setattr(MaskService, "is_cheap", lambda masks, text: True)
    questions = [[{"role": "user", "content": text}] for text in ("What is a block table?", "What is a prefix cache?")]
    letters = Grammar.regex("([b-df-hj-np-tv-z]{3,9} ){5,30}")  # no vowels: the model alone would write others
    sampling = [SamplingParams(temperature=each, seed=1, max_tokens=40, grammar=letters) for each in (0.0, 1.0)]
    texts = []
    for speculation in ("off", "guide"):
        with LLM("guide", kv_memory="16MiB", speculation=speculation) as llm:
            verify_all_guesses(llm)
            texts.append(said(llm.chat(questions, sampling, use_tqdm=False)))
            num_verified, num_right = counts_of(llm)
    assert texts[0] == texts[1]
    assert num_verified == num_right > 40


def refusal(model: str | Path, speculation: str | Path, **settings: Any) -> str:
    """Return the one line that refuses a pair before any weight is read."""
    with pytest.raises(InvalidConfigError) as caught:
        plan_engine(EngineConfig(model=str(model), speculation=str(speculation), **settings))
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_what_is_no_draft_model_of_a_model_is_refused_in_one_line(folder: Path, other: Path, tmp_path: Path) -> None:
    ids: dict[str, Any] = {"skip_tokenizer_init": True}
    assert "allowed: off, auto, ngram, mtp, or a model's folder or name (No folder named" in refusal("guide", "ngrams")
    assert "allowed: a draft model that is smaller than the model" in refusal(other, folder, **ids)
    windows = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    narrow = write_tiny_qwen3(tmp_path / "narrow", settings=windows)
    assert "has layers with a sliding window" in refusal(folder, narrow, **ids)
    assert "the model has layers with a sliding window" in refusal(narrow, other, **ids)
    fewer = write_tiny_llama(
        tmp_path / "fewer", settings={"vocab_size": 120, "num_hidden_layers": 1, "eos_token_id": 1}
    )
    assert "allowed: a model with 128 tokens, not 120" in refusal(folder, fewer, **ids)
    with pytest.raises(
        InvalidConfigError, match=r"^speculation is 3; allowed: off, auto, ngram, mtp, or a model's folder"
    ):
        EngineConfig(speculation=3)  # type: ignore[arg-type]


def test_a_draft_model_with_other_tokens_is_refused_by_the_first_of_them(tmp_path: Path) -> None:
    copy = shutil.copytree(GUIDE_FOLDER, tmp_path / "copy", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    plan_engine(EngineConfig(speculation=copy))
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    last, before = sorted(vocab, key=lambda token: -vocab[token])[:2]
    vocab[last], vocab[before] = vocab[before], vocab[last]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    line = refusal("guide", copy)
    assert f"a model with the same tokenizer; token 2046 is {before!r} in the model and {last!r}" in line
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        plan_engine(EngineConfig(speculation=copy))


def test_a_draft_model_takes_memory_and_one_that_does_not_fit_is_refused() -> None:
    plans = [
        plan_engine(EngineConfig(speculation=each, kv_memory="8MiB")).report.plan for each in ("off", "auto", "guide")
    ]
    off, auto, draft = plans
    assert draft.needs.weight_bytes == 2 * off.needs.weight_bytes
    assert draft.bytes_per_block == 2 * off.bytes_per_block
    assert draft.num_blocks == off.num_blocks // 2
    assert draft.needs.activation_bytes > auto.needs.activation_bytes > off.needs.activation_bytes
    memory = auto.needs.weight_bytes + draft.needs.activation_bytes
    plan_engine(EngineConfig(speculation="auto", max_memory=memory))
    assert "less than the" in refusal("guide", "guide", max_memory=memory)


def test_a_draft_model_with_a_shorter_context_guesses_as_far_as_it_reads(folder: Path, tmp_path: Path) -> None:
    """And one as large as the model is used, with a notice."""
    short = write_tiny_qwen3(tmp_path / "short", settings={"max_position_embeddings": 64})
    with make(folder, dtype="bfloat16", speculation=str(short)) as llm:
        notices = "\n".join(llm.report.notices)
        assert "is as large as the model" in notices
        assert "reads 64 of 4,096 tokens: it guesses nothing beyond" in notices
        guessed = run(llm, WORKLOAD)
        num_verified, num_right = counts_of(llm)
        assert num_verified == num_right > 20
    with make(folder, dtype="bfloat16") as llm:
        assert guessed == run(llm, WORKLOAD)


@pytest.mark.parametrize(("backend", "num_requests"), [("native", 9), ("reference", 4)])
@pytest.mark.parametrize("num_tokens", [104, 160])
def test_tokens_that_only_one_of_the_models_has(
    folder: Path, tmp_path: Path, backend: str, num_requests: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with vocabularies that are padded to other lengths; texts of the model have tokens that the other lacks."""
    settings = {"vocab_size": num_tokens, "num_hidden_layers": 1, "eos_token_id": 1}
    pair = read_model(ModelFolder(write_tiny_qwen3(tmp_path / "draft", settings=settings)))
    monkeypatch.setattr(factory, "with_draft_model", lambda config, model: with_draft(model, pair, "draft"))
    texts = []
    for speculation in ("off", "draft"):
        with make(folder, backend=backend, speculation=speculation) as llm:
            texts.append(run(llm, WORKLOAD[:num_requests]))
            assert (counts_of(llm)[0] > 20) == (speculation == "draft")
    assert texts[0] == texts[1]


def guess_now_and_then(llm: LLM, seed: int) -> None:
    """Have the draft model guess in some steps, for some requests, and rest else: it often has to catch up. Mutates."""
    chance = random.Random(seed)

    def depths(requests: Sequence[Request], num_running: int, most: int) -> dict[Request, int]:
        if chance.random() < 0.6:
            return {}
        return {request: chance.randint(1, min(most, 4)) for request in requests if chance.random() < 0.6}

    llm.engine.scheduler.drafts.depths = depths  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [*SCHEDULES, "recompute", "swap", "n"])
def test_when_it_guesses_again_it_catches_up_and_guesses_every_token(folder: Path, name: str, seed: int) -> None:
    """What it has not read may be anywhere: in a prompt, in a block that others share, in one that was swapped."""
    texts, expected = workload(120), texts_of(folder, 120)
    settings: dict[str, Any] = dict(SCHEDULES.get(name, {}))
    if name == "n":
        texts = [(prompt, replace(sampling, n=3)) for prompt, sampling in texts[:4]]
        with make(folder, dtype="bfloat16") as llm:
            expected = run(llm, texts)
    elif name not in SCHEDULES:
        settings = {"kv_memory": "600KiB", "swap_space": "4MiB" if name == "swap" else 0}
    with make(folder, dtype="bfloat16", speculation=str(folder), **settings) as llm:
        guess_now_and_then(llm, seed)
        for _ in range(2):  # the second time from cached texts, where there is room for them
            assert run(llm, texts) == expected
        num_verified, num_right = counts_of(llm)
        assert num_verified == num_right > 7
        if name in ("recompute", "swap"):
            assert llm.engine.scheduler.num_preemptions > 0


def test_where_no_guess_pays_it_reads_nothing(folder: Path, alone: list[object]) -> None:
    with make(folder, dtype="bfloat16", speculation=str(folder)) as llm:
        rows, budget = llm.engine._executor._draft, llm.engine.scheduler.drafts
        budget.depths = lambda requests, num_running, most: {}
        assert run(llm, WORKLOAD) == alone
        assert counts_of(llm) == (0, 0)
        assert not rows._slots_read.any()


def test_it_reads_no_more_in_a_step_than_there_is_memory_for(folder: Path, alone: list[object]) -> None:
    """And a text whose beginning another one reads in this step waits for the next."""
    with make(folder, dtype="bfloat16", speculation=str(folder), max_num_batched_tokens=64, max_num_seqs=9) as llm:
        rows = llm.engine._executor._draft
        most, sizes, run_pass = rows._parts.most_tokens, list[int](), rows._pass
        rows._pass = lambda jobs, batch: (sizes.append(sum(len(job.tokens) for job in jobs)), run_pass(jobs, batch))
        assert run(llm, WORKLOAD) == alone
        assert most == 64 + 9
        assert 16 < max(sizes) <= most
        num_verified, num_right = counts_of(llm)
        assert num_verified == num_right > 50
