"""FileCalls: the few calls that a store makes on its files, whole or not at all. Tests put faults here."""

from __future__ import annotations

import errno
import os


class FileCalls:
    """Reads and writes at a position; a short read is an error, a short write goes on."""

    def read(self, descriptor: int, buffer: memoryview, position: int) -> None:
        """Fill `buffer` with the bytes at `position`; raises `OSError` if the file ends before."""
        while buffer:
            count = os.preadv(descriptor, [buffer], position)
            if not count:
                raise OSError(errno.ENODATA, "the file ends too early")
            buffer, position = buffer[count:], position + count

    def write(self, descriptor: int, data: bytes | memoryview, position: int) -> None:
        """Write `data` at `position`."""
        left = memoryview(data)
        while left:
            count = os.pwrite(descriptor, left, position)
            left, position = left[count:], position + count

    def reserve(self, descriptor: int, position: int, size: int) -> None:
        """Have the system reserve room on the disk, so that no later write lacks it."""
        os.posix_fallocate(descriptor, position, size)
