"""A disk cache under the engine of torch: a restart hits what was stored, and answers the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from support.tiny_checkpoint import write_tiny_qwen3
from support.tiny_gemma4 import write_tiny_gemma4

PREFIX = [(7 * i * i + 3 * i) % 126 for i in range(70)]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(("steps", "write"), [(1, write_tiny_qwen3), (2, write_tiny_qwen3), (2, write_tiny_gemma4)])
def test_a_restart_hits_what_the_engine_before_has_stored(
    steps: int, write: Callable[[Path], Path], device: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "model")

    def run(disk: Path | None) -> tuple[list[list[int]], list[int]]:
        with LLM(
            str(folder),
            backend="torch",
            device=device,
            dtype="float32",
            batch_invariant=True,
            skip_tokenizer_init=True,
            max_model_len=256,
            kv_memory="4MiB",
            max_steps_under_way=steps,
            disk_cache=disk,
            disk_cache_size="8MiB",
        ) as llm:
            outputs = [
                llm.generate([{"prompt_token_ids": [*PREFIX, tail]}], SAMPLING, use_tqdm=False)[0] for tail in (1, 2)
            ]
        return [list(output.outputs[0].token_ids) for output in outputs], [each.num_disk_tokens for each in outputs]

    expected, _ = run(None)
    assert run(tmp_path / "cache") == (expected, [0, 0])
    assert run(tmp_path / "cache") == (expected, [64, 0])
