"""Write a model of a named shape whose own layer guesses a chosen part of its tokens: for `quire bench speculation`.

    python benchmarks/guessing_model.py /tmp/guessing --noise 0.2
    quire bench speculation /tmp/guessing --speculation mtp --workloads chat --sequences 1 4 16

Published checkpoints have such a layer; with random weights it would guess nothing right. Here no sublayer adds
anything, so the next token depends on the last one only. Texts vary nevertheless: the final norm turns signs around, so
the likeliest token after another is any. The layer computes the same function of the next token, plus noise. All
weights are read as in a real model, so a step takes as long as in one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.compute.models import read_model
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import CONFIG_FILE
from quire.compute.models.guess_layer import guess_layer
from quire.compute.models.parts import Part
from quire.compute.models.source import ModelFolder
from quire.compute.weights.checkpoint import SINGLE_FILE
from quire.compute.weights.decoder_weights import expected_tensors
from quire.instruments.bench.shapes import CONFIGS, write_byte_tokenizer

OUTPUTS = (Part.OUTPUT, Part.DOWN, Part.DELTA_OUTPUT)
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
SPREAD = 0.02


def names_of(spec: DecoderSpec, parts: tuple[Part, ...]) -> set[str]:
    """Return the tensors of some parts, in every layer."""
    stems = [spec.sources[part] for part in parts if part in spec.sources]
    return {f"{stem.stem_of(layer)}.weight" for stem in stems for layer in range(len(spec.layers))}


def numbers_of(spec: DecoderSpec, noise: float) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield each tensor of the model and its layer."""
    layer, random = guess_layer(spec), np.random.default_rng(0)
    signs = random.choice([-1.0, 1.0], spec.hidden_size) - spec.norm.unit_offset
    silent = names_of(spec, OUTPUTS) | names_of(layer, OUTPUTS)
    plain = names_of(layer, (Part.TOKEN_NORM, Part.STATE_NORM))
    final, [join] = (
        names_of(spec, (Part.FINAL_NORM,)) | names_of(layer, (Part.FINAL_NORM,)),
        names_of(layer, (Part.EMBEDDING_IN,)),
    )
    for name, shape in (expected_tensors(spec) | expected_tensors(layer)).items():
        if name in silent:
            yield name, np.zeros(shape, np.float32)
        elif name in plain:
            yield name, np.full(shape, 1 - spec.norm.unit_offset, np.float32)
        elif name in final:
            yield name, signs.astype(np.float32)
        elif name == join:
            of_token = np.eye(shape[0]) + random.normal(0, noise / np.sqrt(shape[0]), (shape[0], shape[0]))
            yield name, np.concatenate([of_token, np.zeros_like(of_token)], axis=1).astype(np.float32)
        else:
            yield name, random.normal(0, SPREAD, shape).astype(np.float32)


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description="Write a model whose own layer guesses a part of its tokens.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--shape", default="qwen3.5-0.8b", choices=sorted(CONFIGS), help="default: qwen3.5-0.8b")
    parser.add_argument("--noise", type=float, default=0.0, help="of the layer, relative to its rows; default: 0")
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True)
    config = CONFIGS[options.shape]
    (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    spec = read_model(ModelFolder(folder)).spec
    write_byte_tokenizer(folder, spec.vocab_size)
    header, end = dict[str, object](), 0
    shapes = expected_tensors(spec) | expected_tensors(guess_layer(spec))
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / SINGLE_FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, numbers in numbers_of(spec, options.noise):
            file.write((numbers.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes())


if __name__ == "__main__":
    main()
