"""Vectors of texts: the same bytes whatever happens around a request, and what is refused."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.compute.models import read_model
from quire.compute.models.pooling import POOLING_FILE, pooling_of
from quire.compute.models.source import ModelFolder
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.dense import Dense
from quire.core.errors import CheckpointError, InvalidConfigError, InvalidRequestError
from quire.core.pooling import Pooling, vector_numbers
from quire.core.request import Request
from quire.core.validate import RequestLimits, validate
from quire.engine.door import FOR_VECTORS, Ticket
from support.tiny_checkpoint import write_model_weights, write_tiny_llama, write_tiny_qwen3

POOLINGS = ("last", "mean")
SHARED = list(range(2, 72))
PROMPTS = [[*SHARED, 5, 6], [*SHARED, 7], [9], [4] * 31, [4] * 32, [4] * 33, [*range(2, 90), *range(2, 90)], [3, 8]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("embeddings"))


def make(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, **{"kv_memory": "8MiB", "max_model_len": 256, **settings})


def vectors(llm: LLM, prompts: list[list[int]], pooling: str, dimensions: int = 0) -> list[list[float]]:
    outputs = llm.embed(prompts, pooling=pooling, dimensions=dimensions, use_tqdm=False)
    assert not any(output.error for output in outputs)
    return [output.embedding for output in outputs]


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[list[float]]]:
    """The vectors of each prompt when nothing else runs, nothing is cached, and it is computed whole."""
    with make(folder, num_threads=1, enable_prefix_caching=False, max_num_batched_tokens=512) as llm:
        return {pooling: [vectors(llm, [prompt], pooling)[0] for prompt in PROMPTS] for pooling in POOLINGS}


SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "in chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "token by token": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "other blocks": {"block_size": 64, "num_threads": 2},
    "too little memory": {"kv_memory": "600KiB", "max_num_batched_tokens": 40},
    "swapped": {"kv_memory": "600KiB", "max_num_batched_tokens": 40, "preemption": "swap", "swap_space": "4MiB"},
    "guesses": {"speculation": "auto"},
}


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_is_as_alone(folder: Path, alone: dict[str, list[list[float]]], name: str, pooling: str) -> None:
    with make(folder, **SCHEDULES[name]) as llm:
        assert vectors(llm, PROMPTS, pooling) == alone[pooling]
        assert vectors(llm, PROMPTS[::-1], pooling) == alone[pooling][::-1]
        llm.engine.scheduler.check()


def test_the_last_token_takes_the_rest_from_the_cache_and_the_mean_takes_nothing(folder: Path) -> None:
    with make(folder) as llm:
        found = [
            [output.num_cached_tokens for output in llm.embed([PROMPTS[0]], pooling=pooling, use_tqdm=False)]
            for pooling in ("mean", "last", "mean")
        ]
    assert found == [[0], [64], [0]]


def test_texts_and_vectors_in_the_same_steps_are_as_alone(folder: Path, alone: dict[str, list[list[float]]]) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with make(folder) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, sampling, use_tqdm=False)]

    async def run() -> None:
        settings: dict[str, Any] = {"kv_memory": "8MiB", "max_model_len": 256, "max_num_batched_tokens": 24}
        async with AsyncLLM(folder, skip_tokenizer_init=True, **settings) as llm:

            async def text(prompt: list[int]) -> list[int]:
                return [output.outputs[0].token_ids async for output in llm.generate(prompt, sampling)][-1]

            async def vector(prompt: list[int], pooling: str) -> list[float]:
                prepared = await llm.prepare(prompt, FOR_VECTORS, Ticket(pooling=Pooling(pooling)))
                return [vector_numbers(delta.vector).tolist() async for delta in llm.deltas(prepared)][-1]

            texts = [text(prompt) for prompt in PROMPTS]
            wanted = [vector(prompt, pooling) for pooling in POOLINGS for prompt in PROMPTS]
            found = await asyncio.gather(*texts, *wanted)
            assert found[: len(texts)] == expected
            assert found[len(texts) :] == alone["last"] + alone["mean"]

    asyncio.run(run())


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_vector_has_length_1_and_is_cut_before_that(folder: Path, pooling: str) -> None:
    with make(folder) as llm:
        whole, cut = (vectors(llm, PROMPTS[:2], pooling, dimensions)[0] for dimensions in (0, 5))
    assert math.isclose(sum(x * x for x in whole), 1.0, rel_tol=1e-6)
    length = math.sqrt(sum(x * x for x in whole[:5]))
    assert cut == pytest.approx([x / length for x in whole[:5]], rel=1e-6)


def pooled(sampling: SamplingParams) -> Request:
    request = Request("r", [1], sampling)
    request.pooling = Pooling("last")
    return request


def test_what_an_engine_refuses(folder: Path) -> None:
    with make(folder) as llm:
        for prompts, options, words in (
            ([5], {}, 'give LLM or the call pooling="mean" or pooling="last"'),
            ([5], {"pooling": "cls"}, "last or mean: the first token of this model reads only itself"),
            ([5], {"pooling": "max"}, "pooling is 'max'; allowed: one of "),
            ([5], {"pooling": "last", "dimensions": 1 << 20}, "dimensions"),
            ([5], {"pooling": "last", "dimensions": -1}, "dimensions"),
            ([5] * 257, {"pooling": "last"}, "maximum context length is 256 tokens"),
            ([1 << 20], {"pooling": "last"}, "token id"),
        ):
            with pytest.raises(InvalidRequestError, match=words):
                llm.embed(prompts, **options)
        assert vectors(llm, [[5] * 256], "last")  # no token follows
    with pytest.raises(InvalidConfigError, match="pooling"):
        make(folder, pooling="max")
    limits = RequestLimits(vocab_size=100, max_model_len=64, max_sequence_tokens=64, max_num_seqs=8)
    with pytest.raises(InvalidRequestError, match="makes no vectors"):
        validate(pooled(FOR_VECTORS), limits)
    for sampling in (SamplingParams(max_tokens=1, n=2), SamplingParams(), SamplingParams(max_tokens=2)):
        with pytest.raises(InvalidRequestError, match="for a vector"):
            validate(pooled(sampling), replace(limits, vector_size=8))


def settings_in(folder: Path, **fields: object) -> ModelFolder:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / POOLING_FILE).write_text(json.dumps(fields), encoding="utf-8")
    return ModelFolder(folder)


def test_a_folder_says_how_its_vectors_are_made(tmp_path: Path) -> None:
    assert pooling_of(ModelFolder(tmp_path)) == ""
    assert pooling_of(settings_in(tmp_path, pooling_mode_lasttoken=True, pooling_mode_mean_tokens=False)) == "last"
    assert pooling_of(settings_in(tmp_path, pooling_mode_mean_tokens=True)) == "mean"
    assert pooling_of(settings_in(tmp_path, pooling_mode="lasttoken", embedding_dimension=64)) == "last"
    assert pooling_of(settings_in(tmp_path, pooling_mode="mean")) == "mean"
    assert pooling_of(settings_in(tmp_path, pooling_mode_cls_token=True)) == "cls"
    for fields in (
        {"pooling_mode_max_tokens": True},
        {"pooling_mode": "max"},
        {"pooling_mode": ["mean", "lasttoken"]},
        {},
        {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True},
    ):
        with pytest.raises(CheckpointError):
            pooling_of(settings_in(tmp_path, **fields))


TANH, IDENTITY = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"


def write_dense(folder: Path, number: int, shape: tuple[int, int], activation: str, **settings: object) -> Any:
    """Write a dense layer after the pooling; return its function in float64."""
    random, step = np.random.default_rng(number), folder / f"{number}_Dense"
    step.mkdir()
    weight, bias = random.standard_normal(shape, np.float32) / 4, random.standard_normal(shape[:1], np.float32)
    has_bias = settings.get("bias") is not False
    sizes = {"in_features": shape[1], "out_features": shape[0], "bias": True, "activation_function": activation}
    (step / "config.json").write_text(json.dumps({**sizes, **settings}), encoding="utf-8")
    write_model_weights(step, {"linear.weight": weight} | ({"linear.bias": bias} if has_bias else {}))
    bend = np.tanh if activation == TANH else np.positive
    return lambda vector: bend(weight.astype(np.float64) @ vector + (bias if has_bias else 0))


def test_vectors_go_through_the_layers_after_the_pooling(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    first, second = write_dense(tmp_path, 2, (24, 64), TANH), write_dense(tmp_path, 3, (10, 24), IDENTITY, bias=False)
    pooled: list[Any] = []
    apply = Dense.__call__
    monkeypatch.setattr(Dense, "__call__", lambda self, vector: (pooled.append(vector), apply(self, vector))[1])
    with make(tmp_path, num_threads=1, dtype="float32", enable_prefix_caching=False) as llm:
        states = vectors(llm, [[5], [5, 6]], "last") and pooled[::2]
        found, cut = (vectors(llm, [[5, 6]], "mean", dimensions)[0] for dimensions in (0, 4))
        with pytest.raises(InvalidRequestError, match="from 1 to 10"):
            llm.embed([[5]], dimensions=11, pooling="mean")
    mean = (states[0].astype(np.float64) + states[1]) / 2
    assert pooled[4] == pytest.approx(mean, abs=1e-6)
    expected = second(first(mean))
    assert found == pytest.approx((expected / np.linalg.norm(expected)).tolist(), abs=1e-6)
    assert cut == pytest.approx((expected[:4] / np.linalg.norm(expected[:4])).tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("shape", "settings", "message"),
    [
        ((8, 63), {}, "in_features is 63; allowed: 64, the size of the vectors before it"),
        ((8, 64), {"activation_function": "torch.nn.modules.activation.GELU"}, "activation_function is"),
        ((8, 64), {"out_features": 9}, r"linear.weight: shape is \[8, 64\]; allowed: \[9, 64\]"),
        ((8, 64), {"bias": "yes"}, "bias is 'yes'; allowed: true or false"),
    ],
)
def test_a_layer_after_the_pooling_that_does_not_fit_is_refused(
    folder: Path, tmp_path: Path, shape: tuple[int, int], settings: dict[str, Any], message: str
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    write_dense(tmp_path, 2, shape, IDENTITY, **settings)
    with pytest.raises(CheckpointError, match=message):
        make(tmp_path)


def test_the_steps_are_those_that_the_folder_lists(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    write_dense(tmp_path, 2, (64, 64), TANH)
    write_dense(tmp_path, 3, (10, 64), IDENTITY)

    def steps(*listed: Any) -> list[str]:
        (tmp_path / "modules.json").write_text(json.dumps(listed))
        return [step.folder for step in read_model(ModelFolder(tmp_path)).dense]

    kinds = {"": "models.Transformer", "1_Pooling": "models.Pooling", "4_Normalize": "models.Normalize"}
    usual = [{"type": f"sentence_transformers.{kind}", "path": path} for path, kind in kinds.items()]
    dense = {"type": "sentence_transformers.models.Dense", "path": "3_Dense"}
    assert steps(*usual) == []
    assert steps(*usual, dense) == ["3_Dense"]
    assert steps(*usual, {**dense, "path": "2_Dense"}, dense) == ["2_Dense", "3_Dense"]
    for wrong, message in (
        ({"type": "sentence_transformers.models.LayerNorm", "path": "2_LayerNorm"}, "type is '.*LayerNorm'; allowed"),
        ({"path": "2_Dense"}, "type is None; allowed: one of Transformer, Pooling, Dense"),
        ({**dense, "path": "../other"}, "path is '../other'; allowed: 2_Dense to 9_Dense"),
        ({**dense, "path": ["2_Dense"]}, "path is"),
        ("2_Dense", "allowed: a list of steps"),
    ):
        with pytest.raises(CheckpointError, match=message):
            steps(wrong)
    for text in ("[", "{}", "[" * 100_000):
        (tmp_path / "modules.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"modules\.json"):
            read_model(ModelFolder(tmp_path))


@pytest.fixture
def pooled_folder(tmp_path: Path) -> Iterator[Path]:
    folder = write_tiny_qwen3(tmp_path)
    settings_in(folder, pooling_mode_lasttoken=True)
    yield folder


def test_the_folder_is_obeyed(pooled_folder: Path, alone: dict[str, list[list[float]]]) -> None:
    with make(pooled_folder) as llm:
        assert [output.embedding for output in llm.embed(PROMPTS, use_tqdm=False)] == alone["last"]
    with make(pooled_folder, pooling="mean") as llm:
        assert [output.embedding for output in llm.embed(PROMPTS, use_tqdm=False)] == alone["mean"]


MAKERS = {"qwen3": write_tiny_qwen3, "llama": write_tiny_llama}


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_folder_of_the_bare_decoder_makes_the_same_vectors(maker: str, dtype: str, tmp_path: Path) -> None:
    """Qwen3-Embedding names its tensors without `model.`, has no head, and says in 1_Pooling how it pools."""
    whole = MAKERS[maker](tmp_path / "whole", tie=True, dtype=dtype)
    bare = MAKERS[maker](tmp_path / "bare", tie=True, dtype=dtype)
    checkpoint = Checkpoint.open(whole)
    tensors = {name.removeprefix("model."): checkpoint.tensor(name) for name in checkpoint.entries}
    assert "embed_tokens.weight" in tensors and "layers.0.input_layernorm.weight" in tensors
    assert "lm_head.weight" not in tensors
    write_model_weights(bare, tensors, dtype=dtype)
    settings_in(bare, pooling_mode_lasttoken=True)
    with make(whole, pooling="last") as llm, make(bare) as other:
        assert vectors(other, PROMPTS, "last") == vectors(llm, PROMPTS, "last")
        assert [output.embedding for output in other.embed(PROMPTS, use_tqdm=False)] == vectors(llm, PROMPTS, "last")
