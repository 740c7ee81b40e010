"""Adapters, vectors and labels on torch: those of the reference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM
from quire.compute.adapters.folder import read_adapter
from quire.compute.adapters.places import ADAPTED
from quire.compute.adapters.room import AdapterRoom
from quire.compute.models import read_model
from quire.compute.models.parts import Part
from quire.compute.models.source import ModelFolder
from quire.core.errors import CheckpointError, InvalidRequestError
from support.adapters import adapter_tensors, merged, write_adapter
from support.reference_runs import ReferenceRun
from support.spec_models import ON_TORCH, SPECS, write_spec_model
from support.tiny_checkpoint import tiny_qwen3_config, tiny_qwen3_tensors, write_model_weights, write_tiny_qwen3
from support.torch_runs import FLOAT32, TorchRun

TOKENS = [(5 * i * i + 3 * i + 1) % 64 for i in range(40)]
PROMPTS = [[(7 * row + i * i) % 126 for i in range(10 + 9 * row)] for row in range(4)]


@pytest.mark.parametrize("name", ON_TORCH)
def test_logits_are_those_of_merged_weights(name: str, tmp_path: Path, device: str) -> None:
    spec = SPECS[name]
    weights = write_spec_model(tmp_path, spec)
    tensors = adapter_tensors(spec, rank=6)
    adapter = read_adapter(write_adapter(tmp_path / "tune", tensors, {"lora_alpha": 9}), spec, 16)
    (tmp_path / "merged").mkdir()
    write_model_weights(tmp_path / "merged", merged(weights, spec, tensors, 9 / 6))
    oracle, run = (
        ReferenceRun(tmp_path / "merged", spec=spec),
        TorchRun(
            tmp_path,
            spec=spec,
            settings=replace(FLOAT32, device=device, adapter_room=AdapterRoom.of(spec, 16, ADAPTED, 4, count=3)),
        ),
    )
    oracle.prefill(0, TOKENS)
    runner = run.runner._runner
    runner.load_adapter(adapter)
    run.worker._adapters.with_adapters = lambda inputs: replace(
        inputs, adapters=(adapter.digest,) * len(inputs.entries)
    )
    run.prefill(0, TOKENS, chunks=[1, 17])
    for position in range(len(TOKENS)):
        ours, theirs = run.logits[0, position], oracle.logits[0, position]
        assert np.abs(ours - theirs).max() <= 1e-3 * max(1.0, float(np.abs(theirs).max()))


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        kv_memory="2MiB",
        max_model_len=256,
        num_threads=1,
        **settings,
    )


def test_requests_with_adapters_and_without_are_computed_together(tmp_path: Path, device: str) -> None:
    base = write_tiny_qwen3(tmp_path / "base")
    spec = read_model(ModelFolder(base)).spec
    tensors = adapter_tensors(spec, rank=8)
    folder = write_adapter(tmp_path / "tune", tensors, {"lora_alpha": 16})
    weights = merged(tiny_qwen3_tensors(tiny_qwen3_config(), 0), spec, tensors, 2.0)
    write_model_weights(write_tiny_qwen3(tmp_path / "merged"), weights)
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "use_tqdm": False, "ignore_eos": True}

    def texts(llm: LLM, adapter: str | None = None) -> list[list[int]]:
        return [[*each.outputs[0].token_ids] for each in llm.generate(PROMPTS, adapter=adapter, **options)]

    with opened(tmp_path / "merged", backend="reference", device="cpu") as llm:
        tuned = texts(llm)
    with opened(base, backend="reference", device="cpu") as llm:
        plain = texts(llm)
    with opened(base, backend="torch", device=device, adapter={"tune": folder}) as llm:
        assert texts(llm, "tune") == tuned != plain == texts(llm)
        streams = [
            llm.stream([prompt], adapter=name, **{k: v for k, v in options.items() if k != "use_tqdm"})
            for prompt, name in zip(PROMPTS, ("tune", None, "tune", None), strict=True)
        ]
        found = [list(stream)[-1].outputs[0].token_ids for stream in streams]
        assert found == [tuned[0], plain[1], tuned[2], plain[3]]


def test_adapters_that_are_loaded_while_the_engine_runs_take_turns_in_its_slots(tmp_path: Path, device: str) -> None:
    base = write_tiny_qwen3(tmp_path / "base")
    spec = read_model(ModelFolder(base)).spec
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "use_tqdm": False, "ignore_eos": True}
    folders = {
        f"a{seed}": write_adapter(tmp_path / f"a{seed}", adapter_tensors(spec, seed=seed), {"lora_alpha": 32})
        for seed in range(3)
    }
    expected = {}
    for name, folder in folders.items():
        with opened(base, backend="torch", device=device, adapter={"tune": folder}) as llm:
            expected[name] = [[*each.outputs[0].token_ids] for each in llm.generate(PROMPTS, adapter="tune", **options)]
    memory = 2 * AdapterRoom.of(spec, 16, ADAPTED, 4).slot_bytes
    settings = {"max_adapter_rank": 16, "adapter_memory": memory}
    with opened(base, backend="torch", device=device, **settings) as llm:
        for name, folder in folders.items():
            llm.load_adapter(name, folder)
        for name in ("a0", "a1", "a2", "a0", "a2"):
            found = [[*each.outputs[0].token_ids] for each in llm.generate(PROMPTS, adapter=name, **options)]
            assert found == expected[name]
        llm.unload_adapter("a1")
        with pytest.raises(InvalidRequestError):
            llm.generate(PROMPTS, adapter="a1", **options)
    few = {"tune": write_adapter(tmp_path / "few", adapter_tensors(spec, parts={Part.QUERY}))}
    refused = pytest.raises(CheckpointError, match="adapter_memory")
    with opened(base, backend="torch", device=device, adapter=few) as llm, refused:
        llm.load_adapter("a0", folders["a0"])


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("changes", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 2}])
def test_vectors_are_those_of_the_reference(pooling: str, changes: dict[str, Any], tmp_path: Path, device: str) -> None:
    base = write_tiny_qwen3(tmp_path / "base")
    with opened(base, backend="reference", device="cpu", pooling=pooling) as llm:
        expected = [each.embedding for each in llm.embed(PROMPTS, use_tqdm=False)]
    with opened(base, backend="torch", device=device, pooling=pooling, **changes) as llm:
        assert np.allclose([each.embedding for each in llm.embed(PROMPTS, use_tqdm=False)], expected, atol=1e-4)
        again = [each.embedding for each in llm.embed(PROMPTS[::-1], use_tqdm=False)][::-1]
        assert np.allclose(again, expected, atol=1e-4), "also with cached prefixes"


def test_labels_are_those_of_the_reference(tmp_path: Path, device: str) -> None:
    config = tiny_qwen3_config(tie=False) | {"architectures": ["Qwen3ForSequenceClassification"]}
    folder = write_tiny_qwen3(tmp_path, tie=False)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tiny_qwen3_tensors(config, 0)
    del tensors["lm_head.weight"]
    tensors["score.weight"] = np.random.default_rng(3).standard_normal((2, 64)).astype(np.float32) / 8
    write_model_weights(folder, tensors)
    found = []
    for backend, where in (("reference", "cpu"), ("torch", device)):
        with opened(folder, backend=backend, device=where) as llm:
            found.append([list(each.shares.values()) for each in llm.classify(PROMPTS, use_tqdm=False)])
    assert np.allclose(*found, atol=1e-5)
