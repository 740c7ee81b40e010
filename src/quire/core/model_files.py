"""The files of a model folder, opened and read in one place.

A folder may come from a stranger. So every file in it is opened here, and only if it is a plain file: a pipe would
block forever, and merely opening a device can have effects. Links are followed, because the hub's cache consists of
them. Limits on the size and the number of values bound time and memory, and every failure is a `CheckpointError`.

JSON is strict. The standard parser keeps the last of two equal keys, so two readers of one file could see different
models. Here equal keys are an error, and so is any value other than an object.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from quire.core.errors import CheckpointError

MAX_SETTINGS_BYTES: Final = 16 << 20
"""The limit of a JSON file. The largest in published models is 1 MiB: a tokenizer with thousands of added tokens."""

MAX_TENSOR_NAMES_BYTES: Final = 32 << 20
"""The limit of a safetensors header or an index: enough for the names of 250,000 tensors."""

MAX_TOKENIZER_BYTES: Final = 64 << 20
MAX_TOKENIZER_VALUES: Final = 4_000_000
"""In tokenizer.json: 262,000 tokens and 580,000 merges, the largest published, need half of this."""

SPACE_AT_END: Final = r"(?<!\s)\s+$"
r"""The space at the end of a text or a line: what `\s+$` matches, which always begins where a run of space begins.
Tokenizers split it off. With `\s+$`, each space of a run is tried as the first, which takes the square of the time."""

MAX_JSON_VALUES: Final = 2_000_000
LFS_POINTER: Final = b"version https://git-lfs"
_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (lambda mode: not stat.S_ISREG(mode), "a device"),
)


class ModelFiles(Protocol):
    """The named files of a model: its settings, its tokenizer. Readers need not know how they are stored."""

    @property
    def name(self) -> str:
        """The name of the model in errors."""
        ...

    def where(self, file: str) -> str:
        """Return the name of a file in errors. Does not mutate."""
        ...

    def has(self, file: str) -> bool:
        """Return whether a file exists. Does not mutate."""
        ...

    def text(self, file: str, max_bytes: int = MAX_SETTINGS_BYTES) -> str:
        """Return the text of a file; raises `CheckpointError` if it is missing. Does not mutate."""
        ...

    def json_object(self, file: str, max_bytes: int = MAX_SETTINGS_BYTES) -> dict[str, object]:
        """Return the JSON object in a file; raises `CheckpointError` if either is missing. Does not mutate."""
        ...


def open_model_file(path: Path) -> BinaryIO:
    """Open the file at `path`, which must be a plain file or a link to one. Never waits for another process."""
    try:
        _require_plain(path, os.stat(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            _require_plain(path, os.fstat(descriptor))  # it may have been replaced meanwhile
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise unreadable(path, error) from error


def read_model_file(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> bytes:
    """Return the bytes of the file at `path`; raises `CheckpointError` if it is larger than `max_bytes`."""
    with open_model_file(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            data = b"" if size > max_bytes else file.read(max_bytes + 1) or b""
        except OSError as error:
            raise unreadable(path, error) from error
    if max(size, len(data)) > max_bytes:
        raise CheckpointError(f"{path}: size", max(size, len(data)), f"at most {max_bytes} bytes")
    if data.startswith(LFS_POINTER):
        raise lfs_pointer(str(path))
    return data


def read_text(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> str:
    """Return the text in the file at `path`."""
    try:
        return read_model_file(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(str(path), f"unreadable: {error}", "a text file in UTF-8") from error


def read_json_object(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> dict[str, object]:
    """Return the JSON object in the file at `path`."""
    return parse_json_object(read_model_file(path, max_bytes), str(path))


def path_of(name: str | Path) -> Path:
    """Return the path that a user named, with the folder of a home for `~`, if there is one."""
    return Path(os.path.expanduser(name))  # Path.expanduser raises for a user who does not exist


def is_there(path: Path) -> bool:
    """Return whether anything has this name, even a broken link, which is an error once it is opened."""
    return os.path.lexists(path)


def parse_json_object(data: bytes, where: str) -> dict[str, object]:
    """Parse `data` as one JSON object; `where` names it in errors.

    >>> parse_json_object(b'{"a": 1}', "config.json")
    {'a': 1}
    >>> parse_json_object(b'{"a": 1, "a": 2}', "config.json")
    Traceback (most recent call last):
    ...
    quire.core.errors.CheckpointError: config.json: key 'a' is 'given twice'; allowed: each key once
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members: dict[str, object] = {}
        for key, value in pairs:
            if key in members:
                raise CheckpointError(f"{where}: key {key!r}", "given twice", "each key once")
            members[key] = value
        return members

    require_few_values(data, where)
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
        if b"\\ud" in data.lower():  # this escape may be a lone surrogate, which cannot be encoded
            json.dumps(value, ensure_ascii=False).encode()
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(where, f"not JSON: {error}", "one JSON object in UTF-8") from error
    if not isinstance(value, dict):
        raise CheckpointError(where, f"a JSON {type(value).__name__}", "one JSON object")
    return value


def require_few_values(data: bytes, where: str, most: int = MAX_JSON_VALUES) -> None:
    """Raise if JSON may hold more values than `most`: one byte of JSON can become fifty in memory."""
    if sum(map(data.count, (b",", b"[", b"{"))) > most:
        raise CheckpointError(where, f"JSON of more than {most} values", f"at most {most}")


def lfs_pointer(where: str) -> CheckpointError:
    """Return the error for a git-lfs pointer to a file that was not fetched."""
    return CheckpointError(where, "a git-lfs pointer", "the file itself; fetch it with `git lfs pull`")


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that the system refuses to read."""
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return CheckpointError(str(path), "a broken link", "a file that can be read")
    return CheckpointError(str(path), error.strerror or str(error), "a file that can be read")


def incomplete(path: Path, size: int, needed: int) -> CheckpointError:
    """Return the error for a file that ends early, as a download does that was interrupted.

    >>> print(incomplete(Path("model.gguf"), 1_000, 2_400_000))
    model.gguf is incomplete: it has 1,000 bytes and needs at least 2,400,000. Download it again.
    """
    error = CheckpointError(f"{path}: size", size, f"at least {needed} bytes")
    where = error.field.removesuffix(": size")
    return error.saying(
        f"{where} is incomplete: it has {size:,} bytes and needs at least {needed:,}. Download it again."
    )


def _require_plain(path: Path, status: os.stat_result) -> None:
    for is_kind, name in _KINDS:
        if is_kind(status.st_mode):
            raise CheckpointError(str(path), name, "a plain file")
