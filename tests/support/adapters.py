"""Adapters with random weights, as PEFT saves them, and models that they are merged into: the oracle."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.compute.adapters.places import ADAPTED, IN_TURNS
from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import Part
from quire.compute.weights.decoder_weights import expected_tensors
from support.tiny_checkpoint import safetensors_bytes

Tensors = dict[str, NDArray[np.float32]]
PEFT = "base_model.model."


def adapted_stems(spec: DecoderSpec, parts: Collection[Part] = ADAPTED) -> dict[str, bool]:
    """Return the tensors of a model that can have an adapter, without `.weight`, and whether each is transposed."""
    experts = range(spec.experts.num_experts if spec.experts is not None else 0)
    if spec.delta is not None and spec.delta.outputs_in_turns:
        parts = set(parts) - IN_TURNS
    return {
        spec.sources[part].stem_of(index, expert): spec.sources[part].transposed
        for index, layer in enumerate(spec.layers)
        for expert in [0, *(experts if layer.sparse else ())]
        for part in [*spec.layer_parts(layer), *(spec.expert_parts() if layer.sparse else ())]
        if part in parts
    }


def adapter_tensors(
    spec: DecoderSpec, *, rank: int = 4, seed: int = 1, parts: Collection[Part] = ADAPTED, prefix: str = PEFT
) -> Tensors:
    """Return random A and B for every matrix of a model that can have them."""
    random, shapes, found = np.random.default_rng(seed), expected_tensors(spec), Tensors()
    for stem, is_transposed in adapted_stems(spec, parts).items():
        num_outputs, num_inputs = shapes[f"{stem}.weight"][:: -1 if is_transposed else 1]
        found[f"{prefix}{stem}.lora_A.weight"] = _random(random, rank, num_inputs)
        found[f"{prefix}{stem}.lora_B.weight"] = _random(random, num_outputs, rank)
    return found


def _random(random: np.random.Generator, rows: int, columns: int) -> NDArray[np.float32]:
    return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)


def write_adapter(
    folder: Path, tensors: Tensors, settings: Mapping[str, object] | None = None, *, dtype: str = "F32"
) -> Path:
    """Write the files of an adapter and return the folder; `settings` replace those of a plain one."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(((*tensor.shape, 4)[0] for name, tensor in tensors.items() if "lora_A" in name), 4)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": ["q_proj"],
        "lora_dropout": 0.05,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "base_model_name_or_path": "tiny",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | dict(settings or {})))
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors, dtype=dtype))
    return folder


def merged(weights: Mapping[str, NDArray[np.float32]], spec: DecoderSpec, adapter: Tensors, scale: float) -> Tensors:
    """Return the weights of a model with W + scale B A in place of W, computed in float64."""
    found = dict(weights)
    for stem, is_transposed in adapted_stems(spec).items():
        if (a := adapter.get(f"{PEFT}{stem}.lora_A.weight")) is None:
            continue
        change = scale * adapter[f"{PEFT}{stem}.lora_B.weight"].astype(np.float64) @ a.astype(np.float64)
        name = f"{stem}.weight"
        found[name] = (weights[name] + (change.T if is_transposed else change)).astype(np.float32)
    return found
