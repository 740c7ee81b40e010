"""Model files: what is read, and that every lie in a header is found before anything is mapped."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.compute.models import read_model
from quire.compute.models.parts import Part
from quire.compute.models.source import ModelFolder
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.decoder_weights import DecoderWeights
from quire.compute.weights.safetensors import read_header
from quire.core.errors import CheckpointError
from support.tiny_checkpoint import (
    safetensors_bytes,
    tiny_qwen3_config,
    tiny_qwen3_tensors,
    write_model_weights,
    write_tiny_qwen3,
)

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([1.5, -2.25, 1e-3, 300.0], np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.array(7.0, np.float32),
}


# --- reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_float32_comes_back_bit_for_bit(num_shards: int, tmp_path: Path) -> None:
    write_model_weights(tmp_path, TENSORS, num_shards=num_shards)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.entries.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        read = checkpoint.tensor(name)
        assert (read.shape, read.dtype) == (tensor.shape, np.float32)
        assert read.tobytes() == tensor.tobytes()


@pytest.mark.parametrize(("dtype", "relative_error"), [("F16", 2**-11), ("BF16", 2**-7)])
def test_half_precision_is_widened(dtype: str, relative_error: float, tmp_path: Path) -> None:
    write_model_weights(tmp_path, TENSORS, dtype=dtype)
    checkpoint = Checkpoint.open(tmp_path)
    for name, tensor in TENSORS.items():
        np.testing.assert_allclose(checkpoint.tensor(name), tensor, rtol=relative_error)


def test_bfloat16_is_the_upper_half_of_a_float32(tmp_path: Path) -> None:
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    write_model_weights(tmp_path, {"all": bits.view(np.float32)}, dtype="BF16")
    assert Checkpoint.open(tmp_path).tensor("all").tobytes() == bits.tobytes()


def test_float32_is_mapped_and_cannot_be_written(tmp_path: Path) -> None:
    write_model_weights(tmp_path, TENSORS)
    checkpoint = Checkpoint.open(tmp_path)
    read = checkpoint.tensor("a")
    assert np.shares_memory(read, checkpoint.tensor("a"))
    with pytest.raises(ValueError, match="read-only"):
        read[0, 0] = 1


def test_bytes_that_are_not_aligned_are_read(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    write_file(tmp_path, header, np.array([1, 2], "<f4").tobytes(), padding=1)
    read = Checkpoint.open(tmp_path).tensor("a")
    assert read.flags.aligned
    assert read.tolist() == [1.0, 2.0]


def test_other_dtypes_may_lie_in_a_file_but_are_not_weights(tmp_path: Path) -> None:
    header = {"ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}
    write_file(tmp_path, header, bytes(8))
    with pytest.raises(CheckpointError, match=r"tensor 'ids': dtype is 'I64'; allowed: one of F32, F16, BF16"):
        Checkpoint.open(tmp_path).tensor("ids")


def test_the_official_library_reads_what_our_helper_writes(tmp_path: Path) -> None:
    write_model_weights(tmp_path, TENSORS)
    read = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in read.items()} == {
        name: tensor.tolist() for name, tensor in TENSORS.items()
    }


def test_we_read_what_the_official_library_writes(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert all(checkpoint.tensor(name).tobytes() == tensor.tobytes() for name, tensor in TENSORS.items())


# --- one file, every lie -----------------------------------------------------------------------


def write_file(folder: Path, header: object, data: bytes, *, padding: int = 0) -> Path:
    """Write a file with any header at all."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + padding)
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def tensor(start: int, stop: int, *, shape: object = None, dtype: object = "F32") -> dict[str, object]:
    shape = [(stop - start) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


LIES: dict[str, tuple[object, str]] = {
    "not an object": ([], "header is 'a JSON list'; allowed: one JSON object"),
    "tensor is no object": ({"a": 3}, "tensor 'a' is 3; allowed: an object of dtype, shape and data_offsets"),
    "field missing": ({"a": {"dtype": "F32", "shape": [4]}}, "allowed: an object of dtype, shape and data_offsets"),
    "field extra": ({"a": tensor(0, 16) | {"more": 1}}, "allowed: an object of dtype, shape and data_offsets"),
    "dtype unknown": ({"a": tensor(0, 16, dtype="F31")}, "dtype is 'F31'; allowed: one of BOOL,"),
    "dtype is no text": ({"a": tensor(0, 16, dtype=[1])}, "dtype is [1]; allowed: one of"),
    "shape is no list": ({"a": tensor(0, 16, shape=4)}, "shape is 4; allowed: a list of integers from 0"),
    "shape is negative": ({"a": tensor(0, 16, shape=[-2, -2])}, "shape is [-2, -2]; allowed:"),
    "shape of floats": ({"a": tensor(0, 16, shape=[4.0])}, "shape is [4.0]; allowed:"),
    "shape of truth": ({"a": tensor(0, 4, shape=[True])}, "shape is [True]; allowed:"),
    "shape too small": ({"a": tensor(0, 16, shape=[3])}, "[0, 16]; allowed: a range of 12 bytes, which F32"),
    "shape overflows": ({"a": tensor(0, 16, shape=[1 << 62, 1 << 62, 4])}, "allowed: a range of 340282366920938463"),
    "offsets swapped": ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}, "0 <= begin <= end"),
    "offsets negative": ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}, "0 <= begin <= end"),
    "three offsets": ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8, 16]}}, "0 <= begin <= end"),
    "overlap": (
        {"a": tensor(0, 12), "b": tensor(8, 16)},
        "tensor 'b' is 'an overlap: begins at byte 8'; allowed: 12, where the tensor before it ends",
    ),
    "one range twice": ({"a": tensor(0, 16), "b": tensor(0, 16)}, "tensor 'b' is 'an overlap: begins at byte 0'"),
    "gap at the start": ({"a": tensor(4, 16)}, "tensor 'a' is 'a gap: begins at byte 4'; allowed: 0"),
    "gap between": ({"a": tensor(0, 4), "b": tensor(8, 16)}, "tensor 'b' is 'a gap: begins at byte 8'; allowed: 4"),
    "beyond the end": ({"a": tensor(0, 20)}, "is incomplete: it has "),
    "bytes left over": ({"a": tensor(0, 12)}, "as its header says"),
    "metadata is no object": ({"__metadata__": 3, "a": tensor(0, 16)}, "__metadata__ is 3; allowed: an object"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": tensor(0, 16)}, "allowed: an object of strings"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, message = LIES[lie]
    path = write_file(tmp_path, header, bytes(16))
    monkeypatch.setattr(mmap, "mmap", forbidden)
    with pytest.raises(CheckpointError) as refused:
        Checkpoint.open(tmp_path)
    assert message in str(refused.value)
    assert str(refused.value).startswith(str(path))


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("mapped before it was validated")


RAW: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "is incomplete: it has 0 bytes and needs at least 8. Download it again."),
    "short file": (b"\x02\0\0", "is incomplete: it has 3 bytes and needs at least 8. Download it again."),
    "no header": (bytes(8), "header length is 0; allowed: 2 to 33554432"),
    "header beyond the end": (
        (99).to_bytes(8, "little") + b"{}",
        "is incomplete: it has 10 bytes and needs at least 107. Download it again.",
    ),
    "huge header": (b"\xff" * 8 + b"{}", "header length is 18446744073709551615"),
    "not JSON": ((4).to_bytes(8, "little") + b"{,,}", "header is 'not JSON"),
    "not UTF-8": ((4).to_bytes(8, "little") + b'"\xff\xff"', 'header is "not JSON:'),
    "nested too deep": ((200_000).to_bytes(8, "little") + b"[" * 200_000, "header is 'not JSON"),
    "a number without end": (
        (9_011).to_bytes(8, "little") + b'{"a": ' + b"9" * 9_004 + b"}",
        "header",
    ),
    "key twice": (
        (14).to_bytes(8, "little") + b'{"a":1,"a":{}}',
        "header: key 'a' is 'given twice'; allowed: each key once",
    ),
}


@pytest.mark.parametrize("damage", RAW)
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    data, message = RAW[damage]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as refused:
        read_header(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = safetensors_bytes(TENSORS)
    path = tmp_path / "model.safetensors"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=f"is incomplete: it has {length:,} bytes and needs at least "):
            read_header(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(CheckpointError, match="size is"):
        read_header(path)


def test_every_changed_byte_of_a_header_is_refused_or_read(tmp_path: Path) -> None:
    data = safetensors_bytes({"a": TENSORS["a"], "b": TENSORS["b"]})
    path = tmp_path / "model.safetensors"
    for place in range(8 + int.from_bytes(data[:8], "little")):
        for value in (0, ord("0"), ord("9"), ord('"'), ord("}"), 255):
            path.write_bytes(data[:place] + bytes([value]) + data[place + 1 :])
            try:
                entries = read_header(path)
            except CheckpointError:
                continue
            assert sorted(entry.shape for entry in entries.values()) in ([(2, 3), (4,)], [(4,), (2, 3)])


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model\.safetensors or model\.safetensors\.index\.json: it is empty"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="No such file or directory"):
        read_header(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="a folder"):
        read_header(tmp_path)


# --- shards ------------------------------------------------------------------------------------

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def change_map(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"] |= changes
        path.write_text(json.dumps(index))

    return change


def change_index(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text) and None


def remove_shard(folder: Path) -> None:
    (folder / SECOND).unlink()


def repeat_tensor(folder: Path) -> None:
    both = {name: TENSORS[name] for name in ("a", "b", "scalar")}
    (folder / SECOND).write_bytes(safetensors_bytes(both))


def damage_shard(folder: Path) -> None:
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-1])


SHARD_LIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "shard missing": (remove_shard, f"{SECOND} is 'No such file or directory'"),
    "shard torn": (damage_shard, f"{SECOND} is incomplete"),
    "tensor in two shards": (repeat_tensor, f"tensor 'a' is 'in {FIRST} and in {SECOND}'; allowed: in one file"),
    "tensor in another shard": (change_map(a=SECOND), f"tensor 'a' is 'not in {SECOND}'"),
    "tensor in no shard": (change_map(c=FIRST), f"tensor 'c' is 'not in {FIRST}'; allowed: in the shard that is named"),
    "path upwards": (change_map(a="../model.safetensors"), "weight_map['a'] is '../model.safetensors'; allowed: the"),
    "absolute path": (change_map(a="/etc/x.safetensors"), "allowed: the plain name of a .safetensors file"),
    "other ending": (change_map(a="weights.bin"), "allowed: the plain name of a .safetensors file"),
    "NUL in a name": (change_map(a="a\0.safetensors"), "allowed: the plain name of a .safetensors file"),
    "name is a number": (change_map(a=3), "weight_map['a'] is 3"),
    "no map": (change_index("{}"), "weight_map is None; allowed: an object"),
    "empty map": (change_index('{"weight_map": {}}'), "weight_map is {}; allowed: an object"),
    "map is a list": (change_index('{"weight_map": []}'), "weight_map is []; allowed: an object"),
    "index is no JSON": (change_index("{"), "model.safetensors.index.json is 'not JSON"),
    "key twice": (change_index('{"weight_map": {}, "weight_map": {}}'), "key 'weight_map' is 'given twice'"),
}


@pytest.mark.parametrize("lie", SHARD_LIES)
def test_an_index_that_lies_is_refused(lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = SHARD_LIES[lie]
    write_model_weights(tmp_path, TENSORS, num_shards=2)
    change(tmp_path)
    monkeypatch.setattr(mmap, "mmap", forbidden)
    with pytest.raises(CheckpointError) as refused:
        Checkpoint.open(tmp_path)
    assert message in str(refused.value)


# --- against the spec --------------------------------------------------------------------------


def load(folder: Path) -> DecoderWeights:
    return DecoderWeights.load(read_model(ModelFolder(folder)).spec, Checkpoint.open(folder))


def test_tensors_are_those_of_the_config(tmp_path: Path) -> None:
    config = tiny_qwen3_config(tie=False)
    tensors: dict[str, Any] = tiny_qwen3_tensors(config, seed=0)
    write_tiny_qwen3(tmp_path, tie=False, num_shards=3)
    load(tmp_path)
    query = tensors.pop("model.layers.1.self_attn.q_proj.weight")
    tensors["model.layers.1.self_attn.query.weight"] = query
    tensors["model.norm.weight"] = np.ones(63, np.float32)
    folder = tmp_path / "wrong"
    write_tiny_qwen3(folder, tie=False)
    write_model_weights(folder, tensors)
    with pytest.raises(CheckpointError) as refused:
        load(folder)
    assert "missing: model.layers.1.self_attn.q_proj.weight;" in str(refused.value)
    assert "extra: model.layers.1.self_attn.query.weight;" in str(refused.value)
    assert "wrong shape: model.norm.weight [63] for [64])" in str(refused.value)


def test_many_wrong_tensors_are_counted(tmp_path: Path) -> None:
    write_tiny_qwen3(tmp_path, settings={"num_hidden_layers": 1})
    write_model_weights(tmp_path, tiny_qwen3_tensors(tiny_qwen3_config(), seed=0))
    with pytest.raises(CheckpointError, match=r"extra: model\.layers\.1\S+, \S+, \S+ and 19 more\) is '35 tensors'"):
        load(tmp_path)


def test_a_tied_model_may_bring_a_head_that_is_not_used(tmp_path: Path) -> None:
    write_tiny_qwen3(tmp_path, tie=True)
    tensors = tiny_qwen3_tensors(tiny_qwen3_config(tie=False), seed=0)
    write_model_weights(tmp_path, tensors)
    assert Part.HEAD not in load(tmp_path).parts


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_a_model_in_half_precision_loads(dtype: str, tmp_path: Path) -> None:
    write_tiny_qwen3(tmp_path, dtype=dtype, num_shards=2)
    assert len(load(tmp_path).layers) == 3
