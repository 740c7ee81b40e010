"""FileCalls: the few file operations of a store; each completes or raises. Tests inject faults here."""

from __future__ import annotations

import errno
import os


class FileCalls:
    """Reads and writes at a position; a short read is an error, a short write continues."""

    def read(self, descriptor: int, buffer: memoryview, position: int) -> None:
        """Fill `buffer` with the bytes at `position`; raises `OSError` if the file is too short."""
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
        """Reserve disk space, so that no later write fails for lack of space."""
        os.posix_fallocate(descriptor, position, size)
