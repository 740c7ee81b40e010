"""Large files of the hub: resumes interrupted downloads, and compares digests.

    the hub ──► blobs/DIGEST.incomplete ──► digest compared ──► blobs/DIGEST ──► huggingface_hub links it

huggingface_hub downloads to a new name in every process, so a partial download is lost when the process ends, and over
plain HTTP it compares sizes only. So quire puts a large file where huggingface_hub looks for it: in its cache, under
the digest.
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
MAX_HTTP_BYTES: Final = 50 * 1000**3  # the hub serves larger files only by another protocol
CONTINUES: Final = "The part fetched so far is kept: the same command resumes the download"


@dataclass(frozen=True, slots=True)
class Blob:
    """A large file of a repository, and its path in the cache."""

    name: str
    url: str
    num_bytes: int
    path: Path

    def error(self, reason: str) -> ModelError:
        """Return the error for a file that was not fetched."""
        return ModelError(self.name, f"{self.name} was not fetched: {reason}")


def file_names(repository: str, revision: str) -> list[str]:
    """Return the names of the files of a repository; empty if the hub cannot be asked."""
    try:
        from huggingface_hub import model_info

        return [file.rfilename for file in model_info(repository, revision=revision or None).siblings or ()]
    except Exception:  # the download then reports it, or finds the model in the cache
        return []


def fetch_blobs(repository: str, revision: str, wanted: Sequence[str], unwanted: Sequence[str]) -> None:
    """Fetch the large files of a repository that match `wanted` into the cache, unless they are there."""
    from huggingface_hub import model_info

    try:
        info = model_info(repository, revision=revision or None, files_metadata=True)
    except Exception:  # the caller's snapshot_download then fails in the same way, or finds the model in its cache
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
    """Fetch a file, or the missing part; waits while another process fetches it."""
    if blob.path.exists():
        return
    blob.path.parent.mkdir(parents=True, exist_ok=True)
    part = blob.path.with_name(f"{blob.path.name}.incomplete")
    with part.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if blob.path.exists():  # the other process has finished; `file` may be the blob itself
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
    """Fetch the missing end of a file."""
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
