"""Tiny random model folders, written with numpy alone: for tests, never for use.

A folder is a real one: config.json and generation_config.json as transformers writes them, and a
model.safetensors with the names of a published Qwen3 or Llama. Weights come from a seed and are large enough
for greedy text to be lively.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Tensors = Mapping[str, NDArray[np.float32]]


def write_tiny_qwen3(
    folder: Path,
    *,
    seed: int = 0,
    tie: bool = True,
    dtype: str = "F32",
    num_shards: int = 1,
    settings: Mapping[str, object] | None = None,
) -> Path:
    """Write a tiny Qwen3 model folder and return it; equal arguments give equal bytes.

    `settings` replaces fields of config.json: {"num_hidden_layers": 2}, {"use_sliding_window":
    True, …}. The default has 3 layers of full attention, hidden size 64, 4 heads on 2 kv heads of
    head_dim 32, 128 tokens, a context of 4096, and token 127 as end of text.
    """
    config = tiny_qwen3_config(tie=tie) | dict(settings or {})
    return _write_folder(folder, config, tiny_qwen3_tensors(config, seed), dtype=dtype, num_shards=num_shards)


def write_tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    tie: bool = False,
    dtype: str = "F32",
    num_shards: int = 1,
    settings: Mapping[str, object] | None = None,
) -> Path:
    """Write a tiny Llama model folder and return it; equal arguments give equal bytes.

    The sizes are those of the tiny Qwen3. `settings` replaces fields of config.json: {"mlp_bias":
    True}, {"head_dim": 16}, {"rope_parameters": {…}}, …
    """
    config = tiny_llama_config(tie=tie) | dict(settings or {})
    return _write_folder(folder, config, tiny_llama_tensors(config, seed), dtype=dtype, num_shards=num_shards)


def _write_folder(folder: Path, config: Mapping[str, object], tensors: Tensors, *, dtype: str, num_shards: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    eos = {"eos_token_id": config["eos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(eos))
    write_model_weights(folder, tensors, dtype=dtype, num_shards=num_shards)
    return folder


def tiny_qwen3_config(*, tie: bool = True) -> dict[str, object]:
    """Return the config.json of the tiny model, as transformers 5 writes it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "eos_token_id": 127,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 4096,
        "max_window_layers": 3,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": tie,
        "use_sliding_window": False,
        "vocab_size": 128,
    }


def tiny_llama_config(*, tie: bool = False) -> dict[str, object]:
    """Return the config.json of the tiny Llama, as transformers 5 writes it."""
    others = ("max_window_layers", "sliding_window", "use_sliding_window")
    same = {name: value for name, value in tiny_qwen3_config(tie=tie).items() if name not in others}
    return same | {"architectures": ["LlamaForCausalLM"], "mlp_bias": False, "model_type": "llama", "pretraining_tp": 1}


def tiny_qwen3_tensors(config: Mapping[str, object], seed: int) -> dict[str, NDArray[np.float32]]:
    """Return random weights for a config, with the names of a published Qwen3."""
    return _random_tensors(config, seed, head_norms=True)


def tiny_llama_tensors(config: Mapping[str, object], seed: int) -> dict[str, NDArray[np.float32]]:
    """Return random weights for a config, with the names of a published Llama."""
    return _random_tensors(config, seed, head_norms=False)


def _random_tensors(config: Mapping[str, object], seed: int, *, head_norms: bool) -> dict[str, NDArray[np.float32]]:
    sizes = {name: value for name, value in config.items() if type(value) is int}
    hidden = sizes["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes["vocab_size"], hidden)}
    for layer in range(sizes["num_hidden_layers"]):
        shapes |= _layer_shapes(config, sizes, f"model.layers.{layer}", head_norms=head_norms)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (sizes["vocab_size"], hidden)
    random = np.random.default_rng(seed)
    return {name: _random_tensor(name, shape, random) for name, shape in shapes.items()}


def _layer_shapes(
    config: Mapping[str, object], sizes: Mapping[str, int], stem: str, *, head_norms: bool
) -> dict[str, tuple[int, ...]]:
    hidden, head_dim, mlp = sizes["hidden_size"], sizes["head_dim"], sizes["intermediate_size"]
    query, key = sizes["num_attention_heads"] * head_dim, sizes["num_key_value_heads"] * head_dim
    attention = {"q": (query, hidden), "k": (key, hidden), "v": (key, hidden), "o": (hidden, query)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in attention.items():
        shapes[f"{stem}.self_attn.{name}_proj.weight"] = shape
        if config["attention_bias"]:
            shapes[f"{stem}.self_attn.{name}_proj.bias"] = shape[:1]
    if head_norms:
        shapes[f"{stem}.self_attn.q_norm.weight"] = (head_dim,)
        shapes[f"{stem}.self_attn.k_norm.weight"] = (head_dim,)
    for name, shape in {"gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp)}.items():
        shapes[f"{stem}.mlp.{name}_proj.weight"] = shape
        if config.get("mlp_bias"):
            shapes[f"{stem}.mlp.{name}_proj.bias"] = shape[:1]
    shapes[f"{stem}.input_layernorm.weight"] = (hidden,)
    shapes[f"{stem}.post_attention_layernorm.weight"] = (hidden,)
    return shapes


def _random_tensor(name: str, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    # Strong attention and sharp scores: greedy text depends on all of the past and does not get
    # stuck, and the best two logits are seldom closer than 1e-3.
    noise = random.standard_normal(shape, dtype=np.float32)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 2 + np.float32(0.2) * noise
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.1) * noise
    if "embed" in name or name.endswith("bias"):
        return np.float32(0.2) * noise
    strength = 2.0 if name.endswith(("v_proj.weight", "o_proj.weight")) else 1.5
    return noise * np.float32(strength / np.sqrt(shape[-1]))


def write_model_weights(folder: Path, tensors: Tensors, *, dtype: str = "F32", num_shards: int = 1) -> None:
    """Write the tensors as model.safetensors, or as shards with an index."""
    if num_shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, dtype=dtype))
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        mine = {name: tensors[name] for name in names[shard::num_shards]}
        (folder / file).write_bytes(safetensors_bytes(mine, dtype=dtype))
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def safetensors_bytes(tensors: Tensors, *, dtype: str = "F32") -> bytes:
    """Return a safetensors file of the tensors, stored as F32, F16 or BF16 (cut, not rounded)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, tensor in tensors.items():
        start = len(data)
        data += _stored(tensor, dtype)
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(data)


def _stored(tensor: NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "F16":
        return tensor.astype("<f2").tobytes()
    if dtype == "BF16":
        return (np.ascontiguousarray(tensor).view(np.uint32) >> 16).astype("<u2").tobytes()
    return tensor.astype("<f4").tobytes()
