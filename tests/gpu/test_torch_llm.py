"""Whole engines on torch: the texts of the reference, with steps under way, full memory, swap and cached prefixes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from support.guesses import verify_all_guesses
from support.tiny_checkpoint import write_tiny_qwen3
from support.tiny_gemma4 import write_tiny_gemma4

BLOCK_BYTES = 16 * 3 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, heads, numbers, bytes
PREFIX = [(7 * i * i + 3 * i) % 126 for i in range(50)]
PROMPTS = [PREFIX[: 5 * row] + [(11 * row + i * i) % 126 for i in range(12 + 3 * row)] for row in range(11)]
SAMPLING = [SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)] * 5 + [
    SamplingParams(temperature=1.2, top_p=0.9, seed=1, max_tokens=25),
    SamplingParams(temperature=0.8, top_k=20, seed=2, max_tokens=40),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=20),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, penalty_window=6, max_tokens=20),
    SamplingParams(temperature=1.0, seed=4, n=2, max_tokens=20),
    SamplingParams(temperature=0.0, logprobs=3, max_tokens=10),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


def texts(folder: Path, **settings: Any) -> list[list[list[int]]]:
    with LLM(
        str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=256, num_threads=1, **settings
    ) as llm:
        verify_all_guesses(llm)
        outputs = llm.generate(PROMPTS, SAMPLING, use_tqdm=False)
        again = llm.generate(PROMPTS[::-1], SAMPLING[::-1], use_tqdm=False)[::-1]
        assert (llm.engine.stats().num_right_guesses > 50) == ("speculation" in settings)
    found = [[[*each.token_ids] for each in output.outputs] for output in outputs]
    assert [[[*each.token_ids] for each in output.outputs] for output in again] == found
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[list[int]]]:
    return texts(folder, backend="reference", device="cpu", kv_memory=256 * BLOCK_BYTES)


SHORT = {("ample", 3), ("tight", 2), ("swap", 1), ("swap", 3), ("guesses", 2)}


@pytest.mark.parametrize(
    ("memory", "steps"),
    [
        pytest.param(*case, marks=[] if case in SHORT else pytest.mark.long)
        for case in itertools.product(("ample", "tight", "swap", "guesses"), (1, 2, 3))
    ],
)
def test_texts_are_those_of_the_reference(
    memory: str, steps: int, folder: Path, device: str, expected: list[list[list[int]]]
) -> None:
    limits = {
        "ample": {},
        "tight": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
        "swap": {"swap_space": 64 * BLOCK_BYTES},
        "guesses": {"speculation": "auto", "max_num_seqs": 4},
    }[memory]
    num_blocks = 20 if memory in ("tight", "swap") else 256
    found = texts(
        folder,
        backend="torch",
        device=device,
        batch_invariant=True,
        kv_memory=num_blocks * BLOCK_BYTES,
        max_steps_under_way=steps,
        **limits,
    )
    assert found == expected


def test_texts_of_layers_that_differ_are_those_of_the_reference(tmp_path: Path, device: str) -> None:
    """Prompts are cut, sequences are preempted and swapped, and prefixes shared; no text changes."""
    folder = write_tiny_gemma4(tmp_path)
    expected = texts(folder, backend="reference", device="cpu", kv_memory="8MiB")
    settings: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "swap_space": "1MiB"}
    assert texts(folder, backend="torch", device=device, batch_invariant=True, kv_memory="1MiB", **settings) == expected


@pytest.mark.parametrize("kv_dtype", ["k8v4", "int4"])
def test_texts_with_4_bits_are_those_of_the_reference(kv_dtype: str, folder: Path, device: str) -> None:
    """Whatever the memory: the engine cuts prompts, preempts, swaps and shares prefixes, and no text changes."""
    settings: dict[str, Any] = {"kv_dtype": kv_dtype, "max_num_batched_tokens": 24, "max_num_seqs": 8}
    settings |= {"kv_memory": 6 * BLOCK_BYTES, "swap_space": 20 * BLOCK_BYTES}
    expected = texts(folder, backend="reference", device="cpu", kv_dtype=kv_dtype, kv_memory=256 * BLOCK_BYTES)
    assert texts(folder, backend="torch", device=device, batch_invariant=True, **settings) == expected
