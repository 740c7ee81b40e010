"""Writes tests/golden/data: tiny models, and their logits by transformers.

Needs torch and transformers:  python scripts/make_goldens.py [qwen3] [families] [encoders] [rope]
Small quantised matrices, which need bitsandbytes and compressed-tensors too:  python scripts/make_goldens.py quantized
Weights are rounded to bfloat16 to save space. One file of weights serves all forms of Qwen3 (tied forms ignore its
head); in the other families each form has its own file, except forms that differ only in rotary positions.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import transformers_models  # noqa: E402
from support.transformers_models import all_logits, greedy, hidden_states, small_model  # noqa: E402

DATA = ROOT / "tests" / "golden" / "data"
TOKENS = [(11 * i * i + 5 * i + 3) % 128 for i in range(140)]
POSITIONS = (0, 1, 23, 24, 63, 64, 127, 139)
WINDOWS = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
FORMS: dict[str, dict[str, Any]] = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "untied-windows": {"tie_word_embeddings": False, **WINDOWS},
    "tied-windows": {"tie_word_embeddings": True, **WINDOWS},
}
NULLS = ("q_lora_rank",)
VERSIONS = {"transformers": transformers.__version__, "torch": torch.__version__}
SHARED_WEIGHTS = ("llama-3", "llama-linear", "llama-yarn", "llama-longrope", "llama-dynamic")  # share those of "llama"
ROPE_SIZES = {"head_dim": 32, "max_position_embeddings": 512}
STRETCH = {"factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 128,
    "short_factor": [1.0 + 0.01 * i for i in range(16)],
    "long_factor": [1.0 + 0.5 * i for i in range(16)],
}
ROPES: dict[str, tuple[dict[str, Any], int]] = {  # name → settings, length
    "default": ({"rope_type": "default"}, 512),
    "linear": ({"rope_type": "linear", "factor": 3.0}, 512),
    "proportional": ({"rope_type": "proportional", "partial_rotary_factor": 0.25}, 512),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 512),
    "dynamic-stretched": ({"rope_type": "dynamic", "factor": 2.0}, 1000),
    "llama3": ({"rope_type": "llama3", **STRETCH, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 512),
    "yarn": ({"rope_type": "yarn", **STRETCH}, 512),
    "yarn-all": (
        {"rope_type": "yarn", **STRETCH, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False, "beta_fast": 16},
        512,
    ),
    "longrope-long": (LONGROPE, 512),
    "longrope-short": (LONGROPE, 100),
}


def main() -> None:
    wanted = sys.argv[1:] or ["qwen3", "families", "encoders", "rope"]
    if "qwen3" in wanted:
        write_qwen3(DATA / "qwen3")
    if "families" in wanted:
        write_families(DATA / "families")
    if "encoders" in wanted:
        write_encoders(DATA / "encoders")
    if "rope" in wanted:
        write_rope(DATA / "rope")
    if "quantized" in wanted:
        write_quantized(DATA / "quantized")


def write_qwen3(folder: Path) -> None:
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in transformers_models.tiny_qwen3_model(**FORMS["untied"]).state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    forms = {name: run_form(settings, weights) for name, settings in FORMS.items()}
    write_cases(folder, {**VERSIONS, "tokens": TOKENS, "forms": forms})


def run_form(settings: dict[str, Any], weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    model = transformers_models.tiny_qwen3_model(**settings)
    mine = {name: tensor.float() for name, tensor in weights.items()}
    if settings["tie_word_embeddings"]:
        mine["lm_head.weight"] = mine["model.embed_tokens.weight"]
    model.load_state_dict(mine)
    return {**answers(model, TOKENS), "greedy": greedy(model, TOKENS, 24)}


def write_families(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [token % 64 for token in TOKENS]
    forms = {}
    for name in transformers_models.FORMS:
        model = small_model(name)
        weights = "llama" if name in SHARED_WEIGHTS else name
        forms[name] = {"weights": f"{weights}.safetensors", **answers(model, tokens)}
        # With dynamic positions a longer text has other frequencies; quire keeps those of the model's length.
        forms[name]["greedy"] = [] if name == "llama-dynamic" else greedy(model, tokens, 8)
        if weights == name:
            write_weights(model, folder / f"{name}.safetensors")
    write_cases(folder, {**VERSIONS, "tokens": tokens, "forms": forms})


def write_encoders(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [2 + token % 61 for token in TOKENS]  # no padding, which transformers gives no position
    forms = {}
    for name in transformers_models.ENCODERS:
        model = transformers_models.small_encoder(name)
        states, config = hidden_states(model, tokens), model.config.to_dict()
        forms[name] = {
            "config": {key: value for key, value in sorted(config.items()) if value is not None},
            "states": {str(at): [round(float(number), 6) for number in states[at]] for at in POSITIONS},
            "mean": [round(float(number), 6) for number in states.mean(axis=0)],
        }
        write_weights(model, folder / f"{name}.safetensors")
    write_cases(folder, {**VERSIONS, "tokens": tokens, "forms": forms})


def write_rope(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    forms = {}
    for name, (settings, length) in ROPES.items():
        rope = {"rope_theta": 500_000.0, **settings}
        config = transformers.LlamaConfig(
            hidden_size=128, num_attention_heads=4, rope_parameters=dict(rope), **ROPE_SIZES
        )
        if rope["rope_type"] == "default":
            frequencies, scale = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        else:
            frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=length)
        forms[name] = {"rope": rope, "length": length, "frequencies": frequencies.tolist(), "scale": float(scale)}
    write_cases(folder, {**VERSIONS, "sizes": ROPE_SIZES, "forms": forms})


def write_quantized(folder: Path) -> None:
    """Write matrices as their quantisers store them, each with the weights that the quantiser makes of them again."""
    import bitsandbytes
    import compressed_tensors
    from bitsandbytes import functional
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    files: dict[str, dict[str, torch.Tensor]] = {}
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            packed, state = functional.quantize_4bit(weight, None, None, 64, nested, kind)
            tensors = {f"weight.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
            expected = functional.dequantize_4bit(packed, state)
            files[f"{kind}-nested" if nested else kind] = tensors | {"weight": packed, "expected": expected}
    codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
    expected = functional.int8_vectorwise_dequant(codes, scales)
    files["int8"] = {"weight": codes, "SCB": scales, "expected": expected}
    for kind, size in (("nvfp4", 16), ("mxfp4", 32)):
        largest = weight.reshape(len(weight), -1, size).abs().amax(-1)
        strategy = "tensor_group" if kind == "nvfp4" else "group"
        args = QuantizationArgs(num_bits=4, type="float", strategy=strategy, group_size=size, symmetric=True)
        whole, exponents = 6 * 448 / weight.abs().max().reshape(1), torch.ceil(torch.log2(largest / 6))
        is_nested = kind == "nvfp4"
        scale = (largest * whole / 6).to(torch.float8_e4m3fn).float() if is_nested else torch.exp2(exponents)
        options = {"args": args, "global_scale": whole if is_nested else None}
        zero = torch.zeros_like(scale)
        numbers = quantize(weight, scale, zero, **options)
        stored = scale.to(torch.float8_e4m3fn) if is_nested else (exponents + 127).to(torch.uint8)
        tensors = {"weight_packed": pack_fp4_to_uint8(numbers), "weight_scale": stored}
        tensors |= {"weight_global_scale": whole} if is_nested else {}
        files[kind] = tensors | {"expected": dequantize(numbers, scale, zero, dtype=torch.float32, **options)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, each in files.items():
        parts = {part if part == "expected" else f"up.{part}": tensor.contiguous() for part, tensor in each.items()}
        save_file(parts, folder / f"{name}.safetensors")
    versions = {"bitsandbytes": bitsandbytes.__version__, "compressed-tensors": compressed_tensors.__version__}
    (folder / "versions.json").write_text(json.dumps(VERSIONS | versions) + "\n")


def write_weights(model: Any, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        shutil.copyfile(Path(folder) / "model.safetensors", path)


def answers(model: Any, tokens: list[int]) -> dict[str, Any]:
    logits = all_logits(model, tokens)
    # A missing field means the default; for DeepSeek's models a null has another meaning.
    config = {name: value for name, value in model.config.to_dict().items() if value is not None or name in NULLS}
    return {
        "config": dict(sorted(config.items())),
        "best": logits.argmax(axis=1).tolist(),
        "logits": {str(position): [round(float(logit), 6) for logit in logits[position]] for position in POSITIONS},
    }


def write_cases(folder: Path, cases: dict[str, Any]) -> None:
    (folder / "cases.json").write_text(json.dumps(cases, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
