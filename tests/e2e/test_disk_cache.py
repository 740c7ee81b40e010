"""A cache on disk: what one engine has computed, the next one hits, to the same bits."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.compute.worker.store.slot_file import SlotFile
from quire.core.errors import InvalidConfigError
from quire.memory.tiers.disk import DiskTier
from support.tiny_checkpoint import write_tiny_qwen3
from support.tiny_gemma4 import write_tiny_gemma4
from support.tiny_recurrent import write_tiny_qwen3_5

PREFIX = [random.Random(5).randrange(1, 60) for _ in range(70)]
SAMPLING = SamplingParams(max_tokens=6, temperature=0.8, seed=3, logprobs=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_qwen3(folder)
    return folder


def answers(model: Path, disk: Path | None, tails: Sequence[int], **settings: Any) -> list[RequestOutput]:
    """Start an engine, have it answer one request after another, and end it."""
    settings = {"kv_memory": "2MiB", "disk_cache_size": "8MiB", "skip_tokenizer_init": True} | settings
    with LLM(model, disk_cache=disk, **settings) as llm:
        return [llm.generate([{"prompt_token_ids": [*PREFIX, tail]}], SAMPLING)[0] for tail in tails]


def bits(outputs: Sequence[RequestOutput]) -> list[Any]:
    """Return all that was computed."""
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


@pytest.mark.parametrize("write", [write_tiny_qwen3_5, write_tiny_gemma4])
def test_a_restart_hits_stored_states_and_mixed_layers(write: Callable[[Path], Path], tmp_path: Path) -> None:
    model = write(tmp_path / "model")
    expected = bits(answers(model, None, (1, 2, 3)))
    first, second = (answers(model, tmp_path / "cache", (1, 2, 3)) for _ in range(2))
    assert bits(first) == bits(second) == expected
    assert [output.num_cached_tokens for output in first] == [0, 64, 64]
    assert [output.num_cached_tokens for output in second] == [64, 64, 64]


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_restart_hits_what_the_engine_before_has_stored(
    model: Path, tmp_path: Path, backend: str, kv_dtype: str
) -> None:
    settings = {"backend": backend, "kv_dtype": kv_dtype}
    expected = bits(answers(model, None, (1, 2, 3), **settings))
    first = answers(model, tmp_path / "cache", (1, 2, 3), **settings)
    second = answers(model, tmp_path / "cache", (1, 2, 3), **settings)
    assert bits(first) == bits(second) == expected
    assert [output.num_cached_tokens for output in first] == [0, 64, 64]
    assert [output.num_cached_tokens for output in second] == [64, 64, 64]


def test_only_what_was_hit_again_is_stored_unless_all_is(model: Path, tmp_path: Path) -> None:
    for write, expected in (("on_hit", 0), ("always", 64)):
        folder = tmp_path / write
        answers(model, folder, (1,), disk_write=write)
        assert answers(model, folder, (2,), disk_write=write)[0].num_cached_tokens == expected


def test_a_text_that_outlives_its_engine_ends_in_silence(model: Path, tmp_path: Path) -> None:
    """Its blocks are still to be stored, and nobody is left to store them."""
    llm = LLM(model, disk_cache=tmp_path, disk_write="always", kv_memory="2MiB", skip_tokenizer_init=True)
    stream = llm.stream([{"prompt_token_ids": PREFIX}], SAMPLING)
    next(stream)
    llm.close()
    stream.close()


@pytest.mark.parametrize("write", ["on_hit", "always"])
def test_a_prefix_is_stored_whole_however_little_may_wait_to_be_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    monkeypatch.setattr("quire.memory.tiers.disk.STORE_BYTES", 1)  # four blocks at a time
    text = [random.Random(6).randrange(1, 60) for _ in range(330)]
    settings: dict[str, Any] = {"kv_memory": "2MiB", "disk_write": write, "skip_tokenizer_init": True}
    with LLM(model, disk_cache=tmp_path, **settings) as llm:
        for tail in range(2):
            llm.generate([{"prompt_token_ids": [*text, tail]}], SAMPLING)
    with LLM(model, disk_cache=tmp_path, **settings) as llm:
        (output,) = llm.generate([{"prompt_token_ids": [*text, 3]}], SAMPLING)
    assert output.num_disk_tokens == 320


def test_a_disk_that_hangs_for_a_while_is_waited_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that ends asks every 2 ms: here 500 times, and no write has ended."""
    write, asked = SlotFile.write, threading.Event()
    ask, num_asked = DiskTier.ask, 0

    def count(disk: DiskTier) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 500:
            asked.set()
        ask(disk)

    def hang(*arguments: Any) -> None:
        assert asked.wait(60)
        write(*arguments)

    monkeypatch.setattr(DiskTier, "ask", count)
    monkeypatch.setattr(SlotFile, "write", hang)
    answers(model, tmp_path, (1, 2))
    assert answers(model, tmp_path, (3,))[0].num_cached_tokens == 64


@pytest.mark.parametrize(
    "settings", [{"block_size": 32}, {"dtype": "bfloat16"}, {"kv_dtype": "int8"}, {"backend": "reference"}]
)
def test_another_engine_never_sees_a_block(model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    answers(model, tmp_path, (1,), disk_write="always")
    other = answers(model, tmp_path, (1,), disk_write="always", **settings)
    assert other[0].num_cached_tokens == 0
    assert bits(other) == bits(answers(model, None, (1,), **settings))
    assert answers(model, tmp_path, (1,))[0].num_cached_tokens == 64


def test_other_weights_never_see_a_block(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_tiny_qwen3(other, seed=1)
    answers(model, tmp_path / "cache", (1,), disk_write="always")
    assert answers(other, tmp_path / "cache", (1,))[0].num_cached_tokens == 0


def test_a_damaged_store_is_a_miss(model: Path, tmp_path: Path) -> None:
    expected = bits(answers(model, tmp_path / "cache", (1,), disk_write="always"))
    for path in (tmp_path / "cache").glob("*/blocks.bin"):
        data = bytearray(path.read_bytes())
        for at in range(0, len(data), 512):
            data[at] ^= 1
        path.write_bytes(data)
    again = answers(model, tmp_path / "cache", (1,), disk_write="always")
    assert bits(again) == expected
    assert again[0].num_cached_tokens == 0


def test_two_engines_share_a_folder_and_no_file(model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kv_memory": "2MiB", "disk_cache_size": "8MiB", "skip_tokenizer_init": True}
    with LLM(model, disk_cache=tmp_path / "cache", **settings):
        assert answers(model, tmp_path / "cache", (1, 2))[1].num_cached_tokens == 64
    assert len(list((tmp_path / "cache").glob("*/blocks.bin"))) == 2


def test_settings_that_cannot_be_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, settings in {
        "disk_cache": {"disk_cache": tmp_path / "file"},
        "disk_cache_size": {"disk_cache": tmp_path / "cache", "disk_cache_size": 100},
        "disk_write": {"disk_write": "never"},
    }.items():
        with pytest.raises(InvalidConfigError, match=name):
            LLM(model, skip_tokenizer_init=True, **settings)
    for backend in ("native", "reference"):
        with pytest.raises(InvalidConfigError, match=r"host_cache is '1.0 MiB'.* raise kv_memory instead"):
            LLM(model, backend=backend, skip_tokenizer_init=True, host_cache="1MiB")
    with pytest.raises(InvalidConfigError, match=r"host_cache .* prefix caching"):
        LLM(model, skip_tokenizer_init=True, host_cache="1MiB", enable_prefix_caching=False)
    with pytest.raises(InvalidConfigError, match=r"disk_cache .* prefix caching"):
        LLM(model, skip_tokenizer_init=True, disk_cache=tmp_path / "cache", enable_prefix_caching=False)


def test_the_draft_model_finds_its_own_keys_too(model: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    write_tiny_qwen3(draft, seed=2, settings={"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    settings = {"speculation": str(draft)}
    expected = bits(answers(model, None, (1, 2), **settings))
    assert bits(answers(model, tmp_path / "cache", (1, 2), **settings)) == expected
    again = answers(model, tmp_path / "cache", (1, 2), **settings)
    assert bits(again) == expected
    assert again[0].num_cached_tokens == 64
    assert answers(model, tmp_path / "cache", (1,))[0].num_cached_tokens == 0, "blocks without a draft have other bytes"


def test_a_draft_model_reads_texts_of_blocks_from_disk_anew(model: Path, tmp_path: Path) -> None:
    """Its keys in them may be of another text; a model that is its own draft model would guess wrongly."""
    sampling = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    texts = []
    for _ in range(2):
        settings: dict[str, Any] = {"kv_memory": "2MiB", "disk_write": "always", "skip_tokenizer_init": True}
        with LLM(model, disk_cache=tmp_path, speculation=model, **settings) as llm:
            outputs = llm.generate([{"prompt_token_ids": PREFIX}, {"prompt_token_ids": [*PREFIX, 5]}], sampling)
            texts.append([output.outputs[0].token_ids for output in outputs])
            stats = llm.stats()
            assert stats.right_guesses["draft_model"] == stats.verified_guesses["draft_model"]
            assert sum(stats.right_guesses["draft_model"]) > 0
    assert texts[0] == texts[1] and outputs[0].num_cached_tokens == 64
