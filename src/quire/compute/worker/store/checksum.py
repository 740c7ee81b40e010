"""The checksum of blocks on disk: CRC-32, which detects accidental damage.

The compiled core computes it three to four times as fast as zlib, which took most of the time of a load. The torch
engine can run without the core, and then uses zlib.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final


def _fastest() -> Callable[[bytes | bytearray | memoryview], int]:
    try:
        from quire._native import cpu_features
        from quire._native import crc32 as compiled
    except ImportError:
        return zlib.crc32
    return compiled if cpu_features()["pclmulqdq"] else zlib.crc32


crc32: Final = _fastest()
"""Return the checksum of bytes, as `zlib.crc32` does. Releases the interpreter's lock."""
