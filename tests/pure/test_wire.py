"""The binary form: what was written is read back, and what is torn is refused."""

from __future__ import annotations

import struct
import sys
from array import array
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core import wire
from quire.core.errors import StepLogError
from quire.core.step import column
from quire.core.wire import WireReader, WireWriter

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TEXTS = st.text(st.characters(), max_size=8)  # lone surrogates included
COLUMNS = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=5).map(lambda values: array("i", values))


@given(INT64, st.floats(), st.binary(max_size=9), TEXTS, COLUMNS)
def test_every_kind_of_field_is_read_as_it_was_written(
    integer: int, number: float, raw: bytes, text: str, values: array[int]
) -> None:
    writer = WireWriter()
    writer.integer(integer)
    writer.number(number)
    writer.raw(raw)
    writer.text(text)
    writer.column(values)
    reader = WireReader(writer.to_bytes())
    assert reader.integer() == integer
    assert repr(reader.number()) == repr(number)
    assert (reader.raw(), reader.text(), reader.column()) == (raw, text, values)


def test_the_form_is_little_endian_with_lengths_of_eight_bytes() -> None:
    writer = WireWriter()
    writer.integer(-2)
    writer.column(column(1, -1))
    writer.text("é")
    expected = "feffffffffffffff 0800000000000000 01000000ffffffff 0200000000000000 c3a9"
    assert writer.to_bytes() == bytes.fromhex(expected)


@pytest.mark.parametrize("length", [-1, 5, 1 << 40, -(1 << 63)])
def test_a_length_is_checked_before_it_is_believed(length: int) -> None:
    writer = WireWriter()
    writer.integer(length)
    with pytest.raises(StepLogError):
        WireReader(writer.to_bytes() + b"four").raw()


def test_a_column_is_made_of_whole_integers() -> None:
    writer = WireWriter()
    writer.raw(b"12345")
    with pytest.raises(StepLogError, match="has 5 bytes"):
        WireReader(writer.to_bytes()).column()


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_column_has_the_length_that_was_asked_for(length: int) -> None:
    writer = WireWriter()
    writer.column(column(1, 2))
    with pytest.raises(StepLogError, match="has 8 bytes"):
        WireReader(writer.to_bytes()).column(length)
    assert WireReader(writer.to_bytes()).column(2) == column(1, 2)


@pytest.mark.parametrize("data", [b"\xff", b"\xc3", b"a\x80"])
def test_text_that_is_no_text_is_refused(data: bytes) -> None:
    writer = WireWriter()
    writer.raw(data)
    with pytest.raises(StepLogError, match="a string is not valid UTF-8"):
        WireReader(writer.to_bytes()).text()


def test_nothing_may_be_left_over() -> None:
    writer = WireWriter()
    writer.integer(1)
    reader = WireReader(writer.to_bytes() + b"!")
    reader.integer()
    with pytest.raises(StepLogError, match="1 bytes are left over"):
        reader.finish()
    reader = WireReader(writer.to_bytes())
    reader.integer()
    reader.finish()


@pytest.mark.parametrize(
    ("data", "length", "message"),
    [
        (b"12345678", 3, "a column of 32-bit integers has 8 bytes; expected: 12"),
        (b"12345678", 1, "a column of 32-bit integers has 8 bytes; expected: 4"),
        (b"12345", None, "a column of 32-bit integers has 5 bytes; expected: a multiple of 4"),
    ],
)
def test_the_error_says_what_a_column_is_not(data: bytes, length: int | None, message: str) -> None:
    writer = WireWriter()
    writer.raw(data)
    with pytest.raises(StepLogError) as caught:
        WireReader(writer.to_bytes()).column(length)
    assert str(caught.value) == message


@pytest.mark.parametrize("size", [1, 7, 9, 15])
def test_a_column_of_doubles_is_made_of_whole_ones(size: int) -> None:
    writer = WireWriter()
    writer.raw(bytes(size))
    with pytest.raises(StepLogError) as caught:
        WireReader(writer.to_bytes()).numbers()
    assert str(caught.value) == f"a column of doubles has {size} bytes; expected: a multiple of 8"


@given(st.lists(st.floats(allow_nan=False), max_size=5))
def test_doubles_are_read_as_they_were_written(values: list[float]) -> None:
    writer = WireWriter()
    writer.numbers(array("d", values))
    assert writer.to_bytes() == struct.pack(f"<q{len(values)}d", 8 * len(values), *values)
    assert WireReader(writer.to_bytes()).numbers().tolist() == values


def test_a_record_that_ends_too_early_says_where_and_how_much_was_wanted() -> None:
    reader = WireReader(bytes(12))
    reader.integer()
    with pytest.raises(StepLogError, match=r"^the record ends after 12 bytes, but 16 are needed$"):
        reader.number()
    reader = WireReader(struct.pack("<q", 3) + b"abc")
    assert reader.raw() == b"abc", "what ends with the record is whole"
    reader.finish()


def test_a_machine_of_the_other_byte_order_swaps_what_it_writes_and_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    integers, doubles = column(1, -2), array("d", [0.5])
    monkeypatch.setattr(wire, "sys", SimpleNamespace(byteorder="big" if sys.byteorder == "little" else "little"))
    writer = WireWriter()
    writer.column(integers)
    writer.numbers(doubles)
    swapped = struct.pack("=q", 8) + struct.pack(">2i", 1, -2) + struct.pack("=q", 8) + struct.pack(">d", 0.5)
    assert writer.to_bytes() == swapped
    assert (integers, doubles) == (column(1, -2), array("d", [0.5])), "what is written stays as it was"
    reader = WireReader(writer.to_bytes())
    assert (reader.column(), reader.numbers()) == (integers, doubles)
