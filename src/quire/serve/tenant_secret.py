"""The secret that salts are made from: drawn at each start, or kept where blocks are kept.

Blocks on disk are found by the salt of their tenant. With another secret after a restart nobody would find any, so the
secret stays in the folder of the disk cache, in a file that only its owner reads.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from quire.core.private_files import make_private, open_private

SECRET_BYTES: Final = 32
FILE: Final = "tenant_secret"


def kept_secret(disk_cache: str | None) -> bytes:
    """Return the secret in the folder of the disk cache, made where it is missing; without a folder, a new one.

    Raises `InvalidConfigError` if the folder or the file may not be used.
    """
    if disk_cache is None:
        return secrets.token_bytes(SECRET_BYTES)
    folder = Path(disk_cache)
    make_private(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        file = open_private(descriptor, folder, FILE)
    finally:
        os.close(descriptor)
    try:
        secret = os.pread(file, SECRET_BYTES, 0)
        if len(secret) < SECRET_BYTES:
            secret = secrets.token_bytes(SECRET_BYTES)
            os.pwrite(file, secret, 0)
    finally:
        os.close(file)
    return secret
