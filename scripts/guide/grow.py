"""Grow the guide to 77 million parameters and train the result, for a pair of models with one tokenizer.

    python scripts/guide/grow.py --out FOLDER
    quire bench speculation FOLDER --speculation guide --workloads chat --sequences 1 --questions FILE  (of held_out.py)

The guide is the draft model of the pair. The larger model begins as the same function: it has four copies of the
guide's channels, heads and neurons, and each layer is followed by one that adds nothing. Then it is trained on other
conversations of the guide's corpus. Training a model of this size from random weights would take some hours on one
core. Because of their common origin, the two models agree more often than a pair that was trained separately.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
from dataclasses import replace
from pathlib import Path

import torch
from corpus import read_documents, read_topics
from decoder import Guide, Shape
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from train import (
    DROPOUT,
    LONG_ROW_LENGTH,
    NUM_THREADS,
    ROW_LENGTH,
    SEED,
    PieceMaker,
    endless_batches,
    endless_long_pieces,
    endless_pieces,
    mixed,
    train,
    write_folder,
)

GUIDE = Path(__file__).parents[2] / "src/quire/guide"
WIDTH, DEPTH = 4, 2  # factors of width and depth; dividing weights by a power of two is exact
FIRST_EPOCH = 1_000_000  # the guide was trained on earlier epochs
PEAK_LEARNING_RATE, NUM_STEPS = 4e-4, 250


def read_guide() -> Guide:
    """Return the guide that ships inside quire."""
    guide = Guide(Shape(), dropout=0.0)
    weights = {name: weight.float() for name, weight in load_file(GUIDE / "model.safetensors").items()}
    guide.load_state_dict(weights)
    return guide


def grown(guide: Guide) -> Guide:
    """Return a larger model that computes the same logits."""
    shape = guide.shape
    larger = Guide(
        replace(
            shape,
            hidden_size=shape.hidden_size * WIDTH,
            intermediate_size=shape.intermediate_size * WIDTH,
            num_hidden_layers=shape.num_hidden_layers * DEPTH,
            num_attention_heads=shape.num_attention_heads * WIDTH,
            num_key_value_heads=shape.num_key_value_heads * WIDTH,
        ),
        dropout=DROPOUT,
    )
    weights = larger.state_dict()
    for name, weight in guide.state_dict().items():
        weights[_name_in_larger(name)] = _widened(name, weight)
    for layer in range(larger.shape.num_hidden_layers):
        if layer % DEPTH:
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                weights[f"model.layers.{layer}.{name}.weight"].zero_()
    larger.load_state_dict(weights)
    return larger


def _name_in_larger(name: str) -> str:
    first, layers, rest = name.partition("layers.")
    layer, dot, part = rest.partition(".")
    return f"{first}layers.{int(layer) * DEPTH}{dot}{part}" if layers else name


def _widened(name: str, weight: Tensor) -> Tensor:
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return weight
    if name == "model.norm.weight":  # the head is the embedding: each logit is a sum over all copies
        return weight.repeat(WIDTH) / WIDTH
    if weight.dim() == 1:
        return weight.repeat(WIDTH)
    if name == "model.embed_tokens.weight":
        return weight.repeat(1, WIDTH)
    rows, columns = weight.shape
    noise = torch.randn(rows * WIDTH, WIDTH, columns) * weight.std()
    noise -= noise.mean(dim=1, keepdim=True)  # cancels while all copies are equal, and lets the copies diverge
    return (weight.repeat(WIDTH, WIDTH) + noise.view(rows * WIDTH, WIDTH * columns)) / WIDTH


def main() -> None:
    """Grow, train, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="0: do not train; default: %(default)s")
    options = parser.parse_args()

    torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    topics, tokenizer = read_topics(), Tokenizer.from_file(str(GUIDE / "tokenizer.json"))
    maker = PieceMaker(tokenizer)
    pieces = endless_pieces(topics, maker.of_documents(read_documents()), maker, first_epoch=FIRST_EPOCH)
    long_pieces = endless_long_pieces(topics, maker)
    batches = mixed(endless_batches(pieces, ROW_LENGTH), endless_batches(long_pieces, LONG_ROW_LENGTH))
    guide = read_guide()
    larger = grown(guide)
    batch = next(batches)
    with torch.no_grad():
        columns = (batch["token_ids"], batch["positions"], batch["owners"], batch["weights"] > 0)
        difference = (guide.eval()(*columns) - larger.eval()(*columns)).abs().max()
    num_parameters = sum(weight.numel() for weight in larger.parameters())
    print(f"{num_parameters} parameters; logits differ from the guide's by at most {difference:.1e}", flush=True)
    train(larger.train(), itertools.chain([batch], batches), options.steps, peak_rate=PEAK_LEARNING_RATE)
    write_folder(options.out, larger, tokenizer)
    written = (options.out / "model.safetensors").read_bytes()
    print(f"wrote {options.out}, weights {hashlib.sha256(written).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
