"""StoreFolder: the folder of one store, opened so that only its owner reads it and only one engine writes it.

    DIR/<fingerprint>/    meta.json, lock, slots.idx, blocks.bin

Folders have mode 0700 and files 0600. A folder or file that is a link, belongs to another user, or can be read or
written by others is refused, because it contains prompts. All files are opened through the folder's descriptor, so
replacing the folder meanwhile has no effect. A second engine with the same fingerprint takes `<fingerprint>.1`.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from quire.core.errors import InvalidConfigError
from quire.core.private_files import FIELD, make_private, open_private, or_refuse, require_private

FILES: Final = ("meta.json", "lock", "slots.idx", "blocks.bin")
MARK: Final = "quire KV store 1"
MAX_ENGINES: Final = 8
NUM_TRIES: Final = 20
RETRY_S: Final = 0.05


class StoreFolder:
    """An open, locked folder."""

    def __init__(self, path: Path, descriptor: int, lock: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._lock = lock

    @classmethod
    def open(cls, parent: Path, name: str) -> StoreFolder:
        """Open and lock the folder for a fingerprint, and create it if it is missing; if it is taken, try the next.

        Raises `InvalidConfigError` if `parent` or the folder must not be used.
        """
        make_private(parent)
        for number in range(MAX_ENGINES):
            path = parent / (f"{name}.{number}" if number else name)
            # After a server was killed, its engine takes a moment to notice and to end.
            for _ in range(1 if number else NUM_TRIES):
                folder = cls._try(path)
                if folder is not None:
                    os.utime(folder._lock)  # the time of its last use
                    return folder
                time.sleep(RETRY_S)
        raise InvalidConfigError(FIELD, str(parent), f"a folder that fewer than {MAX_ENGINES} engines use")

    @classmethod
    def existing(cls, path: Path) -> StoreFolder | None:
        """Lock an existing store; None if an engine uses it. Raises `InvalidConfigError` if it must not be used."""
        if not is_store(path):
            raise InvalidConfigError(FIELD, str(path), "a store, with its meta.json")
        return cls._try(path)

    @classmethod
    def _try(cls, path: Path) -> StoreFolder | None:
        with suppress(FileExistsError):
            or_refuse(path, lambda: os.mkdir(path, 0o700))
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = or_refuse(path, lambda: os.open(path, flags))
        try:
            require_private(path, os.fstat(descriptor))
            lock = open_private(descriptor, path, "lock")
        except BaseException:
            os.close(descriptor)
            raise
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.stat("lock", dir_fd=descriptor).st_ino == os.fstat(lock).st_ino
        except OSError:
            is_there = False
        if not is_there:  # an engine uses the store, or has just removed it
            os.close(lock)
            os.close(descriptor)
            return None
        return cls(path, descriptor, lock)

    def file(self, name: str) -> int:
        """Return a descriptor of a file in the folder; creates the file if it is missing."""
        return open_private(self._descriptor, self.path, name)

    def remove(self) -> None:
        """Delete the files of the store, and the folder if nothing else is in it."""
        for name in FILES:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._descriptor)
        os.rmdir(self.path)

    def close(self) -> None:
        """Unlock the folder; may be called twice."""
        for descriptor in (self._lock, self._descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._lock = self._descriptor = -1


def is_store(path: Path) -> bool:
    """Whether a folder is one of our stores: not a link, and with our mark in `meta.json`. Does not mutate."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return False
        with open(path / "meta.json", "rb") as file:
            meta = json.loads(file.read(1 << 16))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(meta, dict) and meta.get("store") == MARK


def stores_in(parent: Path) -> list[Path]:
    """Return the stores in a folder, least recently used first. Does not mutate."""
    found = [path for path in parent.iterdir() if is_store(path)]
    return sorted(found, key=lambda path: max((status.st_mtime for status in _files_of(path)), default=0.0))


def store_bytes(path: Path) -> int:
    """Return the disk space of a store's files, in bytes."""
    return sum(status.st_blocks * 512 for status in _files_of(path))


def _files_of(path: Path) -> Iterator[os.stat_result]:
    """Yield the status of each file of a store; another engine may be removing them."""
    for name in FILES:
        with suppress(FileNotFoundError):
            yield os.lstat(path / name)


def remove_store(path: Path) -> bool:
    """Remove a store unless an engine uses it; return whether it was removed."""
    folder = StoreFolder.existing(path)
    if folder is None:
        return False
    try:
        folder.remove()
    except OSError:
        return False
    finally:
        folder.close()
    return True
