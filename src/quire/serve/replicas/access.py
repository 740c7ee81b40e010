"""Access to a cluster: checks its token and address before Ray does, which takes minutes to report an error.

A client with the token can run code on the machines, so it is in a file that only its owner can read. Ray takes it from
RAY_AUTH_TOKEN, from the file that RAY_AUTH_TOKEN_PATH names, or from ~/.ray/auth_token. Without a token, Ray obeys
every client that reaches its port, so quire always makes Ray require one.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
from collections.abc import Mapping, MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from quire.core.errors import ExecutionError, InvalidConfigError

TOKEN: Final = "RAY_AUTH_TOKEN"
TOKEN_PATH: Final = "RAY_AUTH_TOKEN_PATH"
ADDRESS: Final = "RAY_ADDRESS"
HERE: Final = "local"
ANSWER_S: Final = 10.0
MAX_PORT: Final = 65_535
ALWAYS: Final = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}


def require_ray() -> None:
    """Raise `ExecutionError` unless Ray is installed. Imports nothing."""
    if find_spec("ray") is None:
        raise ExecutionError("engines on a cluster need Ray: pip install 'quire[ray]'")


def require_token(environ: MutableMapping[str, str], *, may_make: bool) -> str:
    """Make Ray require the token and send no usage reports; return where the token is. Mutates `environ`.

    `may_make`: create a missing file, for a new cluster. Raises `InvalidConfigError` if there is no token, or if others
    can read it.
    """
    environ.update(ALWAYS)
    if environ.get(TOKEN):
        return TOKEN
    path = Path(environ.get(TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
    try:
        if may_make and not path.exists():
            _make(path)
        status = path.stat()
    except FileNotFoundError:
        allowed = f"the cluster's token file: copy it from the machine where quire cluster start ran, or set {TOKEN}"
        raise InvalidConfigError(TOKEN_PATH, str(path), allowed) from None
    except OSError as error:
        raise InvalidConfigError(TOKEN_PATH, str(path), f"a file that can be read ({error.strerror})") from None
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise InvalidConfigError(TOKEN_PATH, str(path), f"a file that only this user can read: chmod go-rwx {path}")
    environ[TOKEN_PATH] = str(path)
    return str(path)


def address_of(environ: Mapping[str, str]) -> str:
    """Return RAY_ADDRESS, or the address of the cluster of this machine; an empty text if there is none.

    Raises `ExecutionError` if the cluster at RAY_ADDRESS does not answer. The file of this machine's cluster may be
    left over from one that has ended.
    """
    given = environ.get(ADDRESS, "")
    if given == HERE:
        return ""
    if given not in ("", "auto"):
        require_reachable(given)
        return given
    folder = environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or "/tmp"
    try:
        found = (Path(folder) / "ray" / "ray_current_cluster").read_text(encoding="utf-8").strip()
        require_reachable(found)
    except (OSError, ValueError, ExecutionError):
        return ""
    return found


def require_reachable(address: str) -> None:
    """Raise `InvalidConfigError` if the text is not an address, and `ExecutionError` if no process listens there."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isascii() or not port.isdigit() or int(port) > MAX_PORT:
        raise InvalidConfigError(ADDRESS, address, "HOST:PORT of the machine where quire cluster start ran")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except OSError as error:
        raise ExecutionError(f"no cluster at {address}: {error.strerror or error}; see quire cluster start") from None


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
