"""A draft model in the engine of torch: the text is the same to the bit, and a model that guesses for itself is right.

The other tests of draft models (`tests/e2e/test_draft_model.py`) are for all engines: what differs here is the memory
of two models, and steps that are launched while others run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.compute.models import read_model
from quire.compute.models.draft import with_draft
from quire.compute.models.source import ModelFolder
from quire.compute.torch.load import load_model
from support.guesses import verify_all_guesses
from support.swaps import noted_swaps
from support.tiny_checkpoint import write_tiny_llama, write_tiny_qwen3
from support.torch_runs import FLOAT32

PREFIX = [(7 * i * i + 3 * i) % 126 for i in range(50)]
PROMPTS = [PREFIX[: 5 * row] + [(11 * row + i * i) % 126 for i in range(12 + 3 * row)] for row in range(8)]
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=40),
    SamplingParams(temperature=1.2, top_p=0.9, seed=1, max_tokens=25, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, seed=2, max_tokens=40),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, n=2, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.0, logprobs=3, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=60, ignore_eos=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of another family, with other heads, that knows nothing of the first."""
    settings = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    return write_tiny_llama(tmp_path_factory.mktemp("draft"), settings=settings)


def make(folder: Path, device: str, **settings: Any) -> LLM:
    chosen = {"kv_memory": "8MiB", "dtype": "float32", "max_model_len": 256, "num_threads": 1, **settings}
    llm = LLM(
        str(folder), backend="torch", device=device, batch_invariant=True, skip_tokenizer_init=True, seed=0, **chosen
    )
    verify_all_guesses(llm)
    return llm


def said(outputs: list[RequestOutput]) -> list[object]:
    return [(each.token_ids, each.logprobs, each.finish_reason) for output in outputs for each in output.outputs]


def run(llm: LLM, sampling: Sequence[SamplingParams] = SAMPLING) -> list[object]:
    found = said(llm.generate(PROMPTS[: len(sampling)], sampling, use_tqdm=False))
    llm.engine.scheduler.check()
    return found


def counts_of(llm: LLM) -> tuple[int, int]:
    """Return how many guesses of the draft model were verified, and how many were right."""
    stats = llm.engine.stats()
    return sum(stats.verified_guesses["draft_model"]), sum(stats.right_guesses["draft_model"])


@pytest.fixture(scope="module")
def expected(folder: Path, device: str) -> list[object]:
    with make(folder, device) as llm:
        return run(llm)


@pytest.mark.parametrize("steps", [1, 3])
def test_its_own_draft_model_guesses_every_token(steps: int, folder: Path, device: str, expected: list[object]) -> None:
    """The second time, from cached prompts."""
    with make(folder, device, speculation=str(folder), max_steps_under_way=steps, max_num_seqs=5) as llm:
        for _ in range(2):
            assert run(llm) == expected
        num_verified, num_right = counts_of(llm)
        assert num_verified == num_right > 50


def test_it_knows_what_it_has_not_read_of_steps_that_were_launched(
    folder: Path, device: str, expected: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks get other texts while no guess is asked for: their slots were read once, with what was there before."""
    settings: dict[str, Any] = {"kv_memory": "600KiB", "enable_prefix_caching": False, "max_steps_under_way": 3}
    settings["max_model_len"] = 160
    with make(folder, device, speculation=str(folder), **settings) as llm:
        turns = itertools.cycle([True] * 3 + [False] * 5)
        budget, ahead = llm.engine.scheduler.drafts, llm.engine._executor._ahead
        launched: list[int] = []
        launch = ahead._launcher.launch
        monkeypatch.setattr(budget, "could_pay", lambda num_running: next(turns))
        monkeypatch.setattr(ahead._launcher, "launch", lambda *step: launched.append(1) or launch(*step))
        for _ in range(2):
            assert run(llm) == expected
        num_verified, num_right = counts_of(llm)
        assert num_verified == num_right > 50
        assert len(launched) > 20


@pytest.mark.parametrize("steps", [1, 2])
def test_a_draft_model_that_is_mostly_wrong_changes_nothing(
    steps: int, folder: Path, other: Path, device: str, expected: list[object]
) -> None:
    with make(folder, device, speculation=str(other), max_steps_under_way=steps) as llm:
        assert run(llm) == expected
        num_verified, num_right = counts_of(llm)
        assert num_verified > max(20, num_right)


@pytest.mark.parametrize("kv_dtype", ["int8", "k8v4", "int4"])
def test_every_form_of_keys_is_kept_for_both(kv_dtype: str, folder: Path, device: str) -> None:
    with make(folder, device, kv_dtype=kv_dtype) as llm:
        wanted = run(llm, SAMPLING[:4])
    with make(folder, device, kv_dtype=kv_dtype, speculation=str(folder)) as llm:
        assert run(llm, SAMPLING[:4]) == wanted
        num_verified, num_right = counts_of(llm)
        assert num_verified == num_right > 50


LONGER = [replace(each, max_tokens=60, ignore_eos=True) for each in SAMPLING]


@pytest.fixture(scope="module")
def longer(folder: Path, device: str) -> list[object]:
    with make(folder, device) as llm:
        return run(llm, LONGER)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_or_swapped_it_goes_on_guessing_every_token(
    preemption: str, folder: Path, device: str, longer: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = noted_swaps(monkeypatch)
    settings: dict[str, Any] = {"swap_space": "4MiB"} if preemption == "swap" else {}
    with make(folder, device, kv_memory="520KiB", max_model_len=140, speculation=str(folder), **settings) as llm:
        assert run(llm, LONGER) == longer
        num_verified, num_right = counts_of(llm)
        assert num_verified == num_right > 50
        assert llm.engine.scheduler.num_preemptions > 0
        assert any(swapped) == (preemption == "swap")


def test_a_block_on_disk_holds_both_models(folder: Path, device: str, expected: list[object], tmp_path: Path) -> None:
    disk: dict[str, Any] = {"disk_cache": tmp_path / "cache", "disk_cache_size": "8MiB", "disk_write": "always"}
    for is_restarted in (False, True):
        with make(folder, device, speculation=str(folder), **disk) as llm:
            outputs = llm.generate(PROMPTS, SAMPLING, use_tqdm=False)
            assert said(outputs) == expected
            assert any(output.num_disk_tokens for output in outputs) == is_restarted
            num_verified, num_right = counts_of(llm)
            assert num_verified == num_right > 50


class CountedMemory:
    """A device whose memory is what tensors of the test hold; implements `DeviceMemory`."""

    def free(self) -> int:
        return 1 << 30

    def held(self) -> int:
        return 1000

    def peak(self, work: Any) -> int:
        self.runners = work()
        return 5000


def test_both_models_are_rehearsed_when_memory_is_measured(folder: Path, other: Path) -> None:
    model = with_draft(read_model(ModelFolder(folder)), read_model(ModelFolder(other)), "other")
    memory = CountedMemory()
    loaded = load_model(model, FLOAT32)
    assert loaded.measured(memory).activation_bytes == 4000
    assert [len(runner._decoder.spec.layers) for runner in memory.runners] == [3, 2]
    parts = loaded.parts(8, 2)
    assert parts.draft is not None and parts.on_start is not None
    parts.cache.allocate()
    both = [cache.pairs().values() for cache in (parts.cache, parts.draft.cache)]
    assert [len(pairs) for pairs in both] == [3, 2]
    assert all(len(pair.keys) == 8 for pairs in both for pair in pairs)
    buffer = memoryview(bytearray(parts.cache.spec.bytes_per_block))
    for pairs in both:
        for pair in pairs:
            torch.nn.init.normal_(pair.keys[3])
            torch.nn.init.normal_(pair.values[3])
    parts.cache.read_block(3, 0, buffer)()
    parts.cache.write_block(5, 0, buffer)
    assert all(torch.equal(pair.keys[3], pair.keys[5]) for pairs in both for pair in pairs)
    assert all(torch.equal(pair.values[3], pair.values[5]) for pairs in both for pair in pairs)
