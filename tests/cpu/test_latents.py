"""Models with one latent for all heads: what is in the pool, what is shared and swapped, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.models.sublayers import ExpertsSpec, Scoring
from quire.compute.reference.mlp import routing_weights
from quire.core.errors import CheckpointError, InvalidConfigError
from quire.core.step import BlockCopy, BlockMove
from support.native_runs import FLOAT32, NativeRun
from support.reference_runs import ReferenceRun
from support.spec_models import write_spec_model
from support.step_plans import Work

DATA = Path(__file__).parents[1] / "golden" / "data" / "families"
CASES: dict[str, Any] = json.loads((DATA / "cases.json").read_text())
TOKENS: list[int] = CASES["tokens"]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(params=["deepseek-v2-lite", "deepseek-v3"])
def form(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    form = CASES["forms"][request.param]
    (tmp_path / "config.json").write_text(json.dumps(form["config"]))
    shutil.copy(DATA / form["weights"], tmp_path / "model.safetensors")
    return tmp_path, form


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_the_pool_holds_latents_and_no_values(form: tuple[Path, dict[str, Any]], backend: str) -> None:
    folder, expected = form
    settings: dict[str, Any] = {"backend": backend, "dtype": "float32", "max_model_len": 160, "kv_memory": "1MiB"}
    with LLM(folder, skip_tokenizer_init=True, **settings) as llm:
        texts = [llm.generate([TOKENS], SAMPLING)[0] for _ in range(2)]
        memory, cache = llm.engine.scheduler.memory, llm.engine._executor.cache  # type: ignore[attr-defined]
        assert memory.spec.bytes_per_block == 16 * 3 * (32 + 16) * 4
        assert [values.nbytes for _, values in cache.places()] == [0, 0, 0]
        assert sum(keys.nbytes for keys, _ in cache.places()) == cache.num_blocks * memory.spec.bytes_per_block
        memory.check()
    assert [text.outputs[0].token_ids for text in texts] == [expected["greedy"]] * 2
    assert texts[1].num_cached_tokens == 128


def test_latents_that_were_copied_or_swapped_give_the_same_bits(form: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = form
    whole = NativeRun(folder)
    whole.prefill(0, TOKENS)
    run = NativeRun(folder, blocks=[9, 4, 11, *range(40, 50)])
    run.driver.open(0, TOKENS)
    run.step(Work(0, 0, 40))
    run.driver.set_block(0, 0, 0, 20)
    run.driver.set_block(0, 0, 2, 21)
    run.driver.set_block(0, 0, 1, 30)
    run.driver.open(1, TOKENS[:5])
    run.step(Work(1, 0, 5), moves_out=[BlockMove(9, 1), BlockMove(11, 0)], copies=[BlockCopy(4, 30)])
    run.step(Work(0, 40, len(TOKENS) - 40), moves_in=[BlockMove(20, 1), BlockMove(21, 0)])
    assert run.bits(0, len(TOKENS)) == whole.bits(0, len(TOKENS))


@pytest.mark.parametrize("kv_dtype", ["int8", "k8v4", "int4"])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_latents_of_fewer_bits_are_refused(form: tuple[Path, dict[str, Any]], backend: str, kv_dtype: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"kv_dtype is '{kv_dtype}'; allowed: auto, float32 or bfloat16: all"):
        LLM(form[0], skip_tokenizer_init=True, backend=backend, kv_dtype=kv_dtype)


def test_torch_refuses_them_by_name(form: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(InvalidConfigError, match=r"native or reference: torch does not run latents \(MLA\) yet"):
        LLM(form[0], skip_tokenizer_init=True, backend="torch")


def test_a_checkpoint_without_the_offset_of_its_router_is_refused(form: tuple[Path, dict[str, Any]]) -> None:
    """The error has the name that the file would have."""
    folder, expected = form
    config = expected["config"] | {"num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="missing: ") as refused:
        NativeRun(folder, spec=read_model(ModelFolder(folder)).spec)
    assert "model.layers.3" in str(refused.value)
    assert "e_score_correction_bias.weight" not in str(refused.value)


def test_an_offset_chooses_experts_and_leaves_their_weights_alone() -> None:
    spec = ExpertsSpec(4, 2, 8, normalize_weights=False, scoring=Scoring.SIGMOID, scale=2.0, offset=True)
    scores = np.array([[2.0, 1.0, -1.0, -2.0]], np.float32)
    weights = routing_weights(scores, spec, np.array([0, 0, 0, 9], np.float32))
    expected = 2 / (1 + np.exp(-scores)) * np.array([1, 0, 0, 1])
    assert np.allclose(weights, expected)


def test_experts_of_groups_that_are_left_out_are_not_chosen() -> None:
    spec = ExpertsSpec(6, 2, 8, normalize_weights=False, num_groups=3, groups_per_token=1, group_best=2)
    scores = np.log(np.array([[0.4, 0.01, 0.25, 0.24, 0.05, 0.05]], np.float32))
    assert np.flatnonzero(routing_weights(scores, spec)).tolist() == [2, 3]
    assert np.flatnonzero(routing_weights(scores, replace(spec, group_best=1))).tolist() == [0, 1]
    even = np.zeros((1, 6), np.float32)
    assert np.flatnonzero(routing_weights(even, spec)).tolist() == [0, 1]


def test_many_heads_go_through_a_tile_in_parts_and_divide_among_threads(tmp_path: Path) -> None:
    """64 query heads go through a tile together, and here are 80. Threads without a sequence take some of them."""
    form = CASES["forms"]["deepseek-v2-lite"]
    config = form["config"] | {"num_attention_heads": 80, "num_key_value_heads": 80, "hidden_size": 80}
    config |= {"num_hidden_layers": 1, "first_k_dense_replace": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_model(ModelFolder(tmp_path)).spec
    write_spec_model(tmp_path, spec)
    three = replace(FLOAT32, num_threads=3)
    runs = [ReferenceRun(tmp_path), NativeRun(tmp_path), NativeRun(tmp_path, settings=three)]
    for run, chunks in zip(runs, ([], [], [1, 33, 1, 16]), strict=True):
        run.prefill(0, TOKENS, chunks=chunks)
    theirs, ours = (np.stack([run.logits[0, place] for place in range(len(TOKENS))]) for run in runs[:2])
    assert np.abs(ours - theirs).max() <= 1e-4 * max(1.0, np.abs(theirs).max())
    assert runs[1].bits(0, len(TOKENS)) == runs[2].bits(0, len(TOKENS))
