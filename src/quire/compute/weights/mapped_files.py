"""MappedFiles: the files of a model, each mapped when it is first read."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from quire.compute.arrays import ByteArray
from quire.core.errors import CheckpointError
from quire.core.model_files import open_model_file


class MappedFiles:
    """Reads bytes of files. `sizes`: the size of each file when its header was checked."""

    def __init__(self, sizes: Mapping[Path, int]) -> None:
        self._sizes = sizes
        self._mappings: dict[Path, mmap.mmap] = {}

    def bytes_of(self, path: Path, start: int, stop: int) -> ByteArray:
        """Return bytes of a file, read-only. Mutates: maps the file, and raises if its size has changed since.

        If a file is truncated later, reading the missing part ends this process with SIGBUS.
        """
        if path not in self._mappings:
            with open_model_file(path) as file:
                size, checked = os.fstat(file.fileno()).st_size, self._sizes[path]
                if size != checked:
                    raise CheckpointError(f"{path}: size", size, f"{checked} bytes, as when it was checked")
                self._mappings[path] = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        return np.frombuffer(self._mappings[path], np.uint8, stop - start, start)

    def release(self) -> None:
        """Free the memory; views stay valid, and are read again when used."""
        for mapping in self._mappings.values():
            mapping.madvise(mmap.MADV_DONTNEED)
