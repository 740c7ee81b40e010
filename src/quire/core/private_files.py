"""Private files: folders and files that hold prompts or secrets, and that only their owner may read.

A folder or file that is a link, belongs to another user, or can be read or written by others is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from quire.core.errors import InvalidConfigError

FIELD: Final = "disk_cache"
_Value = TypeVar("_Value")


def make_private(path: Path) -> None:
    """Create the folder of all stores, for its owner only, or check the existing folder."""
    with suppress(FileExistsError):
        or_refuse(path, lambda: os.mkdir(path, 0o700))
    status = or_refuse(path, lambda: os.lstat(path))
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidConfigError(FIELD, str(path), "a folder, not a link or a file")
    _require_own(path, status)
    if status.st_mode & 0o022:
        raise InvalidConfigError(FIELD, str(path), f"a folder that others cannot write to: chmod go-w {path}")


def open_private(folder: int, path: Path, name: str) -> int:
    """Open a file in `folder` for reading and writing; refuses links, and files that others own or can read."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = or_refuse(path / name, lambda: os.open(name, flags, 0o600, dir_fd=folder))
    try:
        status = os.fstat(descriptor)
        require_private(path / name, status)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise InvalidConfigError(FIELD, str(path / name), "a plain file without hard links")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def or_refuse(path: Path, call: Callable[[], _Value]) -> _Value:
    """Return the result of a call; an `OSError` becomes an `InvalidConfigError`, except `FileExistsError`."""
    try:
        return call()
    except FileExistsError:
        raise
    except OSError as error:
        raise InvalidConfigError(FIELD, str(path), f"a folder that can be used: {error.strerror}") from error


def _require_own(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise InvalidConfigError(FIELD, str(path), "a folder of the user that runs quire")


def require_private(path: Path, status: os.stat_result) -> None:
    """Raise `InvalidConfigError` unless only this user may read and write a file or folder."""
    _require_own(path, status)
    if status.st_mode & 0o077:
        raise InvalidConfigError(FIELD, str(path), f"private to its owner: chmod go-rwx {path}")
