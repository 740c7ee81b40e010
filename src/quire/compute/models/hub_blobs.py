"""Large files of the hub: a download that was interrupted goes on where it stopped, and digests are compared.

    the hub ──► blobs/DIGEST.incomplete ──► digest compared ──► blobs/DIGEST ──► huggingface_hub links it

huggingface_hub writes to a new name in every process, so what a process that ended had fetched is lost, and over plain
HTTP it compares sizes only. So a large file is put where it looks for one: in its cache, under the digest.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, Final

from quire.core.byte_sizes import format_bytes
from quire.core.errors import ModelError

SHA256: Final = re.compile("[0-9a-f]{64}")
MAX_HTTP_BYTES: Final = 50 * 1000**3  # the hub gives larger files by another protocol only
CONTINUES: Final = "What was fetched is kept: the same command goes on from there"


@dataclass(frozen=True, slots=True)
class Blob:
    """A large file of a repository, and where it will be."""

    name: str
    url: str
    num_bytes: int
    path: Path

    def error(self, reason: str) -> ModelError:
        """Return the error for a file that was not fetched."""
        return ModelError(self.name, f"{self.name} was not fetched: {reason}")


def fetch_blobs(repository: str, revision: str, wanted: Sequence[str], unwanted: Sequence[str]) -> None:
    """Fetch the large files of a repository into the cache, those that match `wanted` and are not there."""
    from huggingface_hub import model_info

    try:
        info = model_info(repository, revision=revision or None, files_metadata=True)
    except Exception:  # then huggingface_hub fails in the same way and is asked next, or finds the model in its cache
        return
    from huggingface_hub import constants, hf_hub_url

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "blobs"
    for file in info.siblings or ():
        name = file.rfilename
        is_wanted = _matches(name, wanted) and not _matches(name, unwanted)
        if is_wanted and file.lfs is not None and file.lfs.size <= MAX_HTTP_BYTES:
            if not SHA256.fullmatch(file.lfs.sha256):
                raise ModelError(repository, f"The hub names no SHA-256 for {name} of {repository}")
            url = hf_hub_url(repository, name, revision=info.sha)
            _fetch(Blob(name, url, file.lfs.size, folder / file.lfs.sha256))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _fetch(blob: Blob) -> None:
    """Fetch a file, or what it lacks; waits while another process does."""
    if blob.path.exists():
        return
    blob.path.parent.mkdir(parents=True, exist_ok=True)
    part = blob.path.with_name(f"{blob.path.name}.incomplete")
    with part.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if blob.path.exists():  # the other process was done; `file` may be the blob itself
            part.unlink(missing_ok=True)
            return
        if file.tell() > blob.num_bytes:
            file.truncate(0)
        _append(blob, file)
        with part.open("rb") as whole:
            found = hashlib.file_digest(whole, "sha256").hexdigest()
        if found != blob.path.name:
            file.truncate(0)
            raise blob.error(f"its SHA-256 is {found}, the hub names {blob.path.name}. Fetch it again")
        part.rename(blob.path)


def _append(blob: Blob, file: BinaryIO) -> None:
    """Add what a file lacks."""
    from huggingface_hub import get_token
    from huggingface_hub.file_download import http_get

    num_bytes = file.tell()
    rest, free = blob.num_bytes - num_bytes, shutil.disk_usage(blob.path.parent).free
    if rest > free:
        raise blob.error(f"it takes {format_bytes(rest)} more, and {blob.path.parent} has {format_bytes(free)} left")
    try:
        http_get(
            blob.url,
            file,
            resume_size=num_bytes,
            headers={"authorization": f"Bearer {token}"} if (token := get_token()) else {},
            expected_size=blob.num_bytes,
            displayed_filename=blob.name,
        )
        file.flush()
    # The library raises its own errors, those of its HTTP client and those of the system.
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise blob.error(f"{reason}. {CONTINUES}") from error
