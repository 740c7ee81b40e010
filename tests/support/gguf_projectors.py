"""Writes a model that reads images as two GGUF files, as llama.cpp's converters do: the text model, and the encoder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from quire.compute.models.source import ModelFolder
from quire.compute.models.vision.common import CLIP_DEVIATION, CLIP_MEAN, HALF
from support.gguf_models import GgufWriting
from support.tiny_checkpoint import write_model_weights

TEXT_NAMES = {
    "Gemma4": ("model.language_model.", "model."),
    "Idefics3": ("model.text_model.", "model."),
    "Lfm2Vl": ("model.language_model.", "model."),
    "Qwen2VL": ("", ""),
    "Qwen2_5_VL": ("", ""),
    "Qwen3VL": ("model.language_model.", "model."),
    "Qwen3_5": ("model.language_model.", "model."),
    "SmolVLM": ("model.text_model.", "model."),
}
FAMILIES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
ARCHITECTURES = {
    "qwen2_5_vl_text": gguf.MODEL_ARCH.QWEN2VL,
    "qwen2_vl_text": gguf.MODEL_ARCH.QWEN2VL,
    "qwen3_vl_text": gguf.MODEL_ARCH.QWEN3VL,
}
KINDS = {
    "Gemma3": "gemma3",
    "Gemma4": "gemma4v",
    "Idefics3": "idefics3",
    "InternVL": "internvl",
    "Lfm2Vl": "lfm2",
    "Llava": "mlp",
    "LlavaNext": "mlp",
    "Mistral3": "pixtral",
    "Qwen2VL": "qwen2vl_merger",
    "Qwen2_5_VL": "qwen2.5vl_merger",
    "Qwen3VL": "qwen3vl_merger",
    "Qwen3_5": "qwen3vl_merger",
    "SmolVLM": "idefics3",
}
TILES = {"min": 1, "max": 12}
OF_CLIP = ("internvl", "pixtral", "qwen2.5vl_merger", "qwen2vl_merger")
"""Kinds whose images are normalised as CLIP's."""

TOKENS = {
    "Gemma3": "<image_soft_token>",
    "Gemma4": "<|image|>",
    "InternVL": "<IMG_CONTEXT>",
    **dict.fromkeys(("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5"), "<|image_pad|>"),
}
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
OF_IMAGES = (
    *("model.vision_model.", "model.connector.", "vision_tower.", "multi_modal_projector."),
    *(
        "image_newline",
        "model.vision_tower.",
        "model.multi_modal_projector.",
        "model.embed_vision.",
        "visual.",
        "model.visual.",
    ),
)
Numbers = NDArray[np.float32]


def write_pair(folder: Path, target: Path, kind: str = "F32", *, name: str = "model.gguf") -> tuple[Path, Path]:
    """Write the model of a folder with images as two files, matrices as a type of GGUF; return the paths."""
    target.mkdir(parents=True, exist_ok=True)
    writing = _text(folder, target, *_read(folder), name=name)
    writing.weights(gguf.GGMLQuantizationType[kind])
    writing.close()
    return target / name, write_projector(folder, target / f"mmproj-{name}", kind)


def _text(
    folder: Path, target: Path, config: dict[str, Any], tensors: dict[str, Numbers], *, name: str = "model.gguf"
) -> GgufWriting:
    """Return the text model in the making, with settings and a tokenizer."""
    family = config["architectures"][0].removesuffix("ForConditionalGeneration")
    text = target / "text"
    text.mkdir()
    theirs, ours = TEXT_NAMES.get(family, ("language_model.", ""))
    own = {n: each for n, each in tensors.items() if not n.startswith(OF_IMAGES)}
    base = 1e6 if family == "Gemma3" else 1e4
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": base}, **config["text_config"]}
    settings |= {"architectures": [FAMILIES[settings["model_type"]]]}
    if family == "Gemma4":
        full = [layer for layer, kind in enumerate(settings["layer_types"]) if kind == "full_attention"]
        settings |= {"per_layer_config": {str(layer): {"head_dim": settings["global_head_dim"]} for layer in full}}
        settings |= {"num_kv_shared_layers": settings.get("num_kv_shared_layers", 0)}
    (text / "config.json").write_text(json.dumps(settings))
    write_model_weights(
        text, {n.replace(theirs, ours, 1) if n.startswith(theirs) else n: each for n, each in own.items()}
    )
    writing = GgufWriting(text, target / name, architecture=ARCHITECTURES.get(settings["model_type"]))
    writing.settings()
    _write_tokenizer(writing, folder)
    return writing


def write_projector(folder: Path, path: Path, kind: str = "F32", *, splits: bool = False, **changes: Any) -> Path:
    """Write the image encoder of a folder as a file; `changes` replace settings, by their last names.

    `splits`: queries, keys and values of Qwen3-VL are tensors of their own, as in Ollama's files.
    """
    config, tensors = _read(folder)
    vision, projector = config["vision_config"], kind_of(config)
    vision |= {key: vision[key][0] for key in ("image_size", "patch_size") if isinstance(vision.get(key), list)}
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    usual = (CLIP_MEAN, CLIP_DEVIATION) if is_clip(tensors) or projector in OF_CLIP else (HALF, HALF)
    settings = {
        "attention.head_count": vision.get("num_attention_heads") or vision["num_heads"],
        "attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-5 if is_clip(tensors) else 1e-6),
        "block_count": vision.get("num_hidden_layers") or vision["depth"],
        "embedding_length": vision.get("embed_dim") or vision["hidden_size"],
        "feed_forward_length": vision.get("intermediate_size") or vision["hidden_size"],
        "image_mean": processor.get("image_mean", list(usual[0])),
        "image_size": vision.get("image_size", 560),
        "image_std": processor.get("image_std", list(usual[1])),
        "patch_size": vision["patch_size"],
        "projection_dim": config["text_config"]["hidden_size"],
    }
    if projector == "mlp":
        count = settings["block_count"] = settings["block_count"] + 1 + config.get("vision_feature_layer", -2)
        settings |= {"feature_layer": [count], "projection_dim": 768}  # that of CLIP itself
    if "image_grid_pinpoints" in config:
        settings |= {"mm_patch_merge_type": "spatial_unpad"}
        settings |= {"image_grid_pinpoints": [edge for size in config["image_grid_pinpoints"] for edge in size]}
    settings |= _of_tiles(config, projector, processor)
    if projector == "gemma3":
        patches = vision["image_size"] // vision["patch_size"]
        settings |= {"projector.scale_factor": patches // math.isqrt(config["mm_tokens_per_image"])}
    if projector == "lfm2":
        settings |= {"projector.scale_factor": config.get("downsample_factor", 2), "image_size": 256}
    if projector.startswith("qwen"):
        settings |= {"spatial_merge_size": vision["spatial_merge_size"]}
        settings |= {f"image_{key}": processor[key] for key in ("min_pixels", "max_pixels") if key in processor}
    if "fullatt_block_indexes" in vision:
        settings |= {"n_wa_pattern": vision["fullatt_block_indexes"][0] + 1, "window_size": vision["window_size"]}
    if "deepstack_visual_indexes" in vision:
        deep = vision["deepstack_visual_indexes"]
        settings |= {"is_deepstack_layers": [layer in deep for layer in range(vision["depth"])]}
    if "spatial_merge_size" in config:
        settings |= {"spatial_merge_size": config["spatial_merge_size"]}
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", projector)
    if projector == "pixtral":
        writer.add_bool("clip.use_silu" if vision.get("hidden_act") == "silu" else "clip.use_gelu", True)
        if "rope_parameters" in vision:  # as for files in Mistral's own format
            writer.add_rope_freq_base(vision["rope_parameters"]["rope_theta"])
    else:
        writer.add_bool("clip.use_gelu", projector != "mlp" or vision.get("hidden_act") == "gelu")
    for key, value in (settings | changes).items():
        _add(writer, f"clip.vision.{key}", value)
    for name, numbers in _stored(tensors, settings | {"vision": vision, "splits": splits}, projector):
        _add_tensor(writer, name, numbers, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _of_tiles(config: dict[str, Any], projector: str, processor: dict[str, Any]) -> dict[str, int]:
    """Return the settings of an encoder whose images are cut into tiles."""
    if projector == "idefics3":
        settings = {"projector.scale_factor": config["scale_factor"]}
        return settings | ({"preproc_image_size": processor["size"]["longest_edge"]} if "size" in processor else {})
    if projector == "internvl":
        tiles = {f"preproc_{end}_tiles": processor.get(f"{end}_patches", most) for end, most in TILES.items()}
        return tiles | {"projector.scale_factor": round(1 / config["downsample_ratio"])}
    return {}


def write_single(folder: Path, target: Path, kind: str = "F32", **changes: Any) -> Path:
    """Write the model of a folder with images as one file, as Ollama's converter does; return its path.

    `changes` replace settings of the image encoder by their last names; without None.
    """
    target.mkdir(parents=True, exist_ok=True)
    config, tensors = _read(folder)
    vision, writing = config["vision_config"], _text(folder, target, config, tensors)
    writer = writing.writer
    name = str(_rename_in_ollama(writer.kv_data[0], gguf.MODEL_ARCH_NAMES[writing.architecture]))
    settings = {
        "vision.attention.head_count": vision.get("num_attention_heads") or vision["num_heads"],
        "vision.block_count": vision.get("num_hidden_layers") or vision["depth"],
        "vision.embedding_length": vision["hidden_size"],
        "vision.num_channels": 3,
        "vision.patch_size": vision["patch_size"],
    }
    if "image_size" in vision:
        settings |= {"vision.feed_forward_length": vision["intermediate_size"]}
        settings |= {"vision.image_size": vision["image_size"]}
    if name == "mistral3":
        settings |= {"spatial_merge_size": config["spatial_merge_size"], "rope.scaling.type": ""}
        settings |= {"vision.rope.freq_base": vision["rope_parameters"]["rope_theta"], "rope.scaling.factor": 0.0}
    if name == "qwen25vl":
        kept = ("fullatt_block_indexes", "spatial_merge_size", "temporal_patch_size", "window_size")
        settings |= {f"vision.{key}": vision[key] for key in kept}
        settings |= {"vision.attention.layer_norm_epsilon": 1e-6, "vision.rope.freq_base": 1e4}
    if name == "qwen3vl":
        settings |= {"vision.deepstack_visual_indexes": vision["deepstack_visual_indexes"]}
        settings |= {"vision.spatial_merge_size": vision["spatial_merge_size"]}
        settings |= {"vision.attention.layer_norm_epsilon": 1e-6}
        settings |= {"mrope_sections": writer.kv_data[0].pop("qwen3vl.rope.dimension_sections").value[:3]}
    if name == "gemma4":
        settings |= {"vision.feed_forward_length": vision["intermediate_size"]}
        settings |= {"vision.attention.layer_norm_epsilon": 1e-6, "vision.projector.scale_factor": 3}
        bounds = [float(number) for stored, number in tensors.items() if not number.shape]
        writer.add_tensor("v.clamp_data", np.array([0.0, *bounds], np.float32))
    if name == "gemma3":
        settings |= {"mm.tokens_per_image": config["mm_tokens_per_image"]}
        settings |= {"vision.attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6)}
        for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base"):  # published files do not have them
            del writer.kv_data[0][f"{name}.{key}"]
    for key, value in (settings | changes).items():
        if value is not None:
            _add(writer, f"{name}.{key}", value)
    for stored, numbers in tensors.items():
        if stored.startswith(OF_IMAGES):
            for theirs, part in _of_ollama(stored, numbers):
                _add_tensor(writer, theirs, part, kind)
    writing.weights(gguf.GGMLQuantizationType[kind])
    writing.close()
    return target / "model.gguf"


def _rename_in_ollama(settings: dict[str, gguf.GGUFValue], name: str) -> str:
    """Rename the settings of a text model as in files of Ollama; return the name of its architecture there."""
    if name == "llama":  # Mistral
        new = "mistral3"
    elif name == "qwen2vl":
        new = "qwen25vl"
        sections = settings.pop("qwen2vl.rope.dimension_sections")
        settings["qwen2vl.rope.mrope_section"] = replace(sections, value=sections.value[:3])
    else:
        return name
    settings["general.architecture"].value = new
    for key in [key for key in settings if key.startswith(f"{name}.")]:
        settings[key.replace(name, new, 1)] = settings.pop(key)
    if new == "mistral3":
        del settings["tokenizer.ggml.pre"]
    return new


def _of_ollama(name: str, numbers: Numbers) -> Iterator[tuple[str, Numbers]]:
    """Yield a tensor of an image encoder as Ollama's converter writes it."""
    if name.startswith(("model.vision_tower.encoder", "model.vision_tower.p", "model.vision_tower.s", "model.embed_v")):
        yield _of_gemma4(name, numbers)
        return
    if name == "model.visual.patch_embed.proj.weight":
        yield "v.patch_embed.weight", numbers.reshape(-1, *numbers.shape[2:])
        return
    if name == "visual.patch_embed.proj.weight":
        yield from ((f"v.patch_embd_{frame}.weight", np.ascontiguousarray(numbers[:, :, frame])) for frame in range(2))
        return
    if ".attn.qkv." in name:
        for part, rows in zip("qkv", np.split(numbers, 3), strict=True):
            yield from _of_ollama(name.replace("attn.qkv", f"attn_{part}"), rows)
        return
    for theirs, ours in (
        *(("model.visual.", "v."), ("patch_embed.proj.", "patch_embed.")),
        *(("deepstack_merger_list.", "deepstack_merger."), ("visual.", "v.")),
        ("blocks.", "blk."),
        ("attn.proj.", "attn_out."),
        *((f"norm{number}.", f"ln{number}.") for number in (1, 2) if name.startswith("visual.")),
        *((f"mlp.{part}_proj.", f"ffn_{part}.") for part in ("down", "gate", "up")),
        *((f"feed_forward.{part}_proj.", f"ffn_{part}.") for part in ("down", "gate", "up")),
        *((f"attention.{part}_proj.", f"attn_{part}.") for part in "qkv"),
        ("attention.o_proj.", "attn_output."),
        ("attention_norm.", "attn_norm."),
        ("vision_tower.transformer.layers.", "v.blk."),
        ("ln_pre.", "encoder_norm."),
        ("vision_tower.vision_model.embeddings.", "v."),
        ("vision_tower.vision_model.", "v."),
        ("vision_tower.", "v."),
        ("encoder.layers.", "blk."),
        ("self_attn.out_proj.", "attn_output."),
        *((f"self_attn.{part}_proj.", f"attn_{part}.") for part in "qkv"),
        ("input_projection_weight", "input_projection.weight"),
        ("multi_modal_projector.", "mm."),
    ):
        name = name.replace(theirs, ours)
    yield name, numbers + 1 if name == "mm.mm_soft_emb_norm.weight" else numbers


def kind_of(config: dict[str, Any]) -> str:
    """Return the name in GGUF files for the image encoder of a model."""
    if config["vision_config"].get("model_type") == "pixtral":
        return "pixtral"
    return KINDS[config["architectures"][0].removesuffix("ForConditionalGeneration")]


def is_clip(tensors: dict[str, Numbers]) -> bool:
    return any("class_embedding" in name for name in tensors)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Numbers]]:
    checkpoint = ModelFolder(folder).tensors()
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.entries}
    return json.loads((folder / "config.json").read_text()), tensors


def _stored(tensors: dict[str, Numbers], settings: dict[str, Any], kind: str) -> Iterator[tuple[str, Numbers]]:
    """Yield the tensors of an image encoder by the names in a file; those of LLaVA are from an old converter."""
    swapped = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    for name, numbers in tensors.items():
        if not name.startswith(OF_IMAGES):
            continue
        known = name.replace("_weight", ".weight") if kind == "gemma3" else name
        if kind == "lfm2":
            known = name.removeprefix("model.")
        if kind.startswith("qwen"):
            yield from _of_qwen(name.removeprefix("model."), numbers, settings)
            continue
        if kind == "gemma4v":
            yield _of_gemma4(name, numbers)
            continue
        if name == "image_newline":
            yield "model.image_newline", numbers
            continue
        if kind == "internvl":
            yield _of_internvl(name), numbers
            continue
        stored = NAMES.get_name(known, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if kind == "mlp":
            stored = stored.replace("mm.1.", "mm.0.")
            if stored.startswith("v.post_ln"):
                continue
            if stored.startswith("v.blk.") and int(stored.split(".")[2]) >= settings["block_count"]:
                continue
            stored = ".".join(swapped.get(part, part) for part in stored.split("."))
        yield stored, _rearranged(numbers, stored, settings, kind)
    if kind == "pixtral":
        yield "v.token_embd.img_break", np.zeros(settings["projection_dim"], np.float32)
    if kind == "gemma4v":  # the encoder of sound is in the same file
        yield from ((name, np.ones((4, 4), np.float32)) for name in ("a.blk.0.attn_q.weight", "mm.a.input.weight"))


def _of_gemma4(name: str, numbers: Numbers) -> tuple[str, Numbers]:
    """Return a tensor of Gemma 4's image encoder: numbers become vectors, and a patch has one colour after another."""
    known = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
    if name.endswith("position_embedding_table"):
        known += ".weight"
    if name == "model.embed_vision.embedding_projection.weight":
        return "mm.input_projection.weight", numbers
    stored = NAMES.get_name(
        known, try_suffixes=(".weight", *(f".{side}_{end}" for side in ("input", "output") for end in ("min", "max")))
    )
    assert stored is not None, name
    if stored == "v.patch_embd.weight":
        side = math.isqrt(numbers.shape[1] // 3)
        numbers = np.ascontiguousarray(numbers.reshape(-1, side, side, 3).transpose(0, 3, 1, 2))
    return stored, numbers.reshape(numbers.shape or (1,))


def _of_internvl(name: str) -> str:
    """Return the name of a tensor of InternVL's image encoder, which is that of the makers' own folders."""
    for theirs, own in {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}.items():
        name = name.replace(f"multi_modal_projector.{theirs}", own)
    name = f"model.{name}" if name.startswith("vision_tower.") else name
    end = ".weight" if name.endswith(("lambda_1", "lambda_2", "position_embeddings")) else ""
    stored = NAMES.get_name(name + end, try_suffixes=(".weight", ".bias"))
    assert stored is not None, name
    return stored


def _of_qwen(name: str, numbers: Numbers, settings: dict[str, Any]) -> Iterator[tuple[str, Numbers]]:
    """Yield a tensor of Qwen's image encoders: frames apart, and in the first ones queries, keys and values too."""
    if name == "model.visual.patch_embed.proj.weight":
        yield "v.patch_embed.weight", numbers.reshape(-1, *numbers.shape[2:])
        return
    if name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", np.ascontiguousarray(numbers[:, :, 0])
        yield "v.patch_embd.weight.1", np.ascontiguousarray(numbers[:, :, 1])
    elif ".attn.qkv." in name and ("num_position_embeddings" not in settings["vision"] or settings["splits"]):
        for part, rows in zip("qkv", np.split(numbers, 3), strict=True):
            stored = NAMES.get_name(name.replace("qkv", part), try_suffixes=(".weight", ".bias"))
            assert stored is not None, name
            yield stored, rows
    elif "deepstack" in name:
        _, _, number, part, end = name.split(".")
        layer = settings["vision"]["deepstack_visual_indexes"][int(number)]
        yield f"v.deepstack.{layer}.{part.removeprefix('linear_')}.{end}", numbers
    else:
        renamed = {
            "visual.merger.norm": "v.post_ln",
            "visual.merger.linear_fc1": "mm.0",
            "visual.merger.linear_fc2": "mm.2",
        }
        stem, _, end = name.rpartition(".")
        stored = (
            f"{renamed[stem]}.{end}" if stem in renamed else NAMES.get_name(name, try_suffixes=(".weight", ".bias"))
        )
        assert stored is not None, name
        yield stored, numbers


def _rearranged(numbers: Numbers, stored: str, settings: dict[str, Any], kind: str) -> Numbers:
    """Return a tensor as the converters write it."""
    if stored == "mm.soft_emb_norm.weight":
        return numbers + 1
    if kind == "pixtral" and stored.endswith(("attn_q.weight", "attn_k.weight")):
        halves = numbers.reshape(settings["attention.head_count"], 2, -1, numbers.shape[1])
        return halves.swapaxes(1, 2).reshape(numbers.shape)
    if kind == "lfm2" and stored == "v.patch_embd.weight":
        side = settings["patch_size"]
        return np.ascontiguousarray(numbers.reshape(-1, side, side, 3).transpose(0, 3, 1, 2))
    return numbers


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
        config = json.loads((folder / "config.json").read_text())
        family = config["architectures"][0].removesuffix("ForConditionalGeneration")
        image = "[IMG]" if kind_of(config) == "pixtral" else TOKENS.get(family, "<image>")
        words = ["a", "b", "ab", *(f"<{number}>" for number in range(3, size))]
        words[5] = image  # the placeholder in SETTINGS
        writing.tokens(words, [1] * size)
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
