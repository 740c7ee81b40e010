"""Writes a model that reads images as two GGUF files, as llama.cpp's converters do: the text model, and the encoder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from quire.compute.models.source import ModelFolder
from quire.compute.models.vision.llava import CLIP_DEVIATION, CLIP_MEAN
from support.gguf_models import GgufWriting
from support.tiny_checkpoint import write_model_weights

TEXT_NAMES = {"Idefics3": ("model.text_model.", "model."), "SmolVLM": ("model.text_model.", "model.")}
FAMILIES = {"llama": "LlamaForCausalLM"}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
OF_IMAGES = ("model.vision_model.", "model.connector.", "vision_tower.", "multi_modal_projector.")
Numbers = NDArray[np.float32]


def write_pair(folder: Path, target: Path, kind: str = "F32", *, name: str = "model.gguf") -> tuple[Path, Path]:
    """Write the model of a folder with images as two files, matrices as a type of GGUF; return the paths."""
    target.mkdir(parents=True, exist_ok=True)
    config, tensors = _read(folder)
    family = config["architectures"][0].removesuffix("ForConditionalGeneration")
    text = target / "text"
    text.mkdir()
    theirs, ours = TEXT_NAMES.get(family, ("language_model.", ""))
    own = {n: each for n, each in tensors.items() if not n.startswith(OF_IMAGES)}
    settings = {"rope_parameters": ROPE, **config["text_config"]}
    settings |= {"architectures": [FAMILIES[settings["model_type"]]]}
    (text / "config.json").write_text(json.dumps(settings))
    write_model_weights(
        text, {n.replace(theirs, ours, 1) if n.startswith(theirs) else n: each for n, each in own.items()}
    )
    writing = GgufWriting(text, target / name)
    writing.settings()
    _write_tokenizer(writing, folder)
    writing.weights(gguf.GGMLQuantizationType[kind])
    writing.close()
    return target / name, write_projector(folder, target / f"mmproj-{name}", kind)


def write_projector(folder: Path, path: Path, kind: str = "F32", **changes: Any) -> Path:
    """Write the image encoder of a folder as a file; `changes` replace settings, by their last names."""
    config, tensors = _read(folder)
    vision = config["vision_config"]
    is_llava = config["architectures"][0].startswith("Llava")
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    settings = {
        "attention.head_count": vision["num_attention_heads"],
        "attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-5 if is_clip(tensors) else 1e-6),
        "block_count": vision["num_hidden_layers"],
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"],
        "image_mean": processor.get("image_mean", list(CLIP_MEAN) if is_clip(tensors) else [0.5] * 3),
        "image_size": vision["image_size"],
        "image_std": processor.get("image_std", list(CLIP_DEVIATION) if is_clip(tensors) else [0.5] * 3),
        "patch_size": vision["patch_size"],
        "projection_dim": config["text_config"]["hidden_size"],
    }
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    if is_llava:
        count = settings["block_count"] = settings["block_count"] + 1 + config.get("vision_feature_layer", -2)
        settings |= {"feature_layer": [count], "projection_dim": 768}  # that of CLIP itself
        writer.add_bool("clip.has_llava_projector", True)
        writer.add_bool("clip.use_gelu", vision.get("hidden_act") == "gelu")
        writer.add_string("clip.projector_type", "mlp")
    else:
        settings |= {"projector.scale_factor": config["scale_factor"]}
        if "size" in processor:
            settings |= {"preproc_image_size": processor["size"]["longest_edge"]}
        writer.add_bool("clip.use_gelu", True)
        writer.add_string("clip.projector_type", "idefics3")
    for key, value in (settings | changes).items():
        _add(writer, f"clip.vision.{key}", value)
    for name, numbers in _stored(tensors, settings["block_count"], is_llava=is_llava):
        _add_tensor(writer, name, numbers, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def is_clip(tensors: dict[str, Numbers]) -> bool:
    return any("class_embedding" in name for name in tensors)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Numbers]]:
    checkpoint = ModelFolder(folder).tensors()
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.entries}
    return json.loads((folder / "config.json").read_text()), tensors


def _stored(tensors: dict[str, Numbers], count: int, *, is_llava: bool) -> Iterator[tuple[str, Numbers]]:
    """Yield the tensors of an image encoder by the names in a file; those of LLaVA are from an old converter."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 99)
    for name, numbers in tensors.items():
        if not name.startswith(OF_IMAGES):
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if is_llava:
            stored = stored.replace("mm.1.", "mm.0.")
            if stored.startswith("v.post_ln") or (stored.startswith("v.blk.") and int(stored.split(".")[2]) >= count):
                continue
            swapped = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
            stored = ".".join(swapped.get(part, part) for part in stored.split("."))
        yield stored, numbers


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_uint32(key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, numbers: Numbers, kind: str) -> None:
    """Add a tensor: vectors and positions as floats, matrices of rows without complete blocks with 16 bits."""
    stored = gguf.GGMLQuantizationType[kind]
    if numbers.ndim == 1 or name.startswith("v.position_embd"):
        stored = gguf.GGMLQuantizationType.F32
    elif kind.startswith("Q") and (numbers.ndim != 2 or numbers.shape[1] % 32):
        stored = gguf.GGMLQuantizationType.F16
    writer.add_tensor(name, gguf.quants.quantize(numbers, stored), raw_dtype=stored)


def _write_tokenizer(writing: GgufWriting, folder: Path) -> None:
    """Write the vocabulary of a folder, or a made-up one with a token for images."""
    writer, size = writing.writer, writing.config["vocab_size"]
    file = folder / "tokenizer.json"
    if not file.exists():
        writing.tokens(
            ["a", "b", "ab", *(f"<{n}>" for n in range(3, 5)), "<image>", *(f"<{n}>" for n in range(6, size))],
            [1] * size,
        )
        return
    known = json.loads(file.read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    by_id = {token_id: (token, 1) for token, token_id in known["model"]["vocab"].items()}
    by_id |= {each["id"]: (each["content"], 3 if each["special"] else 4) for each in known["added_tokens"]}
    listed = [by_id.get(token_id, (f"<unused{token_id}>", 5)) for token_id in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in listed])
    writer.add_token_types([kind for _, kind in listed])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in known["model"]["merges"]])
    writer.add_eos_token_id(size - 1)
    writer.add_chat_template(settings["chat_template"])
