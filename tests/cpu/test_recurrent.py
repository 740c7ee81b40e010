"""Models with recurrent layers: what is in the pool, what is hit, computed again and moved, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams, _native
from quire.compute.models import read_model
from quire.compute.models.recurrent import ConvolutionSpec, DeltaSpec, MambaSpec
from quire.compute.models.source import ModelFolder
from quire.core.errors import CheckpointError, InvalidConfigError
from quire.core.step import BlockCopy, BlockMove
from support.native_runs import FLOAT32, NativeRun
from support.reference_runs import ReferenceRun
from support.spec_models import PLAIN, RECURRENT, SPECS
from support.step_plans import Work
from support.tiny_granite import write_tiny_granite, write_tiny_nemotron
from support.tiny_lfm2 import write_tiny_lfm2
from support.tiny_recurrent import write_tiny_qwen3_5

LENGTH = 100
TOKENS = [(7 * i * i + 3 * i + 5) % 127 for i in range(LENGTH)]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ENGINES = ["reference", *_native.kernel_names()]
each_engine = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3_5(tmp_path_factory.mktemp("recurrent"))


WRITERS: dict[str, Callable[[Path], Path]] = {
    "delta": write_tiny_qwen3_5,
    "delta-20": partial(write_tiny_qwen3_5, linear_conv_kernel_dim=20),  # a filter wider than a block
    "mamba": write_tiny_granite,
    "convolution": write_tiny_lfm2,
    "convolution-20": partial(write_tiny_lfm2, conv_L_cache=20),
}


@pytest.fixture(scope="module", params=WRITERS.values(), ids=WRITERS)
def each_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with each kind of recurrent layers."""
    folder: Path = request.param(tmp_path_factory.mktemp("recurrent"))
    return folder


def make_run(folder: Path, engine: str, **settings: Any) -> ReferenceRun:
    if engine == "reference":
        return ReferenceRun(folder, **{"num_blocks": 64, **settings})
    return NativeRun(folder, settings=replace(FLOAT32, instruction_set=engine, num_threads=2), **settings)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_block_has_room_for_states_and_a_hit_ends_where_one_is(folder: Path, backend: str) -> None:
    """A record: two matrices of 16 × 16, four inputs of 64, one change of 50, rounded up to 64, and a count."""
    settings: dict[str, Any] = {"backend": backend, "dtype": "float32", "max_model_len": 160, "kv_memory": "1MiB"}
    record = 2 * 16 * 16 + 4 * 64 + 64 + 16
    with LLM(folder, skip_tokenizer_init=True, block_size=16, **settings) as llm:
        texts = [llm.generate([TOKENS[:count]], SAMPLING)[0] for count in (64, 64, 65, 63)]
        memory, cache = llm.engine.scheduler.memory, llm.engine._executor.cache  # type: ignore[attr-defined]
        of_tokens = 16 * 2 * 32 * 4
        assert memory.spec.recurrent_bytes == record * 4 < of_tokens
        assert memory.spec.bytes_per_block == 2 * 2 * of_tokens
        assert [group.recurrent for group in memory.spec.groups] == [False, True, True, True]
        assert sum(keys.nbytes + values.nbytes for keys, values in cache.places()) == (
            cache.num_blocks * memory.spec.bytes_per_block
        )
        memory.check()
    # The state after all 64 tokens lacks nothing, so the last token could not be computed from it.
    assert [text.num_cached_tokens for text in texts] == [0, 48, 64, 48]
    assert texts[0].outputs[0].token_ids == texts[1].outputs[0].token_ids


def test_blocks_are_as_large_as_a_state_unless_the_settings_say_otherwise(tmp_path: Path) -> None:
    wide = write_tiny_qwen3_5(tmp_path, linear_key_head_dim=64, linear_value_head_dim=64)
    record = 2 * 64 * 64 + 4 * 256 + 208 + 16
    of_types = (({}, 160), ({"dtype": "bfloat16"}, 304), ({"kv_dtype": "int8"}, 528), ({"block_size": 32}, 32))
    for settings, size in of_types:
        with LLM(wide, skip_tokenizer_init=True, kv_memory="2MiB", max_model_len=160, **settings) as llm:  # type: ignore[arg-type]
            spec = llm.engine.scheduler.memory.spec
            assert spec.recurrent_bytes == record * 4
            assert spec.block_size == size == llm.config.block_size
            assert spec.key_block_bytes == max(record * 4, size * 2 * spec.key_head_bytes)


@each_engine
def test_the_last_token_can_be_computed_again(each_folder: Path, engine: str) -> None:
    """Also where it is the first or the last of its block, and more than once."""
    whole, run = make_run(each_folder, engine), make_run(each_folder, engine)
    whole.prefill(0, TOKENS)
    run.driver.open(0, TOKENS)
    start = 0
    for end in (1, 2, 16, 17, 33, 48, 50, 97, LENGTH):
        run.step(Work(0, start, end - start))
        for _ in range(2):
            run.step(Work(0, end - 1, 1))
        start = end
    assert run.bits(0, LENGTH) == whole.bits(0, LENGTH)


@each_engine
def test_guesses_that_were_wrong_are_taken_back(each_folder: Path, engine: str) -> None:
    """Any number of guesses, any number of them right, within a block and beyond its end: the same bits."""
    plain = make_run(each_folder, engine)
    plain.driver.open(0, TOKENS[:14])
    text = plain.step(Work(0, 0, 14, 1)).tokens.tolist()
    while len(text) < 62:
        text += plain.step(Work(0, 13 + len(text), 1, 1)).tokens.tolist()
    run = make_run(each_folder, engine, spec=read_model(ModelFolder(each_folder)).spec.with_guesses(5))
    run.driver.open(0, TOKENS[:14])
    found = run.step(Work(0, 0, 14, 1)).tokens.tolist()
    for num_drafts, num_right in ((most, right) for most in range(6) for right in range(most + 1)):
        drafts = text[len(found) : len(found) + num_drafts]
        drafts[num_right:] = [(token + 1) % 127 for token in drafts[num_right:]]
        step = Work(0, 13 + len(found), 1 + num_drafts, 1, drafts)
        found += run.step(step).tokens.tolist()
        assert found == text[: len(found)] and len(found) - step.start + 13 == num_right + 1
    assert run.bits(0, 13 + len(found)) == plain.bits(0, 13 + len(found))


@each_engine
def test_a_state_that_does_not_end_before_the_next_token_gives_no_number(each_folder: Path, engine: str) -> None:
    run = make_run(each_folder, engine, num_blocks=128)
    for row, start in ((0, 18), (2, 19), (4, 21), (6, 25)):
        run.driver.open(row, TOKENS)
        run.driver.open(row + 1, TOKENS[3:])
        run.step(Work(row, 0, 20))
        result = run.step(Work(row, start, 4), Work(row + 1, 0, 30))
        assert set(result.failures) == ({row} if start != 19 else set()), f"start {start}"
        run.driver.release(row)
        run.driver.release(row + 1)


@each_engine
def test_a_full_block_has_nothing_of_what_was_in_it_before(each_folder: Path, engine: str) -> None:
    """It may go to disk, or to another machine, unlike the requests that had it before."""
    found = []
    for before in (0x11, 0x22):
        run = make_run(each_folder, engine)
        for array in (array for pair in run.worker.cache.places() for array in pair):  # type: ignore[attr-defined]
            array.view(np.uint8)[...] = before
        run.prefill(0, TOKENS)
        for group, index in ((group, index) for group in range(4) for index in range(LENGTH // 16)):
            buffer = bytearray(run.worker.cache.spec.bytes_per_block)
            run.worker.cache.read_block(run.driver.tables[0, group][index], group, memoryview(buffer))
            found.append(buffer)
    assert found[: len(found) // 2] == found[len(found) // 2 :]
    assert all(map(any, found))


@pytest.mark.parametrize("engine", ["reference", "portable"])
def test_states_that_were_copied_or_swapped_give_the_same_bits(each_folder: Path, engine: str) -> None:
    whole = make_run(each_folder, engine)
    whole.prefill(0, TOKENS)
    groups = range(4)
    run = make_run(each_folder, engine, blocks=range(64), num_host_blocks=16)
    run.driver.open(0, TOKENS)
    run.step(Work(0, 0, 40))
    held = {group: run.driver.tables[0, group][2] for group in groups}
    for group in groups:
        run.driver.set_block(0, group, 2, 60 + group)
    run.driver.open(1, TOKENS[:5])
    run.step(
        Work(1, 0, 5),
        moves_out=[BlockMove(held[group], group) for group in (0, 1)],
        copies=[BlockCopy(held[group], 60 + group) for group in (2, 3)],
    )
    run.step(Work(0, 40, LENGTH - 40), moves_in=[BlockMove(60 + group, group) for group in (0, 1)])
    assert run.bits(0, LENGTH) == whole.bits(0, LENGTH)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backend": "torch"}, r"native or reference: torch does not run linear attention yet"),
        ({"block_size": 24}, "block_size is 24; allowed: a multiple of 16"),
    ],
)
def test_what_does_not_work_with_states_is_refused(folder: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfigError, match=words):
        LLM(folder, skip_tokenizer_init=True, **settings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({}, "state-space layers"), ({"layers_block_type": ["full_attention", "mlp"]}, "layers with one sublayer")],
)
def test_nemotron_is_refused_on_torch(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=f"torch does not run {words}"):
        LLM(write_tiny_nemotron(tmp_path, **changes), backend="torch", skip_tokenizer_init=True)


def test_a_draft_model_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidConfigError, match="has recurrent layers"):
        LLM(folder, skip_tokenizer_init=True, speculation=str(folder))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"delta": None}, "one rule for recurrent layers"),
        ({"convolution": ConvolutionSpec(32, 3)}, "one rule for recurrent layers"),
        ({"layers": (replace(RECURRENT, attends=False, transforms=False),)}, "without a sublayer"),
        ({"layers": (replace(RECURRENT, attends=False),)}, "without attention and states"),
        ({"layers": (replace(RECURRENT, transforms=False),), "norm_after": True}, "around a missing sublayer"),
        ({"delta": None, "mamba": MambaSpec(3, 1, 16, 16, 4, PLAIN.norm)}, "3 in 1 groups"),
        ({"delta": None, "mamba": MambaSpec(4, 3, 16, 16, 4, PLAIN.norm)}, "4 in 3 groups"),
        ({"delta": None, "mamba": MambaSpec(4, 1, 8, 16, 4, PLAIN.norm)}, "numbers of a recurrent key head is 8"),
        ({"delta": None, "convolution": ConvolutionSpec(48, 3)}, "channels of a convolution is 48"),
        ({"parallel": True}, "recurrent, and full attention"),
        ({"delta": DeltaSpec(3, 3, 16, 16, 4, PLAIN.norm)}, "3 of values, 3 of keys"),
        ({"delta": DeltaSpec(6, 4, 16, 16, 4, PLAIN.norm)}, "6 of values, 4 of keys"),
        ({"delta": DeltaSpec(4, 2, 24, 16, 4, PLAIN.norm)}, "numbers of a recurrent key head is 24"),
        ({"delta": DeltaSpec(4, 2, 16, 8, 4, PLAIN.norm)}, "numbers of a recurrent value head is 8"),
    ],
)
def test_specs_that_no_engine_runs_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        replace(SPECS["recurrent"], **changes)


def test_a_sequence_takes_little_memory_for_its_states() -> None:
    """However long it is, a group of recurrent layers holds two blocks: the last state, and that of the next token."""
    spec = replace(SPECS["recurrent"], layers=(RECURRENT, RECURRENT)).kv_cache_spec(16)
    assert [spec.num_blocks_for(count) for count in (1, 16, 17, 1000)] == [1, 1, 2, 2]
    assert spec.bytes_per_token == 0
    assert np.isclose(spec.padding_fraction, 0.0)


def test_blocks_of_convolutions_have_few_tokens(tmp_path: Path) -> None:
    """A record: three inputs of 32 channels, and a count; a half has one."""
    folder = write_tiny_lfm2(tmp_path)
    with LLM(folder, skip_tokenizer_init=True, kv_memory="2MiB", max_model_len=160) as llm:
        spec = llm.engine.scheduler.memory.spec
        texts = [llm.generate([TOKENS[:count]], SAMPLING)[0] for count in (64, 64, 65, 63)]
    assert spec.recurrent_bytes == (3 * 32 + 16) * 4 and spec.block_size == 16
    assert [text.num_cached_tokens for text in texts] == [0, 48, 64, 48]
