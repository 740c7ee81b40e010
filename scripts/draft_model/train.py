"""Train a draft model for SmolLM2 from its own answers, and write its folder.

    .venv/bin/python scripts/draft_model/answers.py --out answers.jsonl
    PYTHONPATH=src build/gpu-tests/bin/python scripts/draft_model/train.py --answers answers.jsonl --out FOLDER
    .venv/bin/quire chat smollm2 --speculation FOLDER

The draft model begins as some layers of SmolLM2 and the first 8,192 of its 49,152 tokens, which are the most common:
the head is most of the work of such a small model. It learns the likeliest tokens of SmolLM2 and their probabilities,
and reads any other token as its last one, as the engine does. With `--seconds 0` it is SmolLM2 without some layers,
untrained.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from quire.compute.models import ModelDescription, read_model
from quire.compute.models.hub import resolve_model
from quire.compute.models.parts import Part
from quire.compute.weights.decoder_weights import DecoderWeights

HELD_OUT = 64
BATCH = 6
PEAK_RATE = 1e-3
NAMES = {
    Part.ATTENTION_NORM: "input_layernorm",
    Part.QUERY: "self_attn.q_proj",
    Part.KEY: "self_attn.k_proj",
    Part.VALUE: "self_attn.v_proj",
    Part.OUTPUT: "self_attn.o_proj",
    Part.MLP_NORM: "post_attention_layernorm",
    Part.GATE: "mlp.gate_proj",
    Part.UP: "mlp.up_proj",
    Part.DOWN: "mlp.down_proj",
}


class Draft(nn.Module):
    """A Llama with the shape of SmolLM2 and fewer layers; parameters have the names of published checkpoints."""

    def __init__(self, model: ModelDescription, layers: list[int], num_tokens: int) -> None:
        super().__init__()
        spec, weights = model.spec, DecoderWeights.load(model.spec, model.source.tensors())
        self.spec, self.num_layers, self.num_tokens = spec, len(layers), num_tokens
        named = {
            "model.embed_tokens": weights.parts[Part.EMBEDDING].weight[:num_tokens],
            "model.norm": weights.parts[Part.FINAL_NORM].weight,
        }
        for place, layer in enumerate(layers):
            for part, name in NAMES.items():
                named[f"model.layers.{place}.{name}"] = weights.layers[layer][part].weight
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(torch.tensor(np.array(each))) for name, each in named.items()}
        )
        rope = spec.layers[0].rope
        assert rope is not None
        self.frequencies = torch.tensor(rope.inverse_frequencies)

    def at(self, name: str) -> Tensor:
        """Return a parameter."""
        found: Tensor = self.weights[name.replace(".", "/")]
        return found

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        """Return the logits of the `wanted` places, `[num_wanted, num_tokens]`."""
        spec, shape = self.spec.attention, (*tokens.shape, -1, self.spec.attention.head_dim)
        hidden = functional.embedding(tokens, self.at("model.embed_tokens"))
        angles = torch.arange(tokens.shape[1])[:, None] * self.frequencies
        turn = torch.cat((angles, angles), dim=-1)
        cos, sin = turn.cos()[:, None], turn.sin()[:, None]
        for layer in range(self.num_layers):
            stem = f"model.layers.{layer}."
            rows = self._norm(hidden, stem + "input_layernorm")
            query, key, value = (
                functional.linear(rows, self.at(f"{stem}self_attn.{name}_proj")).view(shape) for name in "qkv"
            )
            query, key = (_rotated(each, cos, sin) for each in (query, key))
            attended = functional.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2).repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1),
                value.transpose(1, 2).repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1),
                is_causal=True,
            )
            joined = attended.transpose(1, 2).flatten(2)
            hidden = hidden + functional.linear(joined, self.at(stem + "self_attn.o_proj"))
            rows = self._norm(hidden, stem + "post_attention_layernorm")
            gate, up = (functional.linear(rows, self.at(f"{stem}mlp.{name}_proj")) for name in ("gate", "up"))
            hidden = hidden + functional.linear(functional.silu(gate) * up, self.at(stem + "mlp.down_proj"))
        return functional.linear(self._norm(hidden[wanted], "model.norm"), self.at("model.embed_tokens"))

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        return functional.rms_norm(hidden, hidden.shape[-1:], self.at(name), self.spec.norm.epsilon)

    def save(self, folder: Path, model: ModelDescription) -> None:
        """Write the folder of a model."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"{name.replace('/', '.')}.weight": each.detach().bfloat16() for name, each in self.weights.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config: dict[str, Any] = dict(model.source.json_object("config.json"))
        config |= {"num_hidden_layers": self.num_layers, "vocab_size": self.num_tokens, "torch_dtype": "bfloat16"}
        config.pop("dtype", None)
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        (folder / "tokenizer.json").write_text(model.source.text("tokenizer.json", 64 << 20))


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-other, one), dim=-1) * sin


def batch_of(lines: list[dict[str, Any]], num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of answers with their prompts, and the likeliest next tokens with their probabilities."""
    longest = max(len(line["prompt"]) + len(line["answer"]) for line in lines)
    tokens = torch.zeros(len(lines), longest, dtype=torch.long)
    ids = torch.zeros(len(lines), longest, 13, dtype=torch.long)
    chances = torch.zeros(len(lines), longest, 13)
    for row, line in enumerate(lines):
        text = line["prompt"] + line["answer"]
        tokens[row, : len(text)] = torch.tensor(text).clamp(max=num_tokens - 1)
        for place, entries in enumerate(line["likeliest"], start=len(line["prompt"]) - 1):
            kept = [(token, logprob) for token, logprob in entries if token < num_tokens]
            for column, (token, logprob) in enumerate(kept[:13]):
                ids[row, place, column], chances[row, place, column] = token, np.exp(logprob)
    return tokens, ids, chances


def loss_of(draft: Draft, lines: list[dict[str, Any]]) -> tuple[Tensor, float]:
    """Return the loss on some answers, and the share of places with the same likeliest token as SmolLM2."""
    tokens, ids, chances = batch_of(lines, draft.num_tokens)
    wanted = chances.sum(-1) > 0
    logprobs = draft(tokens, wanted).log_softmax(-1)
    loss = -(logprobs.gather(1, ids[wanted]) * chances[wanted]).sum(-1).mean()
    best = ids[wanted].gather(1, chances[wanted].argmax(-1, keepdim=True))[:, 0]
    return loss, float((logprobs.argmax(-1) == best).float().mean())


def main() -> None:
    """Train until the time is over, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2", help="SmolLM2, or the path of its file")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 1, 28, 29])
    parser.add_argument("--tokens", type=int, default=8192, help="number of its tokens; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=900.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # faster than several if other processes use the cores
    rng = random.Random(0)
    lines = [json.loads(line) for line in options.answers.read_text().splitlines()]
    lines = [line for line in lines if line["answer"]]
    held_out, lines = lines[:HELD_OUT], lines[HELD_OUT:]
    model = read_model(resolve_model(options.model))
    draft = Draft(model, options.layers, options.tokens)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.05)
    began_s = told_s = time.perf_counter()
    num_steps = 0
    while (used := (time.perf_counter() - began_s) / max(options.seconds, 1e-9)) < 1:
        chosen = sorted(rng.sample(lines, 8 * BATCH), key=lambda line: len(line["answer"]))
        first = rng.randrange(8) * BATCH
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1.0, (num_steps + 1) / 30) * (1 - used)
        loss, _ = loss_of(draft, chosen[first : first + BATCH])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        num_steps += 1
        if time.perf_counter() - told_s > 60:
            told_s = time.perf_counter()
            with torch.no_grad():
                held, equal = loss_of(draft, held_out)
            print(f"{told_s - began_s:.0f} s, {num_steps} steps: {loss:.3f}, held out {held:.3f}, equal {equal:.3f}")
            draft.save(options.out, model)
    draft.save(options.out, model)


if __name__ == "__main__":
    main()
