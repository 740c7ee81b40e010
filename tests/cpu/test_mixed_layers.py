"""Layers with other heads, and with the keys of others: their memory, and the rows that they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quire import LLM, RequestOutput, SamplingParams, _native
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.native.backend import NativeBackend
from quire.compute.weights.decoder_weights import weight_bytes
from quire.core.config import EngineConfig
from quire.core.errors import CheckpointError
from quire.core.kv_spec import KVHeads
from support.spec_models import FULL, NEAR, PLAIN, SPECS
from support.tiny_gemma3n import write_tiny_gemma3n
from support.tiny_gemma4 import write_tiny_gemma4

PROMPTS = [[(7 * i * i + 3 * i + shift) % 120 for i in range(length)] for shift, length in ((1, 5), (2, 60), (3, 131))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma4(tmp_path_factory.mktemp("gemma4"))


def generated(folder: Path, prompt_logprobs: int | None, **settings: object) -> list[RequestOutput]:
    """Return the texts after all prompts, by an engine that stores no prefixes."""
    sampling = SamplingParams(temperature=0.0, max_tokens=6, logprobs=4, prompt_logprobs=prompt_logprobs)
    with LLM(folder, skip_tokenizer_init=True, kv_memory="4MiB", enable_prefix_caching=False, **settings) as llm:  # type: ignore[arg-type]
        return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)


@pytest.mark.parametrize("instruction_set", _native.kernel_names())
@pytest.mark.parametrize(
    ("write", "dtype"),
    [(write_tiny_gemma4, "float32"), (write_tiny_gemma4, "bfloat16"), (write_tiny_gemma3n, "bfloat16")],
)
def test_rows_that_nobody_wants_change_no_other_row(
    write: Callable[[Path], Path], dtype: str, instruction_set: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With log-probabilities of prompts the last layers compute all rows, else only the last of each prompt."""
    folder = write(tmp_path)
    monkeypatch.setenv("QUIRE_ISA", instruction_set)
    expected = generated(folder, 0, dtype=dtype, num_threads=1)
    for settings in ({}, {"max_num_batched_tokens": 24, "max_num_seqs": 8}):
        found = generated(folder, None, dtype=dtype, num_threads=2, **settings)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
            assert ours.outputs[0].logprobs == theirs.outputs[0].logprobs


def test_layers_with_the_keys_of_others_take_no_memory(tmp_path: Path) -> None:
    folder = write_tiny_gemma4(tmp_path)
    spec = read_model(ModelFolder(folder)).spec.kv_cache_spec(16, "bfloat16")
    assert sorted(layer for group in spec.groups for layer in group.layers) == list(range(6))
    wide = [group for group in spec.groups if group.heads == KVHeads(2, 64)]
    assert [(group.layers, group.window) for group in wide] == [((3, 5), None)]
    assert spec.bytes_per_token == 4 * 2 * 2 * 32 * 2 + 2 * 2 * 2 * 64 * 2


@pytest.mark.parametrize(("dtype", "is_mapped"), [("float32", True), ("bfloat16", False)])
def test_the_table_of_layer_inputs_takes_memory_only_as_a_copy(folder: Path, dtype: str, is_mapped: bool) -> None:
    model = read_model(ModelFolder(folder))
    backend = NativeBackend.of(EngineConfig(model=str(folder), dtype=dtype).resolved(None), model)
    table = 128 * 8 * 16 * (4 if dtype == "float32" else 2)
    assert (
        backend.facts.weight_bytes == weight_bytes(model.spec, dtype, compact=backend.facts.compact) - is_mapped * table
    )


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((NEAR, replace(NEAR, keys_of=1)), "an earlier layer"),
        ((NEAR, replace(FULL, keys_of=0)), "the same window and heads"),
        ((NEAR, replace(NEAR, heads=KVHeads(1, 32), keys_of=0)), "the same window and heads"),
        ((NEAR, replace(NEAR, keys_of=0), replace(NEAR, keys_of=1)), "the same window and heads"),
        ((replace(NEAR, heads=KVHeads(3, 16)), NEAR), "a multiple of the 3 kv heads"),
    ],
)
def test_a_layer_shares_only_with_one_like_it(layers: tuple[object, ...], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        replace(PLAIN, layers=layers)


def test_sizes_that_engines_cannot_read_are_refused() -> None:
    inputs = SPECS["mixed-layers"].layer_inputs
    assert inputs is not None
    with pytest.raises(CheckpointError, match="a multiple of 16"):
        replace(PLAIN, layer_inputs=replace(inputs, size=8))
    with pytest.raises(CheckpointError, match="norms of values"):
        replace(PLAIN, attention=replace(PLAIN.attention, value_norm=True))
    with pytest.raises(CheckpointError, match="other heads next to latents"):
        replace(SPECS["latent"], layers=(replace(FULL, rope=None, heads=KVHeads(1, 16)),) * 2)
    experts = SPECS["own-norms"].experts
    assert experts is not None
    with pytest.raises(CheckpointError, match="a weight and a norm"):
        replace(SPECS["own-norms"], experts=replace(experts, shared_router=True))
