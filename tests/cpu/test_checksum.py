"""The checksum of blocks on disk is zlib's, whoever computes it, so stores are read by any installation."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import _native
from quire.compute.worker.store.checksum import crc32


@given(data=st.binary(max_size=400), before=st.integers(0, 2**32 - 1))
def test_it_is_that_of_zlib(data: bytes, before: int) -> None:
    assert crc32(data) == crc32(bytearray(data)) == crc32(memoryview(data)) == zlib.crc32(data)
    assert _native.crc32(data, before) == zlib.crc32(data, before)


def test_what_has_no_bytes_in_a_row_is_refused() -> None:
    for wrong in ("text", None, memoryview(bytes(8))[::2]):
        with pytest.raises((TypeError, BufferError)):
            _native.crc32(wrong)  # type: ignore[arg-type]
