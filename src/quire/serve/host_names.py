"""Names and addresses of hosts, in settings and headers."""

from __future__ import annotations

import re
import socket
from functools import lru_cache
from ipaddress import ip_address
from typing import Final, NamedTuple

from quire.core.errors import InvalidConfigError

NO_ORIGIN: Final = "null"
"""The Origin header of pages without an origin: local files, and sandboxed frames of any site."""
ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@\\*,\"]{1,255}", re.ASCII)

ANY: Final = "*"
LOCALHOST: Final = "localhost"
MAX_LENGTH: Final = 300
"""Characters of a name and a port; names of the DNS have at most 253."""
AUTHORITY: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w-]+(?:\.[\w-]+)*\.?)(?::[0-9]*)?", re.ASCII)


class HostName(NamedTuple):
    """A name or an address, in normal form."""

    text: str
    is_loopback: bool
    is_address: bool


@lru_cache(maxsize=256)
def name_of(authority: str) -> HostName | None:
    """Return the name or address before a port, or None if it is not valid.

    >>> name_of("LocalHost.:8000")
    HostName(text='localhost', is_loopback=True, is_address=False)
    >>> name_of("[2001:db8:0::1]"), name_of("a@b")
    (HostName(text='2001:db8::1', is_loopback=False, is_address=True), None)
    """
    match = AUTHORITY.fullmatch(authority) if len(authority) <= MAX_LENGTH else None
    if match is None:
        return None
    name = match[1].removesuffix(".").lower()
    try:
        address = ip_address(name.strip("[]"))
    except ValueError:
        is_loopback = name == LOCALHOST or name.endswith(f".{LOCALHOST}")
        return None if name.startswith("[") else HostName(name, is_loopback, is_address=False)
    return HostName(str(address), address.is_loopback, is_address=True)


def is_loopback(host: str) -> bool:
    """Return whether a server that listens on `host` can be reached from this machine only."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return ip_address(str(found[0][4][0])).is_loopback


def allowed_name(text: str) -> str:
    """Return a name of `allowed_host` in normal form; raises `InvalidConfigError` if it is not a name."""
    name = name_of(text)
    if text != ANY and (name is None or text.rpartition("]")[2].count(":")):
        raise InvalidConfigError("allowed_host", text, "a name or an address without scheme and port, or *")
    return ANY if name is None else name.text


def allowed_origin(text: str) -> str:
    """Return an origin in normal form; raises `InvalidConfigError` if it is not an origin.

    >>> allowed_origin("https://Chat.Example:8443"), allowed_origin("*")
    ('https://chat.example:8443', '*')
    >>> allowed_origin("chat.example")
    Traceback (most recent call last):
    ...
    quire.core.errors.InvalidConfigError: cors_origin is 'chat.example'; allowed: an origin as browsers send it, ...
    """
    origin = text.lower()
    if origin in (ANY, NO_ORIGIN) or ORIGIN.fullmatch(origin):
        return origin
    allowed = "an origin as browsers send it, such as https://chat.example or app://obsidian.md; *: every page"
    raise InvalidConfigError("cors_origin", text, allowed)
