"""Two processes that share every matrix: the bits of one, whatever happens to blocks; an end if one of them dies."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import distributed

from quire import LLM, SamplingParams
from quire.compute.models import ModelDescription, read_model
from quire.compute.models.source import ModelFolder
from quire.compute.torch.load import load_model
from quire.compute.torch.parallel.frames import Begin, Inbox, Ready, send_frame
from quire.compute.torch.parallel.group import RankGroup
from quire.compute.torch.parallel.loading import require_same_bits, split_matrices
from quire.compute.torch.parallel.ranks import Followers, load_ranks
from quire.compute.torch.parallel.shards import SPLIT, ShardReader, marked
from quire.compute.torch.parallel.split import Rank, shard_of
from quire.compute.torch.products import product
from quire.compute.torch.settings import TorchSettings, kv_cache_spec
from quire.compute.torch.weights import TorchWeights
from quire.compute.weights.decoder_weights import WeightReader
from quire.compute.worker.worker import Worker
from quire.core.errors import ExecutorLostError, InvalidConfigError
from quire.core.python_process import start_python
from support.forked_ranks import fork_follower
from support.image_jobs import run, workload
from support.recorded_ranks import compute_as_on_gpus
from support.reference_runs import ReferenceRun
from support.served_process import ServedProcess, served_process
from support.step_plans import PlanDriver, Work
from support.tiny_checkpoint import write_tiny_llama, write_tiny_qwen3
from support.torch_runs import EveryLogit
from support.vision_models import SETTINGS as SETTINGS_OF_IMAGES
from support.vision_models import write_vision_model
from support.waiting import wait_until

DATA = Path(__file__).parent.parent / "golden" / "data" / "families"
CASES: dict[str, Any] = json.loads((DATA / "cases.json").read_text())
FORMS = (
    *("llama", "qwen2", "gemma3", "gpt2", "falcon", "opt-350m", "cohere", "qwen3-moe", "gpt-oss"),
    *("gemma", "gemma4", "gemma4-keys", "gemma4-moe", "glm4-moe", "granite-moe", "ministral3", "mixtral", "qwen2-moe"),
    *("arcee", "ernie4-5-moe", "exaone4", "granite-hybrid", "granite-moe-shared", "hunyuan", "phimoe", "llama4"),
)
"""Tied heads and others, biases, windows and soft caps, MLPs without a gate, parallel sublayers, narrow embeddings, one
key for all queries, norms of each head; experts, also with biases and sinks."""
KINDS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in FORMS),
    *((name, {"dtype": "bfloat16"}) for name in ("llama", "gemma3", "qwen3-moe")),
    ("qwen3-moe", {"weights": "int8"}),
    ("llama", {"kv_dtype": "int4"}),
]
SETTINGS = TorchSettings(device="cpu", dtype="float32", batch_invariant=True, num_threads=2, max_model_len=96)
PATIENCE_S = 300
BLOCK_BYTES = 16 * 3 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, heads, numbers, bytes


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


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what followers compute. Tests of how they start and end start them as `ranks` does."""
    monkeypatch.setattr("quire.compute.torch.parallel.ranks.start_python", fork_follower)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("name", "changed"), KINDS)
def test_ranks_compute_the_logits_of_one_to_the_bit(name: str, changed: dict[str, Any], tmp_path: Path) -> None:
    require_same_logits(model_in(tmp_path, CASES["forms"][name]), **changed)


@pytest.mark.usefixtures("forked")
def test_a_vocabulary_that_cannot_be_divided_is_computed_by_each_rank(tmp_path: Path) -> None:
    folder = write_tiny_qwen3(tmp_path, tie=False, settings={"vocab_size": 129, "num_hidden_layers": 2})
    require_same_logits(read_model(ModelFolder(folder)))


@pytest.mark.usefixtures("forked")
def test_two_of_four_ranks_have_the_same_keys(folder: Path) -> None:
    require_same_logits(read_model(ModelFolder(folder), 96), tensor_parallel=4)


def require_same_logits(model: ModelDescription, *, tensor_parallel: int = 2, **changed: Any) -> None:
    settings = replace(SETTINGS, **changed)
    alone, text = logits_of(model, settings)
    together, same = logits_of(model, replace(settings, tensor_parallel=tensor_parallel))
    assert text == same
    assert alone.keys() == together.keys()
    assert len(alone) >= 40 + 6 + 23
    for place, logits in alone.items():
        assert np.array_equal(logits, together[place]), place


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", ["gpt2", "qwen3-moe", "gpt-oss"])
def test_sums_over_ranks_take_half_of_the_exchanges_and_are_nearly_those_of_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counter[str]()

    def counted(exchange: Any) -> Any:
        def exchanged(group: RankGroup, rows: torch.Tensor) -> torch.Tensor:
            counts[exchange.__name__] += 1
            found: torch.Tensor = exchange(group, rows)
            return found

        return exchanged

    for exchange in (RankGroup.gather, RankGroup.sum):
        monkeypatch.setattr(RankGroup, exchange.__name__, counted(exchange))
    model, settings = model_in(tmp_path, CASES["forms"][name]), replace(SETTINGS, batch_invariant=False)
    alone, _ = logits_of(model, settings)
    num_steps, num_layers = 3 + 6 + 1, len(model.spec.layers)
    for sums, gathered, summed in (("gather", 4 * num_layers, 0), ("reduce", 0, 2 * num_layers)):
        counts.clear()
        both = replace(settings, tensor_parallel=2, tensor_parallel_sums=sums)
        together, _ = logits_of(model, both)
        once = 1  # ranks wait for each other when they have their weights
        assert counts == Counter(gather=once + num_steps * (gathered + 1)) + Counter(sum=num_steps * summed)
        for place, logits in alone.items():
            assert np.allclose(logits, together[place], rtol=1e-4, atol=1e-5), place


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


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("on_host", [{"swap_space": 32 * BLOCK_BYTES}, {"host_cache": 32 * BLOCK_BYTES}], ids=str)
def test_an_engine_of_two_ranks_copies_swaps_and_shares_blocks_as_one_does(folder: Path, on_host: Any) -> None:
    memory = {"kv_memory": 16 * BLOCK_BYTES, "preemption": "swap", **on_host}
    chunks = {"max_num_batched_tokens": 24, "max_num_seqs": 8}  # steps without logits among them
    assert texts(folder, **memory, **chunks, tensor_parallel=2) == texts(folder, **memory)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("kind", ["auto", "model"])
def test_guesses_of_any_kind_are_verified_by_all_ranks(kind: str, folder: Path, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
    guesses = str(write_tiny_llama(tmp_path, settings=sizes)) if kind == "model" else kind
    assert texts(folder, speculation=guesses, max_num_seqs=8, tensor_parallel=2) == texts(folder)


def test_recorded_steps_are_replayed_by_all_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    compute_as_on_gpus(monkeypatch.setattr)
    monkeypatch.setattr("quire.compute.torch.parallel.ranks.FOLLOWER", "support.recorded_ranks")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model, tokens = read_model(ModelFolder(folder)), []
    for num_ranks in (1, 2):
        settings = replace(SETTINGS, tensor_parallel=num_ranks)
        loaded = (load_model if num_ranks == 1 else load_ranks)(model, settings, None)
        parts = loaded.parts(16)
        worker = Worker(parts)
        request.addfinalizer(worker.shutdown)
        worker.start()
        driver = PlanDriver.over(worker.cache.spec, range(16))
        for row in range(3):
            driver.open(row, list(range(row, 30)))
        plans = [driver.plan(*(Work(row, 0, 30 - row, 1) for row in range(3)))]
        plans += [driver.plan(*(Work(row, 30 - row + step, 1, 1) for row in range(3))) for step in range(4)]
        for plan in plans:  # tokens of the step before are not known yet
            worker.submit(plan)
        tokens.append([worker.collect().tokens.tolist() for _ in plans])
        graphs: Any = getattr(parts.runner, "_runner", parts.runner)._graphs
        assert graphs.recorder.num_replayed == 4 + 5 * (num_ranks == 1)  # draws are recorded as well
    assert tokens[0] == tokens[1]
    assert len({tuple(each) for each in tokens[0]}) > 1


@pytest.mark.usefixtures("forked")
def test_rows_of_images_reach_all_ranks(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path, SETTINGS_OF_IMAGES["qwen3-vl"])  # with coordinates and rows for layers
    jobs = workload("qwen3-vl", read_model(ModelFolder(folder)), are_whole=True)[1:4]
    found = []
    for num_ranks in (1, 2):
        settings: dict[str, Any] = {"batch_invariant": True, "skip_tokenizer_init": True, "max_model_len": 300}
        settings["num_threads"] = num_ranks  # one for each: the bits of an encoder depend on it
        with LLM(folder, backend="torch", device="cpu", dtype="float32", tensor_parallel=num_ranks, **settings) as llm:
            found.append(run(llm, jobs))
    assert found[0] == found[1]


@pytest.mark.usefixtures("forked")
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
        connection.shutdown(socket.SHUT_RDWR)
        assert process.wait(PATIENCE_S) == 0


def test_a_result_is_not_taken_when_a_rank_is_gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs an exchange with a rank that is gone is ended, and leaves anything."""
    aborted: list[bool] = []

    class Nccl(distributed.ProcessGroupGloo):  # type: ignore[misc]
        """What has the place of NCCL in a torch for CPUs."""

        def __init__(self, store: Any, number: int, count: int, options: Any) -> None:
            super().__init__(store, number, count, options._timeout)

        Options = SimpleNamespace

        def abort(self) -> None:
            aborted.append(memory._followers._is_whole)

    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(
        "quire.compute.torch.parallel.ranks.RankGroup", lambda rank, meeting, device: RankGroup(rank, meeting, "cuda")
    )
    model, settings = read_model(ModelFolder(folder)), replace(SETTINGS, tensor_parallel=2)
    parts = load_ranks(model, settings, None).parts(16)
    memory: Any = parts.cache
    worker = Worker(parts)
    worker.start()
    try:
        driver = PlanDriver.over(worker.cache.spec, range(16))
        driver.open(0, list(range(20)))
        worker.submit(driver.plan(Work(0, 0, 20, 1)))
        [process] = memory._followers._processes
        process.kill()
        wait_until(lambda: bool(aborted))
        assert aborted == [False]
        with pytest.raises(ExecutorLostError, match="a rank of tensor_parallel is gone"):
            worker.collect()
    finally:
        worker.shutdown()


def test_an_engine_ends_when_a_rank_dies(folder: Path) -> None:
    settings = {"batch_invariant": True, "skip_tokenizer_init": True, "max_model_len": 96, "tensor_parallel": 2}
    with LLM(str(folder), backend="torch", device="cpu", dtype="float32", **settings) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0.0), use_tqdm=False)
        memory: Any = llm.engine._executor.cache  # type: ignore[attr-defined]
        [process] = memory._followers._processes
        process.kill()
        process.wait(PATIENCE_S)
        with pytest.raises(ExecutorLostError, match="a rank of tensor_parallel is gone"):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20, temperature=0.0), use_tqdm=False)


def test_a_text_of_a_server_goes_on_when_a_rank_is_killed(tmp_path: Path) -> None:
    flags = "--backend torch --device cpu --dtype float32 --batch-invariant --tensor-parallel 2 --max-model-len 256"
    with served_process(tmp_path, *flags.split()) as server:
        undisturbed = "".join(pieces_of(server))
        [engine] = server.engines
        children = " ".join(path.read_text() for path in Path(f"/proc/{engine}/task").glob("*/children")).split()
        [follower] = [pid for pid in children if b"parallel.follower" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        pieces = []
        for piece in pieces_of(server):
            pieces.append(piece)
            if len(pieces) == 2:
                os.kill(int(follower), signal.SIGKILL)
        assert "".join(pieces) == undisturbed
        assert server.engines != [engine]


def pieces_of(server: ServedProcess) -> Iterator[str]:
    """Yield the pieces of a sampled text as they come."""
    fields = {"prompt": "A block", "max_tokens": 120, "temperature": 0.9, "seed": 5, "ignore_eos": True, "stream": True}
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                yield event["choices"][0]["text"]


def test_a_follower_that_cannot_go_on_ends_when_its_leader_is_gone(folder: Path) -> None:
    code = (
        "import socket, sys, time; from quire.compute.torch.parallel import follower; follower.LEAVING_S = 0.0; "
        "follower.follow(socket.socket(fileno=int(sys.argv[1])), lambda begin: time.sleep(1e9), follower.leave)"
    )
    ours, theirs = socket.socketpair()
    with theirs:
        process = start_python("-c", code, str(theirs.fileno()), pass_fds=[theirs.fileno()])
    with ours:
        inbox = Inbox(ours, lambda: None)
        send_frame([ours], Begin(str(folder), replace(SETTINGS, tensor_parallel=2), 1, "nowhere"))
        assert isinstance(inbox.take(), Ready)
        assert process.poll() is None
        ours.shutdown(socket.SHUT_RDWR)
        assert process.wait(PATIENCE_S) == 1


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
    reader = ShardReader(WeightReader(model.spec, model.source.tensors(), "float32", "auto"), model.spec, rank)
    weights = marked(TorchWeights.load(spec, reader, torch.float32, torch.device("cpu")), spec, rank)
    matrices, like = split_matrices(weights, model.spec, rank), torch.empty(0)
    parts = {tuple(size for size, _ in matrix.parts) for matrix in matrices}
    assert parts == {(64, 32, 32), (32,), (48, 48), (64,)}  # heads, outputs to the hidden state, an MLP, logits
    require_same_bits(matrices, product, like)
    with pytest.raises(InvalidConfigError, match=r"tensor_parallel is 2; allowed: 1 with batch_invariant: on this "):
        require_same_bits(matrices, lambda rows, matrix: product(rows, matrix) + len(matrix.weight), like)


def test_shards_together_are_the_whole_and_share_nothing(tmp_path: Path) -> None:
    model = model_in(tmp_path, CASES["forms"]["qwen2"])
    whole = WeightReader(model.spec, model.source.tensors(), "float32", "auto").layer(0)
    readers = [WeightReader(model.spec, model.source.tensors(), "float32", "auto") for _ in range(2)]
    shards = [ShardReader(reader, model.spec, Rank(number, 2)).layer(0) for number, reader in enumerate(readers)]
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
        ({"disk_cache": "/tmp/no-such-folder"}, "1 with a disk cache, which would hold the heads of one rank only"),
        ({"adapter_memory": "1MiB"}, "1 with adapters, which are not split"),
    ],
)
def test_settings_that_ranks_do_not_support_are_refused(settings: dict[str, Any], allowed: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        LLM("guide", backend="torch", device="cpu", **({"tensor_parallel": 2} | settings))
    assert str(caught.value) == f"tensor_parallel is {settings.get('tensor_parallel', 2)}; allowed: {allowed}"
