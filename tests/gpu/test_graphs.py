"""Recorded decodes: the same bits as computed, whichever size is replayed, and when a step may be replayed at all.

Without a GPU what records computes anew (`support.recorders`), with attention in Triton's interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from quire.compute.adapters.folder import Adapter, read_adapter
from quire.compute.adapters.places import ADAPTED
from quire.compute.adapters.room import AdapterRoom
from quire.compute.models import read_model
from quire.compute.models.parts import Part
from quire.compute.models.source import ModelFolder
from quire.compute.sampling.draws import Draws
from quire.compute.torch.attention.base import StepBatch
from quire.compute.torch.attention.triton import TritonAttention
from quire.compute.torch.cache import TorchCache
from quire.compute.torch.count_table import Counted
from quire.compute.torch.decoder import DecoderOutputs
from quire.compute.torch.draw_graphs import DrawGraphs
from quire.compute.torch.graphs import PROMPT_SIZES, SIZES, StepGraphs
from quire.compute.torch.load import LoadedModel, load_decoder, load_model
from quire.compute.torch.rehearsal import largest_steps, rehearsed_draws
from quire.compute.torch.runner import TorchRunner
from quire.compute.torch.sampling import TorchSampler
from quire.compute.torch.settings import kv_cache_spec
from quire.compute.torch.step_upload import uploaded
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.decoder_weights import WeightReader
from quire.compute.worker.model_runner import StepInputs
from quire.compute.worker.worker import Worker
from quire.core.errors import CheckpointError, ExecutionError
from quire.core.sampling_params import SamplingParams
from support.adapters import adapter_tensors, write_adapter
from support.recorders import recorder_of
from support.step_plans import GREEDY, PlanDriver, Work
from support.tiny_checkpoint import write_tiny_qwen3
from support.tiny_gemma4 import FAR, NEAR, write_tiny_gemma4
from support.torch_runs import FLOAT32

pytestmark = pytest.mark.usefixtures("small_rooms")

PROMPT = [(5 * i * i + 3 * i + 1) % 126 for i in range(40)]
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"num_hidden_layers": 2},
    "windows": {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
}
MIXED = {"num_hidden_layers": 4, "layer_types": [NEAR, FAR, NEAR, FAR], "vocab_size": 126, "eos_token_id": 125}
"""Of a Gemma 4 whose last two layers attend to the keys and values of the first two."""
MAX_SEQUENCES = 4
ALL_NAN = pytest.mark.filterwarnings("ignore:All-NaN slice")
"""The interpreter's warning of a query that is not finite, in a tile whose keys it all sees."""


class Run:
    """A worker driven by hand, with recorded steps or without; with prompts up to `most` tokens.

    `adapters` are there from the start; there are as many slots, or `num_slots`.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        *,
        records: bool,
        adapters: Sequence[Adapter] = (),
        num_slots: int = 0,
        most: int = 0,
        invariant: bool = True,
    ) -> None:
        spec, where = read_model(ModelFolder(folder)).spec, torch.device(device)
        room = AdapterRoom.of(spec, 16, ADAPTED, 4, count=num_slots or len(adapters)) if num_slots or adapters else None
        settings = replace(FLOAT32, device=device, batch_invariant=invariant, graphs=False, adapter_room=room)
        kv_spec = kv_cache_spec(spec, settings)
        attention = TritonAttention(
            kv_spec, where, num_heads=spec.attention.num_heads, num_processors=4, batch_invariant=invariant
        )
        cache = TorchCache(kv_spec, attention, where, num_blocks=0)
        decoder = load_decoder(spec, WeightReader(spec, Checkpoint.open(folder), "float32"), settings, cache)
        parts = LoadedModel(decoder, cache, settings, frozenset()).parts(128)
        self.worker = Worker(parts)
        self.runner: TorchRunner = parts.runner  # type: ignore[assignment]
        self.recorder, self.draw_recorder = recorder_of(device), recorder_of(device)
        self.noted: list[tuple[int, int, str]] = []
        if records:
            self.runner._graphs = StepGraphs(decoder, self.recorder, MAX_SEQUENCES, most, note_loaded=self.note)
            self.runner._draw_graphs = DrawGraphs(decoder, self.draw_recorder, MAX_SEQUENCES)
        for adapter in adapters:
            self.runner.load_adapter(adapter)
        self.worker.start()
        for tensor in pools_of(self):
            tensor.zero_()
        self.driver = PlanDriver.over(self.worker.cache.spec, range(128))

    def note(self, count: int, total: int, what: str) -> None:
        self.noted.append((count, total, what))


def pools_of(run: Run) -> list[torch.Tensor]:
    """Return the memory of a run's layers."""
    pairs = run.worker.cache.pairs()  # type: ignore[attr-defined]
    return [tensor for pair in pairs.values() for tensor in (pair.keys, pair.values)]


@pytest.fixture(scope="module", params=[*SETTINGS, "mixed"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "mixed":
        return write_tiny_gemma4(tmp_path_factory.mktemp("mixed"), **MIXED)
    return write_tiny_qwen3(tmp_path_factory.mktemp(request.param), settings=SETTINGS[request.param])


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("model"), settings=SETTINGS["full"])


def steps_of(
    run: Run,
    num_rows: int,
    num_steps: int,
    adapters: Sequence[str] = (),
    sampling: Sequence[SamplingParams] = (GREEDY,),
) -> list[list[int]]:
    """Return the tokens of the prompts of so many rows, and of decodes of all of them."""
    for row in range(num_rows):
        run.driver.open(row, PROMPT[row:], sampling[row % len(sampling)], adapter=adapters[row] if adapters else "")
    run.worker.submit(run.driver.plan(*(Work(row, 0, 40 - row, 1) for row in range(num_rows))))
    for step in range(num_steps):
        run.worker.submit(run.driver.plan(*(Work(row, 40 - row + step, 1, 1) for row in range(num_rows))))
    return [run.worker.collect().tokens.tolist() for _ in range(1 + num_steps)]


@pytest.mark.parametrize("num_rows", [1, pytest.param(3, marks=pytest.mark.long), MAX_SEQUENCES])
def test_replayed_decodes_are_those_computed(num_rows: int, folder: Path, device: str) -> None:
    computed, replayed = Run(folder, device, records=False), Run(folder, device, records=True)
    num_sizes = len([size for size in SIZES if size < MAX_SEQUENCES]) + 1
    assert replayed.recorder.num_recorded == 2 * num_sizes
    assert replayed.noted == [(count, num_sizes, "graphs") for count in range(num_sizes + 1)]
    assert steps_of(replayed, num_rows, 3) == steps_of(computed, num_rows, 3)
    assert replayed.recorder.num_replayed == 3
    # What is in memory is the same as well: rows that count for nothing have stored nothing.
    for mine, theirs in zip(pools_of(replayed), pools_of(computed), strict=True):
        assert torch.equal(mine, theirs)


WARM = [
    GREEDY,
    SamplingParams(temperature=1.5, seed=3),
    SamplingParams(temperature=2.0, top_k=5, top_p=0.8, seed=4),
    SamplingParams(temperature=0.9, min_p=0.05, seed=5),
]


@pytest.mark.parametrize("num_rows", [1, 3, MAX_SEQUENCES])
def test_replayed_draws_are_those_launched(num_rows: int, full: Path, device: str) -> None:
    texts = []
    for records in (False, True):
        run = Run(full, device, records=records)
        run.runner._sampler = TorchSampler(run.runner.vocab_size)
        texts.append(steps_of(run, num_rows, 4, sampling=WARM[-num_rows:]))
    assert run.draw_recorder.num_recorded == 3  # of 1, 2, 4 draws
    assert run.draw_recorder.num_replayed == 5  # also after the prompts, which are not recorded
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "rule",
    [{"repetition_penalty": 1.7}, {"logit_bias": {5: 9.0}}, {"top_n_sigma": 1.0}],
    ids=["penalty", "bias", "top_n_sigma"],
)
def test_draws_with_rules_are_launched(rule: dict[str, Any], full: Path, device: str) -> None:
    """The last tokens that they leave on the device are those that a replayed step reads, and the other way round."""
    texts = []
    for records in (False, True):
        run = Run(full, device, records=records)
        run.runner._sampler = TorchSampler(run.runner.vocab_size)
        texts.append(steps_of(run, 2, 1, sampling=[WARM[1], replace(WARM[2], **rule)]))
        lengths = [41, 40]
        for rows in ((0,), (0, 1), (1,), (0,), (0, 1)):
            run.worker.submit(run.driver.plan(*(Work(row, lengths[row], 1, 1) for row in rows)))
            lengths = [length + (row in rows) for row, length in enumerate(lengths)]
        texts[-1] += [run.worker.collect().tokens.tolist() for _ in range(5)]
    assert run.draw_recorder.num_replayed == 2
    assert texts[0] == texts[1]


def test_replays_wait_for_moves_of_blocks(full: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves run beside steps, on a stream of their own, and a recording names no stream to wait for."""
    run = Run(full, device, records=True)
    events: list[str] = []
    cache, graphs = cast(TorchCache, run.worker.cache), run.runner._graphs
    assert graphs is not None
    await_moves, replay = cache.await_moves, graphs.run

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: object) -> object:
            events.append(name)
            return call(*arguments)

        return called

    monkeypatch.setattr(cache, "await_moves", noted("moves", await_moves))
    monkeypatch.setattr(graphs, "run", noted("step", replay))
    steps_of(run, 2, 2)
    assert run.recorder.num_replayed == 2
    assert [
        each for each, before in zip(events[1:], events, strict=False) if each == "step" and before != "moves"
    ] == []


def test_a_chunk_without_draws_replays_none(full: Path, device: str) -> None:
    run = Run(full, device, records=True)
    run.driver.open(0, PROMPT)
    run.worker.submit(run.driver.plan(Work(0, 0, 3)))
    assert run.worker.collect().num_tokens.tolist() == [0]
    assert (run.recorder.num_replayed, run.draw_recorder.num_replayed) == (1, 0)


@ALL_NAN
def test_a_replayed_row_whose_numbers_are_not_finite_fails_alone(full: Path, device: str) -> None:
    found = []
    for poisoned in (False, True):
        run = Run(full, device, records=True)
        steps_of(run, 3, 1)
        if poisoned:
            block = run.driver.tables[1, 0][0]
            for pool in pools_of(run):
                pool[block] = torch.nan
        run.worker.submit(run.driver.plan(*(Work(row, 41 - row, 1, 1) for row in range(3))))
        run.worker.submit(run.driver.plan(*(Work(row, 42 - row, 1, 1) for row in (0, 2))))
        found.append([run.worker.collect() for _ in range(2)])
    (whole, rest), (broken, rest_of_broken) = found
    assert dict(broken.failures) == {1: "the model's output is not finite"}
    assert broken.tokens.tolist() == [whole.tokens[0], whole.tokens[2]]
    assert rest.tokens == rest_of_broken.tokens


@pytest.mark.parametrize(
    ("folder", "invariant"),
    [("full", True), ("windows", True), ("mixed", True), ("mixed", False)],
    indirect=["folder"],
)
def test_replayed_steps_with_prompts_are_those_computed(invariant: bool, folder: Path, device: str) -> None:
    """Prompts alone, decodes beside chunks with and without a draw, and a step that has too many tokens."""
    found, pools = [], []
    for most in (0, 80):
        run = Run(folder, device, records=bool(most), most=most, invariant=invariant)
        found.append(steps_of(run, 2, 1))
        run.driver.open(2, PROMPT[3:])
        run.worker.submit(run.driver.plan(Work(0, 41, 1, 1), Work(1, 40, 1, 1), Work(2, 0, 20)))
        run.worker.submit(run.driver.plan(Work(0, 42, 1, 1), Work(2, 20, 17, 1)))
        run.driver.open(3, PROMPT)
        run.driver.open(4, PROMPT[1:])
        run.worker.submit(run.driver.plan(Work(1, 41, 1, 1), Work(2, 37, 1, 1), Work(3, 0, 40), Work(4, 0, 39)))
        found[-1] += [run.worker.collect().tokens.tolist() for _ in range(3)]
        pools.append(pools_of(run))
    assert run.recorder.num_recorded == 2 * 3 + 2 * 3  # of 1, 2, 4 tokens, and of 32, 64, 80, in two places each
    assert run.recorder.num_replayed == 4
    assert found[0] == found[1]
    for mine, theirs in zip(*pools, strict=True):
        assert torch.equal(mine, theirs) if invariant else torch.allclose(mine, theirs, atol=1e-5)


def test_sizes_may_follow_one_another_in_any_order(folder: Path, device: str) -> None:
    texts = []
    for records in (False, True):
        run = Run(folder, device, records=records)
        texts.append(steps_of(run, 4, 0))
        lengths = [40 - row for row in range(4)]
        for rows in (range(4), range(2), range(1, 4), range(1)):
            run.worker.submit(run.driver.plan(*(Work(row, lengths[row], 1, 1) for row in rows)))
            for row in rows:
                lengths[row] += 1
            texts[-1].append(run.worker.collect().tokens.tolist())
    assert texts[0] == texts[1]


def test_steps_with_guesses_are_replayed(folder: Path, device: str) -> None:
    """Right and wrong guesses, next to a row without any."""
    [[first], *rest] = steps_of(Run(folder, device, records=False), 1, 4)
    text = [first, *(token for [token] in rest)]
    computed, replayed = Run(folder, device, records=False), Run(folder, device, records=True)
    answers = []
    for run in (computed, replayed):
        steps_of(run, 2, 0)
        works = [
            [Work(0, 40, 3, 1, [text[1], text[2] ^ 1]), Work(1, 39, 1, 1)],
            [Work(0, 42, 2, 1, [text[3]])],
        ]
        for work in works:
            run.worker.submit(run.driver.plan(*work))
        answers.append([run.worker.collect() for _ in works])
    assert [result.tokens.tolist() for result in answers[0]] == [
        [*text[1:3], answers[0][0].tokens[2]],
        text[3:5],
    ]
    assert [each.tokens for each in answers[0]] == [each.tokens for each in answers[1]]
    assert replayed.recorder.num_replayed == 2
    for mine, theirs in zip(pools_of(replayed), pools_of(computed), strict=True):
        assert torch.equal(mine, theirs)


def test_only_short_steps_are_replayed(full: Path, device: str) -> None:
    run = Run(full, device, records=True)
    for row in range(2):
        run.driver.open(row, PROMPT)
    taken = 0
    for works, is_replayed in [
        ([Work(0, 0, 40, 1), Work(1, 0, 20)], False),
        ([Work(0, 40, 1, 1), Work(1, 20, 10)], False),
        ([Work(0, 41, 1, 1), Work(1, 30, 1)], True),  # one token of a prompt is as good
        ([Work(0, 42, 1, 1)], True),
        ([Work(1, 31, 6)], False),  # more tokens than the largest size
        ([Work(1, 37, 3, 1)], True),
        ([Work(0, 43, 1, 1), Work(1, 40, 1, 1)], True),
    ]:
        run.worker.submit(run.driver.plan(*works))
        run.worker.collect()
        assert (run.recorder.num_replayed > taken) == is_replayed
        taken = run.recorder.num_replayed


def test_a_step_without_room_in_the_recording_is_computed(
    full: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.compute.torch.graphs.MOST_TABLE_IDS", 8)  # blocks of 16: two decodes of 4 blocks
    run = Run(full, device, records=True)
    found = steps_of(run, 3, 2)
    assert run.recorder.num_replayed == 0
    assert steps_of(Run(full, device, records=False), 3, 2) == found
    run = Run(full, device, records=True)
    steps_of(run, 2, 2)
    assert run.recorder.num_replayed == 2


@ALL_NAN
@pytest.mark.parametrize("records", [False, True])
def test_halves_of_a_step_keep_their_own_failures(
    records: bool, full: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that does not fit is computed in halves, and both may be replayed in the same graph."""
    run = Run(full, device, records=records)
    steps_of(run, 4, 0)
    compute, computed = run.runner._compute, run.runner._computed
    sizes: list[int] = []

    def poisoned(inputs: StepInputs, cache: TorchCache) -> DecoderOutputs:
        if len(inputs.entries) == 4:
            for pool in pools_of(run):
                pool[int(inputs.block_tables[0][2][0])] = torch.nan
        return compute(inputs, cache)

    def narrow(inputs: StepInputs, cache: TorchCache) -> DecoderOutputs:
        if len(inputs.entries) > 2:
            raise torch.OutOfMemoryError
        sizes.append(len(inputs.entries))
        return computed(inputs, cache)

    monkeypatch.setattr(run.runner, "_compute", poisoned)
    monkeypatch.setattr(run.runner, "_computed", narrow)
    run.worker.submit(run.driver.plan(*(Work(row, 40 - row, 1, 1) for row in range(4))))
    assert list(run.worker.collect().failures) == [2]
    assert sizes == [2, 2] and run.recorder.num_replayed == 2 * records


def test_attention_that_cannot_be_recorded_is_launched(full: Path) -> None:
    parts = load_model(read_model(ModelFolder(full)), FLOAT32).parts(8)
    worker, runner = Worker(parts), cast(TorchRunner, parts.runner)
    noted: list[tuple[int, int, str]] = []
    runner._graphs = StepGraphs(runner._decoder, recorder_of("cpu"), 4, note_loaded=lambda *note: noted.append(note))
    worker.start()
    assert not runner._graphs._graphs and not noted


def test_more_decodes_than_the_largest_size_are_computed(full: Path, device: str) -> None:
    run = Run(full, device, records=True)
    found = steps_of(run, MAX_SEQUENCES + 1, 1)
    assert run.recorder.num_replayed == 0
    assert found == steps_of(Run(full, device, records=False), MAX_SEQUENCES + 1, 1)


def tuned(folder: Path, count: int) -> list[Adapter]:
    """Return adapters of a model; they change what it says."""
    spec = read_model(ModelFolder(folder)).spec
    return [
        read_adapter(write_adapter(folder / f"a{seed}", adapter_tensors(spec, seed=seed), {"lora_alpha": 32}), spec, 16)
        for seed in range(count)
    ]


@pytest.mark.parametrize("names", [(0, None, 1, 0), (0, 0, 0, 0), (None, 1, None, None)])
def test_replayed_decodes_with_adapters_are_those_computed(
    names: tuple[int | None, ...], full: Path, device: str
) -> None:
    adapters = tuned(full, 2)
    digests = ["" if name is None else adapters[name].digest for name in names]
    computed, replayed = (Run(full, device, records=records, adapters=adapters) for records in (False, True))
    num_sizes = len([size for size in SIZES if size < MAX_SEQUENCES]) + 1
    assert replayed.recorder.num_recorded == 2 * 2 * num_sizes
    assert replayed.noted[-1] == (2 * num_sizes, 2 * num_sizes, "graphs")
    found = steps_of(replayed, 4, 3, digests)
    assert found == steps_of(computed, 4, 3, digests)
    assert replayed.recorder.num_replayed == 3
    for mine, theirs in zip(pools_of(replayed), pools_of(computed), strict=True):
        assert torch.equal(mine, theirs)
    plain = steps_of(Run(full, device, records=True), 4, 3)
    for row, name in enumerate(names):
        assert ([step[row] for step in found] == [step[row] for step in plain]) == (name is None)


def test_slots_are_those_of_the_step_that_is_replayed(full: Path, device: str) -> None:
    first, second = (adapter.digest for adapter in tuned(full, 2))
    texts = []
    for records in (False, True):
        run = Run(full, device, records=records, adapters=tuned(full, 2))
        texts.append(steps_of(run, 4, 0, [first, "", second, first]))
        lengths = [40 - row for row in range(4)]
        for rows in ((0, 1, 2, 3), (2, 1), (3, 2, 0), (1,), (1, 2, 3)):
            run.worker.submit(run.driver.plan(*(Work(row, lengths[row], 1, 1) for row in rows)))
            texts[-1].append(run.worker.collect().tokens.tolist())
            lengths = [length + (row in rows) for row, length in enumerate(lengths)]
        assert run.recorder.num_replayed == (5 if records else 0)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("most", "names"), [(0, (0, None, 2, 0)), (0, (2, 2, 2, 2)), (80, (None, 1, 0, 2))])
def test_adapters_that_are_loaded_after_the_recording_are_replayed(
    most: int, names: tuple[int | None, ...], full: Path, device: str
) -> None:
    adapters = tuned(full, 3)
    digests = ["" if name is None else adapters[name].digest for name in names]
    computed = Run(full, device, records=False, adapters=adapters)
    replayed = Run(full, device, records=True, num_slots=3, most=most)
    num_recorded = replayed.recorder.num_recorded
    for adapter in adapters[::-1]:  # into other slots than those of the run to compare with
        replayed.runner.load_adapter(adapter)
    assert steps_of(replayed, 4, 3, digests) == steps_of(computed, 4, 3, digests)
    assert replayed.recorder.num_replayed == 3
    assert replayed.recorder.num_recorded == num_recorded
    for mine, theirs in zip(pools_of(replayed), pools_of(computed), strict=True):
        assert torch.equal(mine, theirs)


def test_a_slot_has_nothing_of_the_adapter_before(full: Path, device: str) -> None:
    first, second = tuned(full, 2)
    spec = first.spec
    few = read_adapter(write_adapter(full / "few", adapter_tensors(spec, rank=2, parts={Part.QUERY}, seed=9)), spec, 16)
    run, other = Run(full, device, records=True, num_slots=1), Run(full, device, records=False, num_slots=3)
    for adapter in (first, few, second):
        assert not run.runner.has_adapter(adapter.digest)
        found = []
        for each in (run, other):
            each.runner.load_adapter(adapter)
            found.append(steps_of(each, 2, 1, [adapter.digest, ""]))
            each.driver.release(0)
            each.driver.release(1)
        assert found[0] == found[1]
        run.runner.drop_adapter(adapter.digest)
    assert run.recorder.num_replayed == 3


def test_a_load_waits_for_a_slot(full: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tuned(full, 2)
    run = Run(full, device, records=False, num_slots=1)
    run.runner.load_adapter(first)
    load = threading.Thread(target=run.runner.load_adapter, args=(second,))
    load.start()
    run.runner.drop_adapter(first.digest)
    load.join(300)
    assert run.runner.has_adapter(second.digest) and not run.runner.has_adapter(first.digest)
    monkeypatch.setattr("quire.compute.torch.adapters.SLOT_WAIT_S", 0.0)
    with pytest.raises(ExecutionError, match="use all adapter slots"):
        run.runner.load_adapter(first)


def test_an_adapter_that_no_slot_has_room_for_is_refused(full: Path) -> None:
    adapter, spec = tuned(full, 1)[0], read_model(ModelFolder(full)).spec
    for rank, parts, words in ((16, {Part.QUERY}, "matrices for .*up"), (0, ADAPTED, "rank 4")):
        with pytest.raises(CheckpointError, match=words):
            AdapterRoom.of(spec, rank, parts, 4).require(adapter)


def test_sizes_reach_up_to_the_most_sequences_and_no_further() -> None:
    for most, expected in ((1, [1]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8]), (10_000, list(SIZES))):
        assert StepGraphs(None, None, most)._sizes == {False: expected, True: []}  # type: ignore[arg-type]
    for most, sizes in ((31, []), (32, [32]), (100, [32, 64, 100]), (10_000, list(PROMPT_SIZES))):
        assert StepGraphs(None, None, 1, most)._sizes[True] == sizes  # type: ignore[arg-type]


# --- the largest steps -----------------------------------------------------------------------------------------------


def test_the_largest_steps_are_as_large_as_they_may_be_and_store_nothing(full: Path, device: str) -> None:
    run = Run(full, device, records=False)
    settings = replace(FLOAT32, max_num_batched_tokens=200, max_num_seqs=24)
    steps = prompts, chunk, _, _, last, _ = largest_steps(run.worker.cache.spec, settings, context_length=90)
    assert [len(step.token_ids) for step in steps] == [198, 66, 66, 24, 1, 32]  # 3 prompts of 66 tokens
    assert [len(step.logit_indices) for step in steps] == [153, 1, 1, 24, 1, 32]
    assert prompts.positions.max() == 65 and last.positions.tolist() == [89]
    assert chunk.positions.tolist() == list(range(24, 90))
    run.runner._rehearsals = steps
    drawn: list[int] = []
    choose = run.runner._sampler.choose

    def noted(logits: torch.Tensor, draws: Draws, counted: Counted | None = None) -> torch.Tensor:
        drawn.append(len(draws))
        return choose(logits, draws, counted)

    run.runner._sampler.choose = noted  # type: ignore[method-assign]
    run.runner.prepare(run.worker.cache)  # type: ignore[arg-type]
    assert not any(tensor.any() for tensor in pools_of(run))
    assert drawn == [
        count for count in (3, 1, 1, 24, 1, 1) for _ in rehearsed_draws(count)
    ]  # what draws is compiled as well
    batches: list[StepBatch] = [uploaded(each, 16, torch.device(device)) for each in steps]
    assert [batch.shape.num_decodes for batch in batches] == [0, 0, 0, 24, 1, 0]
    assert [batch.shape.num_short for batch in batches] == [0, 0, 0, 24, 1, 0]
    assert np.array_equal(batches[3].logit_indices.cpu().numpy(), np.arange(24))


@pytest.mark.parametrize(
    ("context_length", "expected"),
    [
        (256, [256]),
        (512, [257, 512]),
        (513, [257, 513, 513]),
        (4096, [257, 513, 1025, 2049, 4096]),
        (131_072, [(256 << k) + 1 for k in range(9)] + [131_072]),
    ],
)
def test_decodes_of_twice_as_many_splits_are_rehearsed(context_length: int, expected: list[int], full: Path) -> None:
    spec = kv_cache_spec(read_model(ModelFolder(full)).spec, FLOAT32)
    decodes = largest_steps(spec, FLOAT32, context_length)[4:-1]
    assert [int(step.positions[0]) + 1 for step in decodes] == expected
    assert all(
        step.block_tables[0].shape[1] == -(-length // 16) for step, length in zip(decodes, expected, strict=True)
    )
