"""The secret that salts derive from: random at each start, or kept with the blocks on disk.

A lookup on disk uses the tenant's salt. With a new secret after a restart, no lookup would succeed, so the secret stays
in the folder of the disk cache, in a file that only its owner can read.
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
    """Return the secret in the folder of the disk cache, created if missing; without a folder, a random secret.

    Raises `InvalidConfigError` if the folder or the file is not private.
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
