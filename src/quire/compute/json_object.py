"""JSON objects out of a model folder: strict, bounded, and every failure one `CheckpointError`.

The standard parser keeps the last of two equal keys, so that two readers of one file may see two
different models. Here equal keys are an error, as are other values than an object, and files larger
than the caller allows.
"""

from __future__ import annotations

import json
from pathlib import Path

from quire.core.errors import CheckpointError

MAX_JSON_BYTES = 100_000_000
LFS_POINTER = b"version https://git-lfs"


def parse_json_object(data: bytes, where: str) -> dict[str, object]:
    """Parse `data` as one JSON object; `where` names it in errors.

    >>> parse_json_object(b'{"a": 1}', "config.json")
    {'a': 1}
    >>> parse_json_object(b'{"a": 1, "a": 2}', "config.json")
    Traceback (most recent call last):
    ...
    quire.core.errors.CheckpointError: config.json: key 'a' is 'there twice'; allowed: each key once
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in pairs:
            if key in found:
                raise CheckpointError(f"{where}: key {key!r}", "there twice", "each key once")
            found[key] = value
        return found

    if data.startswith(LFS_POINTER):
        raise lfs_pointer(where)
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(where, f"not JSON: {error}", "one JSON object in UTF-8") from error
    if not isinstance(value, dict):
        raise CheckpointError(where, f"a JSON {type(value).__name__}", "one JSON object")
    return value


def read_json_object(path: Path) -> dict[str, object]:
    """Read the file at `path` as one JSON object."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: size", size, f"at most {MAX_JSON_BYTES} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    return parse_json_object(data, str(path))


def lfs_pointer(where: str) -> CheckpointError:
    """Return the error for a file that stands for another, which git-lfs did not fetch."""
    return CheckpointError(where, "a git-lfs pointer", "the file itself: fetch it with `git lfs pull`")


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that the system does not let us read."""
    return CheckpointError(str(path), error.strerror or str(error), "a file that can be read")
