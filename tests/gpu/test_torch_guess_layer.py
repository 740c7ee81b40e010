"""A model's own layer that guesses, in the engine of torch: the same texts, and the same guesses in any schedule.

The other tests of the layer (`tests/e2e/test_guess_layer.py`) are for all engines. What differs here: hidden states
stay on the device, and the layer reads steps that were launched before the token after them is known to the host.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, InvalidConfigError
from quire.compute.models.base import DecoderSpec
from quire.compute.torch import draw_graphs, load
from quire.compute.torch.attention.triton import TritonAttention
from quire.compute.torch.graphs import StepGraphs
from quire.compute.torch.load import LoadedModel
from quire.compute.torch.settings import TorchSettings, kv_cache_spec
from quire.core.config import EngineConfig
from quire.engine.factory import plan_engine
from support.guess_layers import GLM, QWEN3_5, write_guessing_model
from support.guess_runs import WORKLOAD, Known, compare, counts_of, noted_guesses, run, workload
from support.guess_runs import make as make_any
from support.recorders import AgainRecorder
from support.swaps import noted_swaps

pytestmark = pytest.mark.usefixtures("small_rooms")

SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {"max_num_seqs": 5},
    "small_chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 3, "max_steps_under_way": 2},
}
PLAIN = [0, 4, 6]
"""The requests of the workload whose steps can be launched: without reports, and rules that depend on the text."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with random weights, and one whose layer is always right."""
    base = tmp_path_factory.mktemp("guessing")
    for name in ("random", "right"):
        write_guessing_model(base / name, GLM, is_always_right=name == "right")
    return {name: base / name for name in ("random", "right")}


def make(folder: Path, device: str, **settings: Any) -> LLM:
    usual: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "enable_prefix_caching": False}
    return make_any(folder, backend="torch", device=device, batch_invariant=True, **{**usual, **settings})


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path], device: str) -> tuple[list[object], Known]:
    """The texts of requests without guesses, and the guesses that the layer makes if each runs alone."""
    with make(folders["random"], device) as llm:
        texts = run(llm, WORKLOAD)
    with make(folders["random"], device, speculation="mtp") as llm:
        known = noted_guesses(llm)
        assert [text for each in WORKLOAD for text in run(llm, [each])] == texts
    return texts, known


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_texts_and_guesses_are_the_same_in_any_schedule(
    folders: dict[str, Path], device: str, schedule: str, alone: tuple[list[object], Known]
) -> None:
    with make(folders["random"], device, speculation="mtp", **SCHEDULES[schedule]) as llm:
        known = noted_guesses(llm)
        assert run(llm, WORKLOAD) == alone[0]
    compare(known, alone[1], 15)


def test_it_reads_steps_that_were_launched(
    folders: dict[str, Path], device: str, alone: tuple[list[object], Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a while no guess is asked for, and steps run ahead of the host; then it guesses what it does alone."""
    with make(folders["random"], device, speculation="mtp", max_steps_under_way=3) as llm:
        turns = itertools.cycle([True] * 2 + [False] * 4)
        budget, ahead = llm.engine.scheduler.drafts, llm.engine._executor._ahead
        launched: list[int] = []
        launch = ahead._launcher.launch
        monkeypatch.setattr(budget, "could_pay", lambda num_running: next(turns))
        monkeypatch.setattr(ahead._launcher, "launch", lambda *step: launched.append(1) or launch(*step))
        known = noted_guesses(llm)
        assert run(llm, [WORKLOAD[index] for index in PLAIN]) == [alone[0][index] for index in PLAIN]
    assert len(launched) > 15
    compare(known, alone[1], 8)


def test_it_reads_steps_that_are_replayed(
    folders: dict[str, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their hidden states are where the recording left them. By Triton's attention, as only that is recorded."""
    few = [(prompt[:20], replace(sampling, max_tokens=8)) for prompt, sampling in (WORKLOAD[0], WORKLOAD[4])]
    found = []
    for records in (False, True):
        recorder = AgainRecorder()
        if device == "cpu":
            graphs = partial(StepGraphs, recorder=recorder, max_short=8) if records else None
            monkeypatch.setattr(load, "create_attention", _triton)
            monkeypatch.setattr(
                LoadedModel, "new_graphs", lambda model, _, graphs=graphs: graphs and graphs(model.decoder)
            )
            monkeypatch.setattr(draw_graphs, "DrawGraphs", lambda *parts: None)
        settings: dict[str, Any] = {"cuda_graphs": records, "max_steps_under_way": 2, "max_num_seqs": 8}
        with make(folders["random"], device, speculation="mtp", **settings) as llm:
            turns = itertools.cycle([True, False, False])
            monkeypatch.setattr(llm.engine.scheduler.drafts, "could_pay", lambda _, turns=turns: next(turns))
            known = noted_guesses(llm)
            found.append((run(llm, few), known))
    assert device == "cuda" or recorder.num_replayed > 5
    assert found[0][0] == found[1][0]
    compare(found[0][1], found[1][1], 3)


def _triton(spec: DecoderSpec, settings: TorchSettings) -> TritonAttention:
    stored, heads = kv_cache_spec(spec, settings), spec.attention.num_heads
    return TritonAttention(stored, torch.device("cpu"), num_heads=heads, num_processors=4, batch_invariant=True)


def test_every_guess_of_a_layer_that_is_right_is_right(folders: dict[str, Path], device: str) -> None:
    """Also from cached prompts, and next to vectors, whose hidden states the host gets."""
    found = []
    for speculation in ("off", "mtp"):
        settings: dict[str, Any] = {"enable_prefix_caching": True, "speculation": speculation}
        with make(folders["right"], device, **settings) as llm:
            vectors = llm.embed([{"prompt_token_ids": WORKLOAD[6][0]}] * 2, pooling="last")
            texts = [run(llm, WORKLOAD) for _ in range(2)]
            found.append((texts, [each.embedding for each in vectors]))
            num_verified, num_right = counts_of(llm, "mtp")
    assert found[0] == found[1]
    assert num_verified == num_right > 50


def test_swapped_it_goes_on_guessing_the_same(
    folders: dict[str, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 4-bit keys, whose centres the model has measured, and the layer has not."""
    swapped, found = noted_swaps(monkeypatch), []
    for settings in ({}, {"kv_memory": "56KiB", "swap_space": "4MiB"}):
        usual: dict[str, Any] = {"kv_dtype": "int4", "speculation": "mtp", "max_model_len": 200}
        with make(folders["random"], device, **usual, **settings) as llm:
            known = noted_guesses(llm)
            found.append((run(llm, workload(70)[6:]), known))
            num_preemptions = llm.engine.scheduler.num_preemptions
    assert num_preemptions > 0 and any(swapped)
    assert found[0][0] == found[1][0]
    compare(found[0][1], found[1][1], 40)


@pytest.mark.parametrize("launches", [False, True])
def test_a_step_whose_tokens_the_layer_has_no_memory_to_read_is_repeated(
    folders: dict[str, Path],
    device: str,
    alone: tuple[list[object], Known],
    launches: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By then the tokens of the step are drawn, but not reported."""
    with make(folders["random"], device, speculation="mtp", max_steps_under_way=2) as llm:
        decoder, calls = llm.engine._executor._layer._layer._decoder, itertools.count(1)
        compute = decoder.run

        def failing(*step: Any) -> Any:
            if next(calls) == 6:
                raise torch.OutOfMemoryError("no more")
            return compute(*step)

        monkeypatch.setattr(decoder, "run", failing)
        monkeypatch.setattr(llm.engine.scheduler.drafts, "could_pay", lambda _: not launches)
        assert run(llm, [WORKLOAD[index] for index in PLAIN]) == [alone[0][index] for index in PLAIN]
    assert next(calls) > 10


@pytest.mark.parametrize(
    ("config", "settings", "allowed"),
    [
        (GLM, {"tensor_parallel": 2}, "1 with speculation mtp, whose layer is not split"),
        (QWEN3_5, {}, "native or reference: torch does not run linear attention yet"),
    ],
    ids=["ranks", "linear attention"],
)
def test_what_it_does_not_support_is_refused(
    config: dict[str, Any], settings: dict[str, Any], allowed: str, tmp_path: Path
) -> None:
    write_guessing_model(tmp_path, config)
    settings = {**settings, "backend": "torch", "speculation": "mtp", "skip_tokenizer_init": True, "device": "cpu"}
    with pytest.raises(InvalidConfigError, match=allowed):
        plan_engine(EngineConfig(model=str(tmp_path), **settings))
