"""Tiny Qwen3 models made and run by transformers (which it needs): the witness of ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray


def tiny_qwen3_model(**settings: Any) -> Any:
    """Return a seeded tiny Qwen3: head_dim 32 where hidden size / heads is 16, large weights."""
    config = transformers.Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        eos_token_id=127,
        **settings,
    )
    torch.manual_seed(0)
    model: Any = transformers.Qwen3ForCausalLM(config)
    model.set_attn_implementation("eager")
    model.requires_grad_(False)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            spread = 0.2 if name.endswith(("norm.weight", "bias")) else 1.5 * tensor.shape[-1] ** -0.5
            noise = torch.randn(tensor.shape) * spread
            tensor.copy_(1 + noise if name.endswith("norm.weight") else noise)
    return model


def save(model: Any, folder: Path) -> Path:
    """Write the model's folder as transformers writes it."""
    model.save_pretrained(folder, safe_serialization=True)
    return folder


def all_logits(model: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits of every position: `[num_tokens, vocab_size]`."""
    with torch.no_grad():
        output = model(torch.tensor([list(tokens)]), use_cache=False)
    logits: NDArray[np.float32] = output.logits[0].float().numpy()
    return logits


def greedy(model: Any, tokens: Sequence[int], count: int) -> list[int]:
    """Return the next `count` tokens, each the argmax of a whole fresh pass."""
    known = list(tokens)
    for _ in range(count):
        known.append(int(all_logits(model, known)[-1].argmax()))
    return known[len(tokens) :]
