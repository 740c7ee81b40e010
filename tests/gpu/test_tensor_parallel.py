"""Two processes that share every matrix: the bits of one, whatever happens to blocks; an end if one of them dies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quire import LLM, SamplingParams
from quire.compute.models import ModelDescription, read_model
from quire.compute.models.source import ModelFolder
from quire.compute.torch.load import load_model
from quire.compute.torch.parallel.loading import require_same_bits
from quire.compute.torch.parallel.ranks import Followers, load_ranks
from quire.compute.torch.parallel.shards import SPLIT, ShardReader, marked
from quire.compute.torch.parallel.split import Rank, shard_of
from quire.compute.torch.products import product
from quire.compute.torch.settings import TorchSettings, kv_cache_spec
from quire.compute.torch.weights import TorchWeights
from quire.compute.weights.decoder_weights import WeightReader
from quire.compute.worker.worker import Worker
from quire.core.errors import ExecutorLostError, InvalidConfigError
from support.reference_runs import ReferenceRun
from support.step_plans import PlanDriver, Work
from support.tiny_checkpoint import write_tiny_qwen3
from support.torch_runs import EveryLogit

DATA = Path(__file__).parent.parent / "golden" / "data" / "families"
CASES: dict[str, Any] = json.loads((DATA / "cases.json").read_text())
FORMS = ("llama", "qwen2", "gemma3", "gpt2", "falcon", "opt-350m")
"""Tied heads and others, biases, windows and soft caps, MLPs without a gate, parallel sublayers, narrow embeddings."""
SETTINGS = TorchSettings(device="cpu", dtype="float32", batch_invariant=True, num_threads=2, max_model_len=96)
PATIENCE_S = 300


class RanksRun(ReferenceRun):
    """A worker of one rank or more, driven by hand."""

    def __init__(self, model: ModelDescription, settings: TorchSettings) -> None:
        load = load_model if settings.tensor_parallel == 1 else load_ranks
        parts = load(model, settings, None).parts(64, 4)
        self.memory: Any = parts.cache
        self.runner = EveryLogit(parts.runner)  # type: ignore[assignment]
        self.worker = Worker(parts.with_runner(self.runner))
        self.worker.start()
        self.driver = PlanDriver.over(kv_cache_spec(model.spec, settings), range(64))
        self.logits = {}

    @property
    def followers(self) -> Followers:
        found: Followers = self.memory._followers
        return found


@contextmanager
def run_of(model: ModelDescription, settings: TorchSettings) -> Iterator[RanksRun]:
    run = RanksRun(model, settings)
    try:
        yield run
    finally:
        run.worker.shutdown()


def logits_of(model: ModelDescription, settings: TorchSettings) -> tuple[dict[Any, NDArray[np.float32]], list[Any]]:
    """The logits of every token of two texts, in chunks, alone and together."""
    with run_of(model, settings) as run:
        first = [(5 * i * i + 3 * i + 1) % 60 for i in range(40)]
        text = [run.prefill(0, first, chunks=[10, 21])]
        text += run.decode(0, 40, 6)
        run.driver.open(1, first[::-1][:23])
        text.append(run.step(Work(1, 0, 23, 1)))
        return run.logits, text


def model_in(folder: Path, form: dict[str, Any]) -> ModelDescription:
    (folder / "config.json").write_text(json.dumps(form["config"]))
    shutil.copy(DATA / form["weights"], folder / "model.safetensors")
    return read_model(ModelFolder(folder), SETTINGS.max_model_len)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in FORMS), ("llama", "bfloat16"), ("gemma3", "bfloat16")]
)
def test_two_ranks_compute_the_logits_of_one_to_the_bit(name: str, dtype: str, tmp_path: Path) -> None:
    model, settings = model_in(tmp_path, CASES["forms"][name]), replace(SETTINGS, dtype=dtype)
    alone, text = logits_of(model, settings)
    together, same = logits_of(model, replace(settings, tensor_parallel=2))
    assert text == same
    assert alone.keys() == together.keys()
    assert len(alone) >= 40 + 6 + 23
    for place, logits in alone.items():
        assert np.array_equal(logits, together[place]), place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


def texts(folder: Path, **settings: Any) -> list[list[list[int]]]:
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.1, top_p=0.9, seed=1, max_tokens=25, n=3),
        SamplingParams(temperature=0.0, max_tokens=12, n=2, beam_search=True),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, logprobs=2, max_tokens=20),
    ]
    shared = [(7 * i * i + 3 * i) % 126 for i in range(40)]
    prompts = [shared[: 10 * row] + [(11 * row + i * i) % 126 for i in range(15)] for row in range(4)]
    with LLM(
        str(folder),
        backend="torch",
        device="cpu",
        dtype="float32",
        batch_invariant=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        num_threads=2,
        **settings,
    ) as llm:
        found = [
            [[*each.token_ids] for each in output.outputs]
            for prompts_now in (prompts, prompts[::-1])
            for output in llm.generate(prompts_now, sampling, use_tqdm=False)
        ]
        assert llm.engine.stats().hit_tokens_total > 0
    return found


def test_an_engine_of_two_ranks_copies_swaps_and_shares_blocks_as_one_does(folder: Path) -> None:
    block_bytes = 16 * 3 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, heads, numbers, bytes
    memory = {"kv_memory": 16 * block_bytes, "swap_space": 32 * block_bytes, "preemption": "swap"}
    chunks = {"max_num_batched_tokens": 24, "max_num_seqs": 8}  # steps without logits among them
    assert texts(folder, **memory, **chunks, tensor_parallel=2) == texts(folder, **memory)


def test_vectors_of_two_ranks_are_those_of_one(folder: Path) -> None:
    vectors = []
    for num_ranks in (1, 2):
        settings = {"batch_invariant": True, "skip_tokenizer_init": True, "pooling": "last", "max_model_len": 96}
        with LLM(str(folder), backend="torch", device="cpu", **settings, tensor_parallel=num_ranks) as llm:
            outputs = llm.embed([list(range(20)), list(range(5, 60))])
        vectors.append([output.embedding for output in outputs])
    assert vectors[0] == vectors[1]
    assert all(vectors[0])


def test_a_rank_that_dies_ends_the_engine_and_a_leader_that_is_gone_ends_the_others(folder: Path) -> None:
    model, settings = read_model(ModelFolder(folder)), replace(SETTINGS, tensor_parallel=2)
    with run_of(model, settings) as run:
        run.prefill(0, list(range(20)), chunks=[])
        [process] = run.followers._processes
        process.kill()
        process.wait(PATIENCE_S)
        with pytest.raises(ExecutorLostError, match=r"tensor_parallel"):
            run.decode(0, 20, 3)
    with run_of(model, settings) as run:
        [process], [connection] = run.followers._processes, run.followers._connections
        connection.close()
        assert process.wait(PATIENCE_S) == 0


def test_a_rank_that_cannot_load_its_shard_is_noticed_at_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class MovedFolder(ModelFolder):
        """A folder that the other ranks do not find."""

        @property
        def name(self) -> str:
            return str(self.folder / "moved")

    model = read_model(MovedFolder(folder))
    with pytest.raises(ExecutorLostError, match=r"a rank of tensor_parallel is gone"):
        load_ranks(model, replace(SETTINGS, tensor_parallel=2), None)
    assert "quire: a rank of tensor_parallel has failed: " in capfd.readouterr().err


def test_products_that_depend_on_the_width_of_a_matrix_are_refused(tmp_path: Path) -> None:
    model = model_in(tmp_path, CASES["forms"]["llama"])
    spec, rank = shard_of(model.spec, 2), Rank(1, 2)
    reader = ShardReader(WeightReader(model.spec, model.source.tensors(), "float32", "auto"), rank)
    weights = marked(TorchWeights.load(spec, reader, torch.float32, torch.device("cpu")), spec, rank)
    require_same_bits(weights, product, rank)
    with pytest.raises(InvalidConfigError, match=r"tensor_parallel is 2; allowed: 1 with batch_invariant"):
        require_same_bits(weights, lambda rows, matrix: product(rows, matrix) + len(matrix.weight), rank)


def test_shards_together_are_the_whole_and_share_nothing(tmp_path: Path) -> None:
    model = model_in(tmp_path, CASES["forms"]["qwen2"])
    whole = WeightReader(model.spec, model.source.tensors(), "float32", "auto").layer(0)
    readers = [WeightReader(model.spec, model.source.tensors(), "float32", "auto") for _ in range(2)]
    shards = [ShardReader(reader, Rank(number, 2)).layer(0) for number, reader in enumerate(readers)]
    for part, piece in whole.items():
        pieces = [shard[part] for shard in shards]
        if part in SPLIT:
            assert np.array_equal(np.concatenate([each.weight for each in pieces]), piece.weight), part
            if piece.bias is not None:
                assert np.array_equal(np.concatenate([each.bias for each in pieces]), piece.bias), part
        else:
            assert all(np.array_equal(each.weight, piece.weight) for each in pieces), part


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"tensor_parallel": 4}, "a number that divides the model's 6 query heads"),
        ({"disk_cache": "/tmp/no-such-folder"}, "1 with a disk cache"),
        ({"kv_dtype": "int4"}, "1 with kv_dtype int4"),
        ({"adapter_memory": "1MiB"}, "1 with adapters"),
    ],
)
def test_settings_that_ranks_do_not_support_are_refused(settings: dict[str, Any], allowed: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        LLM("guide", backend="torch", device="cpu", **({"tensor_parallel": 2} | settings))
    assert str(caught.value) == f"tensor_parallel is {settings.get('tensor_parallel', 2)}; allowed: {allowed}"
