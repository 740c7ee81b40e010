"""The shapes that kernels are measured with, against the tensors of a checkpoint, and the checkpoints made of them."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from quire.compute.models import read_model
from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import Part
from quire.compute.models.source import ModelFolder
from quire.compute.weights.decoder_weights import expected_tensors
from quire.core.errors import InvalidConfigError
from quire.instruments.bench.shapes import (
    HEAD,
    RANDOM_NUMBERS,
    KernelShape,
    kernel_shape,
    measured_config,
    write_byte_tokenizer,
    write_random_checkpoint,
)
from support.spec_models import SPECS

DENSE = {
    name: spec
    for name, spec in SPECS.items()
    if spec.experts is None and spec.recurrence is None and name not in ("mixed-layers", "streams")
}
PARTS = {  # a matrix of a step, and the parts of the model that it is made of
    "query, key, value": (Part.QUERY, Part.KEY, Part.VALUE),
    "output": (Part.OUTPUT,),
    "gate, up": (Part.GATE, Part.UP),
    "up": (Part.UP,),
    "down": (Part.DOWN,),
}


def numbers_of(spec: DecoderSpec, part: Part) -> int:
    """How many numbers a checkpoint has of the weight of a part, all layers together; parts with a tensor alone."""
    names = {f"{spec.sources[part].stem_of(layer)}.weight" for layer in range(len(spec.layers))}
    return sum(math.prod(shape) for name, shape in expected_tensors(spec).items() if name in names)


@pytest.mark.parametrize("name", DENSE)
def test_the_matrices_of_a_step_have_the_numbers_of_the_checkpoint(name: str) -> None:
    spec = DENSE[name]
    shape = KernelShape.of(name, spec)
    stems = [source.stem for source in spec.sources.values()]
    assert set(shape.matrices) - {HEAD} == {
        "query, key, value",
        "output",
        "gate, up" if spec.mlp.gated else "up",
        "down",
    }
    for matrix, parts in PARTS.items():
        if matrix in shape.matrices and all(stems.count(spec.sources[part].stem) == 1 for part in parts):
            found = shape.matrices[matrix]
            assert found.num_outputs * found.num_inputs * found.count == sum(numbers_of(spec, part) for part in parts)
    head = shape.matrices[HEAD]
    assert (head.num_outputs, head.count) == (spec.vocab_size, 1)
    assert head.num_inputs == (spec.embedding_size or spec.hidden_size)
    assert (shape.num_heads, shape.num_kv_heads) == (spec.attention.num_heads, spec.attention.num_kv_heads)


def test_heads_wider_than_the_hidden_size_have_wider_matrices() -> None:
    matrices = kernel_shape("qwen3-0.6b").matrices
    assert {name: (each.num_outputs, each.num_inputs, each.count) for name, each in matrices.items()} == {
        "query, key, value": (4096, 1024, 28),
        "output": (1024, 2048, 28),
        "gate, up": (6144, 1024, 28),
        "down": (1024, 3072, 28),
        "head": (151_936, 1024, 1),
    }


def test_a_model_with_experts_has_no_such_shape() -> None:
    (name, spec), *_ = ((name, spec) for name, spec in SPECS.items() if spec.experts is not None)
    with pytest.raises(InvalidConfigError, match=rf"^shape is '{name}'; allowed: a model without experts"):
        KernelShape.of(name, spec)


def test_a_random_checkpoint_is_a_model_whose_numbers_repeat_only_after_a_million(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "model", "tiny", {"num_hidden_layers": 40, "intermediate_size": 128})
    folder = ModelFolder(tmp_path / "model")
    spec = read_model(folder).spec
    assert (len(spec.layers), spec.mlp.intermediate_size) == (40, 128)
    folder.tensors()  # its header is checked
    data = (tmp_path / "model" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    numbers = np.frombuffer(data[8 + length :], "<u2")
    assert len(numbers) == sum(map(math.prod, expected_tensors(spec).values())) > RANDOM_NUMBERS
    assert np.array_equal(numbers[RANDOM_NUMBERS:], numbers[: len(numbers) - RANDOM_NUMBERS])
    values = (numbers[:RANDOM_NUMBERS].astype("<u4") << 16).view("<f4")
    assert np.isfinite(values).all()
    assert abs(float(values.std()) - 0.02) < 0.001
    header = json.loads(data[8 : 8 + length])
    assert {name: tuple(tensor["shape"]) for name, tensor in header.items()} == dict(expected_tensors(spec))
    ends = [tensor["data_offsets"] for tensor in header.values()]
    assert [end for _, end in ends] == [*(start for start, _ in ends[1:]), 2 * len(numbers)], "nothing between them"


def test_the_checkpoint_of_a_shape_is_there_for_the_measurement_only() -> None:
    with measured_config(Namespace(shape="tiny")) as config:
        folder = Path(config.model)
        assert read_model(ModelFolder(folder)).spec.vocab_size == 256
    assert not folder.exists()


def test_every_id_of_a_byte_tokenizer_has_a_text_of_its_own(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_byte_tokenizer(tmp_path, 300)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(300)]
    assert all(texts)
    assert len(set(texts[256:])) == 44
    for text in ("plain words", "größer 😀", "\x00\n"):
        ids = tokenizer.encode(text).ids
        assert len(ids) == len(text.encode())
        assert max(ids) < 256
        assert tokenizer.decode(ids) == text
