"""Adapters against PEFT: the logits of every position, for every family that can have them."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from quire.compute.adapters.folder import read_adapter
from quire.compute.adapters.places import ADAPTED
from quire.compute.models import read_model
from quire.compute.models.parts import Part
from quire.compute.models.source import ModelFolder
from support.adapted_model import AdaptedModel
from support.adapters import adapted_stems

OF_MLPS = {Part.GATE, Part.UP, Part.DOWN, Part.SHARED_GATE, Part.SHARED_UP, Part.SHARED_DOWN}
CHANGES: dict[str, dict[str, object]] = {  # no experts
    "nemotron-h": {"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
    "falcon-h1": {},
}
TOKENS = [(7 * i * i + 3 * i) % 64 for i in range(150)]


def adaptable() -> list[str]:
    """The families of `transformers_models`."""
    return [
        *("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm4-moe-lite", "minicpm3"),
        *("cohere", "cohere2", "falcon", "gemma2", "gemma3", "glm", "glm4", "gpt-neox", "gpt-oss", "gpt2", "granite"),
        *("llama", "llama-2", "mistral", "olmo2", "olmo3", "opt", "opt-350m", "phi", "phi3", "qwen2", "qwen3-moe"),
        *("gemma", "glm4-moe", "granite-moe", "mixtral", "olmoe", "qwen2-moe"),
        *("ernie4-5", "ministral3", "seed-oss", "smollm3", "stablelm", "starcoder2"),
        *("arcee", "ernie4-5-moe", "exaone4", "granite-hybrid", "granite-moe-shared", "hunyuan", "phimoe"),
        *("granite4-h", "nemotron-h", "hunyuan-moe", "youtu", "falcon-h1"),
        *("qwen3-next", "qwen3-5", "qwen3-5-moe", "gemma4", "gemma4-keys", "gemma4-moe", "gemma4-unified", "lfm2"),
        "lfm3",
    ]


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")  # of PEFT and transformers about each other
@pytest.mark.parametrize(("name", "has_root_scale"), list(zip(adaptable(), cycle([False, True]), strict=False)))
def test_logits_are_those_of_peft(name: str, has_root_scale: bool, tmp_path: Path) -> None:
    import peft
    import torch

    from support import transformers_models

    model = transformers_models.small_model(name, **CHANGES.get(name, {}))
    transformers_models.save(model, tmp_path / "base")
    spec = read_model(ModelFolder(tmp_path / "base"), len(TOKENS)).spec
    # PEFT takes the names of an MLP for those of experts too, where there are any: these are parameters.
    parts = ADAPTED if spec.experts is None else ADAPTED & spec.layer_parts(spec.layers[0]).keys() - OF_MLPS
    if name in CHANGES:
        parts -= {Part.MAMBA_OUTPUT}  # PEFT refuses it for these families
    modules = sorted({stem.rpartition(".")[2] for stem in adapted_stems(spec, parts)})  # g_proj: LFM3's other name
    parameters = [] if spec.experts is None else ["experts.gate_up_proj", "experts.down_proj"]
    torch.manual_seed(5)
    config = peft.LoraConfig(
        **{"r": 6, "lora_alpha": 9, "target_modules": [*modules, "g_proj"], "target_parameters": parameters or None},
        init_lora_weights=False,
        **{"use_rslora": has_root_scale, "rank_pattern": {modules[0]: 3}, "alpha_pattern": {modules[-1]: 4}},
    )
    plain = transformers_models.all_logits(model, TOKENS)
    tuned = peft.get_peft_model(model, config)
    tuned.save_pretrained(str(tmp_path / "tune"))
    expected = transformers_models.all_logits(tuned, TOKENS)
    adapter = read_adapter(tmp_path / "tune", spec, 32)
    assert parameters == [] or {Part.EXPERT_GATE, Part.EXPERT_DOWN} <= {each.place.part for each in adapter.matrices}
    ours = AdaptedModel(tmp_path / "base", spec)
    ours.load(adapter)
    found, base = ours.logits([TOKENS, TOKENS], [adapter.digest, ""])
    scale = max(1.0, float(np.abs(expected).max()))
    assert np.abs(found - expected).max() <= 2e-4 * scale
    assert np.abs(base - plain).max() <= 2e-4 * scale
    assert np.abs(expected - plain).max() > 1e-2


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
def test_experts_by_their_old_names_are_those_of_peft(tmp_path: Path) -> None:
    """PEFT makes two parameters of gate_proj, up_proj and down_proj, and doubles the rank of the first."""
    import peft
    import torch

    from support import transformers_models

    model = transformers_models.small_model("qwen3-moe")
    transformers_models.save(model, tmp_path / "base")
    spec = read_model(ModelFolder(tmp_path / "base"), len(TOKENS)).spec
    torch.manual_seed(5)
    names = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=6, lora_alpha=9, target_modules=names, init_lora_weights=False)
    tuned = peft.get_peft_model(model, config)
    tuned.save_pretrained(str(tmp_path / "tune"))
    expected = transformers_models.all_logits(tuned, TOKENS)
    adapter = read_adapter(tmp_path / "tune", spec, 32)
    assert {each.rank for each in adapter.matrices} == {6, 12}
    ours = AdaptedModel(tmp_path / "base", spec)
    ours.load(adapter)
    (found,) = ours.logits([TOKENS], [adapter.digest])
    assert np.abs(found - expected).max() <= 2e-4 * max(1.0, float(np.abs(expected).max()))
