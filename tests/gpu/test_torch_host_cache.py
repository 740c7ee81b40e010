"""A cache on the host under the engine of torch: what the device evicted comes back, with the same bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from support.tiny_checkpoint import write_tiny_qwen3

DRAW = random.Random(4)
PROMPTS = [[DRAW.randrange(1, 120) for _ in range(70)] for _ in range(3)]
SAMPLING = SamplingParams(temperature=0.8, seed=5, max_tokens=6, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("model"))


def settings(device: str, **more: Any) -> dict[str, Any]:
    """Return the settings of an engine with the same bits whatever is in a step."""
    return {
        "backend": "torch",
        "device": device,
        "dtype": "float32",
        "batch_invariant": True,
        "skip_tokenizer_init": True,
    } | more


def answers(folder: Path, num_blocks: int, num_host_blocks: int, **more: Any) -> list[Any]:
    """Ask three prompts one after another, twice; return what was computed, and how many tokens came from the host."""
    with LLM(str(folder), max_model_len=96, **more) as probe:
        block_bytes = probe.report.plan.bytes_per_block
    sizes = {"kv_memory": num_blocks * block_bytes, "host_cache": num_host_blocks * block_bytes}
    with LLM(str(folder), max_model_len=96, **sizes, **more) as llm:
        outputs = [llm.generate([PROMPTS[turn % 3]], SAMPLING, use_tqdm=False)[0] for turn in range(6)]
        stats = llm.stats()
        assert stats.num_host_blocks == num_host_blocks
        assert stats.host_hit_tokens_total == sum(each.num_host_tokens for each in outputs)
    return [
        [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs],
        [(each.num_cached_tokens, each.num_host_tokens) for each in outputs],
    ]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_what_was_evicted_comes_back_from_the_host_to_the_same_bits(
    folder: Path, device: str, steps: int, kv_dtype: str
) -> None:
    more = settings(device, max_steps_under_way=steps, kv_dtype=kv_dtype)
    expected, without = answers(folder, 6, 0, **more)
    assert without == [(0, 0)] * 6, "six blocks hold one prompt"
    bits, hits = answers(folder, 6, 30, **more)
    assert bits == expected
    assert hits == [(0, 0)] * 3 + [(64, 64)] * 3


def test_device_host_and_disk_work_together(folder: Path, device: str, tmp_path: Path) -> None:
    more = settings(device, disk_cache=tmp_path, disk_cache_size="8MiB", disk_write="always")
    expected, hits = answers(folder, 6, 30, **more)
    assert hits == [(0, 0)] * 3 + [(64, 64)] * 3
    again, hits = answers(folder, 6, 30, **more)
    assert again == expected
    assert hits == [(64, 0)] * 3 + [(64, 64)] * 3, "from disk first, then from the host"
