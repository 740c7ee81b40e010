"""The header of a GGUF file: what the reference package writes is read, and nothing that is broken comes through."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.gguf import header as header_module
from quire.compute.gguf.header import GgufHeader
from quire.core.errors import CheckpointError

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return U64.pack(len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + U32.pack(kind) + value


def tensor(name: str, dimensions: list[int], kind: int = 0, offset: int = 0) -> bytes:
    packed = b"".join(map(U64.pack, dimensions))
    return text(name) + U32.pack(len(dimensions)) + packed + U32.pack(kind) + U64.pack(offset)


def file_of(pairs: list[bytes], tensors: list[bytes], data: bytes = b"", *, version: int = 3) -> bytes:
    header = b"GGUF" + U32.pack(version) + U64.pack(len(tensors)) + U64.pack(len(pairs)) + b"".join(pairs + tensors)
    return header + bytes(-len(header) % 32) + data


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], GgufHeader]:
    def read(data: bytes) -> GgufHeader:
        path = tmp_path / "x.gguf"
        path.write_bytes(data)
        return GgufHeader.read(path)

    return read


def one_after_the_other(cursor: Any, count: int, what: str) -> list[str]:
    return [cursor.text(what) for _ in range(count)]


@given(
    items=st.lists(st.one_of(st.text(max_size=40), st.just("x" * 30_000)), max_size=40),
    broken=st.sampled_from([None, text(b"\xff\xfe"), U64.pack(1 << 40), U64.pack(3)]),
    window=st.sampled_from([64, 100, 1 << 20]),
)
def test_a_list_of_texts_is_read_as_its_texts_are_one_by_one(
    items: list[str], broken: bytes | None, window: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("list") / "x.gguf"
    count, data = len(items) + (broken is not None), b"".join(map(text, items)) + (broken or b"")
    path.write_bytes(file_of([pair("list", 9, U32.pack(8) + U64.pack(count) + data)], []))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(header_module, "WINDOW_BYTES", window)
        patch.setattr(header_module, "MAX_TEXT_BYTES", 20_000)
        results = []
        for one_by_one in (False, True):
            if one_by_one:
                patch.setattr(header_module._Cursor, "texts", one_after_the_other, raising=False)
            try:
                results.append(GgufHeader.read(path).settings["list"])
            except CheckpointError as error:
                results.append(str(error))
    assert results[0] == results[1]
    if broken is None and max(map(len, items), default=0) < 20_000:
        assert results[0] == items


def test_what_the_reference_package_writes_is_read_as_it_reads_it(tmp_path: Path) -> None:
    path, random = tmp_path / "x.gguf", np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 5e5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("general.name", "é ▁")
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "ü"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.5, 0.0])
    writer.add_int64("big", -(1 << 60))
    for name, shape, kind in (("a", (3, 64), "Q8_0"), ("b", (5,), "F32"), ("c", (2, 4, 256), "Q6_K")):
        numbers = random.normal(size=shape).astype(np.float32)
        quantised = numbers
        if kind == "Q8_0":
            quantised = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q8_0)
        elif kind == "Q6_K":
            quantised = random.integers(0, 256, (2, 4, 210), np.uint8)
        writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header, reference = GgufHeader.read(path), gguf.GGUFReader(path)
    assert header.settings["tokenizer.ggml.tokens"] == ["a", "", "ü"]
    assert header.settings["tokenizer.ggml.add_bos_token"] is True
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            assert header.settings[key] == field.contents()
    assert {each.name for each in reference.tensors} == header.tensors.keys()
    for each in reference.tensors:
        found = header.tensors[each.name]
        assert found.shape == tuple(int(size) for size in each.shape[::-1])
        assert (found.type.name, found.start, found.num_bytes) == (
            each.tensor_type.name,
            each.data_offset,
            each.n_bytes,
        )


ONE = tensor("one", [8])
BROKEN = {
    "empty": (b"", "x.gguf is incomplete: it has 0 bytes and needs at least 4. Download it again."),
    "four bytes": (b"GGUF", "x.gguf is incomplete: it has 4 bytes and needs at least 8. Download it again."),
    "another format": (b"PK\x03\x04" + bytes(40), "a GGUF file"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1", "git-lfs pointer"),
    "version 1": (file_of([], [], version=1), "version is 1; allowed: 2 or 3"),
    "big-endian": (file_of([], [], version=3 << 24), "version is 'big-endian'"),
    "many tensors": (
        b"GGUF" + U32.pack(3) + U64.pack(1 << 60) + U64.pack(0),
        "number of tensors is 1152921504606846976",
    ),
    "many settings": (b"GGUF" + U32.pack(3) + U64.pack(0) + U64.pack(1 << 60), "number of settings"),
    "a long key": (file_of([U64.pack(1 << 40)], []), "the name of a setting: length is 1099511627776"),
    "a key cut off": (file_of([U64.pack(1000)], []), "is incomplete: it has 32 bytes and needs at least 1,032."),
    "no UTF-8": (file_of([pair("k", 8, text(b"\xff\xfe"))], []), "text in UTF-8"),
    "an unknown type": (file_of([pair("k", 13, b"")], []), "setting 'k': type is 13"),
    "a list of lists": (file_of([pair("k", 9, U32.pack(9) + U64.pack(1))], []), "a list of lists"),
    "a long list": (file_of([pair("k", 9, U32.pack(0) + U64.pack(1 << 50))], []), "lists of at most 4000000 items"),
    "a list cut off": (file_of([pair("k", 9, U32.pack(12) + U64.pack(1 << 20))], []), "needs at least 8,388,657."),
    "half a truth": (file_of([pair("k", 7, b"\x02")], []), "a boolean: 0 or 1"),
    "a setting twice": (file_of([pair("k", 0, b"\x01")] * 2, []), "setting 'k' is 'given twice'"),
    "no dimensions": (file_of([], [tensor("t", [])]), "number of dimensions is 0; allowed: from 1 to 4"),
    "five dimensions": (file_of([], [tensor("t", [1] * 5)]), "number of dimensions is 5"),
    "a dimension of 0": (file_of([], [tensor("t", [0])], bytes(32)), "dimensions is"),
    "a product beyond 64 bits": (file_of([], [tensor("t", [1 << 32] * 4)], bytes(32)), "dimensions is"),
    "an unknown number type": (file_of([], [tensor("t", [8], 4)], bytes(32)), "type is 'number 4'"),
    "a vector of blocks": (file_of([], [tensor("t", [32], 8)], bytes(64)), "type is 'Q8_0'; allowed: a type of single"),
    "half a block": (file_of([], [tensor("t", [40, 1], 8)], bytes(64)), "a multiple of 32 for Q8_0"),
    "an odd offset": (file_of([], [tensor("t", [8], 0, 4)], bytes(64)), "offset is 4; allowed: a multiple of 32"),
    "beyond the end": (
        file_of([], [tensor("t", [8], 0, 32)], bytes(32)),
        "x.gguf is incomplete: it has 96 bytes and needs at least 128. ",
    ),
    "far beyond the end": (
        file_of([], [tensor("t", [8], 0, (1 << 64) - 32)], bytes(32)),
        "is incomplete: it has 96 bytes",
    ),
    "larger than the file": (file_of([], [tensor("t", [1 << 20])], bytes(32)), "and needs at least 4,194,3"),
    "a tensor twice": (file_of([], [ONE, ONE], bytes(64)), "tensor 'one' is 'given twice'"),
    "overlapping": (
        file_of([], [tensor("a", [16]), tensor("b", [8], 0, 32)], bytes(96)),
        "tensor 'b': offset is 32; allowed: at least 64, where the tensor before it ends",
    ),
    "no alignment": (file_of([pair("general.alignment", 4, U32.pack(0))], [ONE], bytes(32)), "a power of two from 8"),
    "an odd alignment": (
        file_of([pair("general.alignment", 4, U32.pack(48))], [ONE], bytes(32)),
        "general.alignment is 48",
    ),
    "an alignment in words": (file_of([pair("general.alignment", 8, text("32"))], [ONE], bytes(32)), "a power of two"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused_in_one_line(name: str, read: Callable[[bytes], GgufHeader]) -> None:
    data, said = BROKEN[name]
    with pytest.raises(CheckpointError) as refused:
        read(data)
    assert said in str(refused.value)
    assert "x.gguf" in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_of_either_version_with_one_tensor_is_whole(read: Callable[[bytes], GgufHeader]) -> None:
    for version in (2, 3):
        header = read(file_of([pair("k", 10, U64.pack(7))], [ONE], bytes(32), version=version))
        assert header.settings == {"k": 7}
        assert header.tensors["one"].start + 32 == header.file_bytes[header.path]


def test_a_header_larger_than_a_window_is_read_on(read: Callable[[bytes], GgufHeader]) -> None:
    words = [f"word {number} " + "x" * 90 for number in range(60_000)]  # six megabytes
    items = pair("words", 9, U32.pack(8) + U64.pack(len(words)) + b"".join(map(text, words)))
    header = read(file_of([items, pair("last", 0, b"\x05")], [ONE], bytes(32)))
    assert header.settings["words"] == words
    assert header.settings["last"] == 5


def part(number: int, count: int, name: str, **settings: int) -> bytes:
    pairs = [pair("split.no", 2, struct.pack("<H", number)), pair("split.count", 2, struct.pack("<H", count))]
    pairs += [pair(key.replace("_", "."), 5, struct.pack("<i", value)) for key, value in settings.items()]
    return file_of(pairs, [tensor(name, [8])], bytes(32))


def test_a_model_in_several_files_is_one(tmp_path: Path) -> None:
    for number, name in enumerate("abc"):
        (tmp_path / f"m-0000{number + 1}-of-00003.gguf").write_bytes(part(number, 3, name, split_tensors_count=3))
    for number in (1, 2, 3):  # whichever part is named
        header = GgufHeader.read(tmp_path / f"m-0000{number}-of-00003.gguf")
        assert header.path.name == "m-00001-of-00003.gguf"
        assert [header.tensors[name].file.name[6] for name in "abc"] == ["1", "2", "3"]
        assert len(header.file_bytes) == 3


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([part(0, 2, "a"), None], "m-00002-of-00002.gguf"),
        ([part(0, 2, "a"), part(1, 2, "a")], "in m-00001-of-00002.gguf and in m-00002-of-00002.gguf"),
        ([part(0, 2, "a"), part(0, 2, "b")], "m-00002-of-00002.gguf: split.no is 0; allowed: 1, as in its name"),
        ([part(0, 3, "a"), part(1, 3, "b")], "split.count is 3; allowed: 2"),
        ([part(0, 2, "a", split_tensors_count=9), part(1, 2, "b")], "tensors of all parts is 2; allowed: 9"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(parts: list[bytes | None], said: str, tmp_path: Path) -> None:
    for number, data in enumerate(parts):
        if data is not None:
            (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(data)
    with pytest.raises(CheckpointError) as refused:
        GgufHeader.read(tmp_path / "m-00001-of-00002.gguf")
    assert said in str(refused.value)


def test_parts_are_checked_as_they_are_read_and_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "m-00001-of-00003.gguf"
    first.write_bytes(part(0, 3, "a"))
    for number in (2, 3):
        (tmp_path / f"m-0000{number}-of-00003.gguf").symlink_to(first)
    read: list[str] = []
    read_one = GgufHeader.read_one
    monkeypatch.setattr(GgufHeader, "read_one", lambda path: read.append(path.name) or read_one(path))
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf: split\.no is 0; allowed: 1"):
        GgufHeader.read(first)
    assert len(read) == 2
    for number, name in ((1, "b"), (2, "c")):
        path = tmp_path / f"m-0000{number + 1}-of-00003.gguf"
        path.unlink()
        path.write_bytes(part(number, 3, name))
    monkeypatch.setattr(header_module, "MAX_TENSORS", 2)
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003\.gguf: tensors up to here is 3; allowed: at most 2"):
        GgufHeader.read(first)


@pytest.mark.parametrize("name", ["m-00003-of-00002.gguf", "m-00000-of-00002.gguf", "m-00001-of-99999.gguf"])
def test_a_part_that_cannot_be_is_refused_before_any_is_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="at most 1000 parts"):
        GgufHeader.read(tmp_path / name)
