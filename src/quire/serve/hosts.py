"""Hosts: the names by which the server may be called, and the pages that may call it.

    a page of evil.example ──► evil.example, which now resolves to 127.0.0.1 ──► Host: evil.example       421
                           ──► http://127.0.0.1:8000 itself                  ──► Origin: evil.example     403

A browser on the same machine reaches a server on loopback for every page that it shows. Without keys nothing else
protects such a server, so it answers to loopback names only. `allowed_host` adds names. Where the server has keys, or
listens on other addresses, the check is on only if names are given: a foreign page has no key, and a server that others
can reach has names that it cannot know. On other addresses any IP address in the header is answered as well, because
only a name can be pointed somewhere else.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from functools import lru_cache
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, NamedTuple

from quire.core.errors import InvalidConfigError
from quire.serve.errors import foreign_origin, repeated_header, unknown_host

if TYPE_CHECKING:
    from quire.serve.config import ServerConfig

ANY: Final = "*"
LOCALHOST: Final = "localhost"
MAX_LENGTH: Final = 300
"""Characters of a name and a port; names of the DNS have at most 253."""
AUTHORITY: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w-]+(?:\.[\w-]+)*\.?)(?::[0-9]*)?", re.ASCII)
DECISIVE: Final = (b"host", b"origin", b"authorization")
"""Headers that decide who is answered. A proxy and a server may each believe another one of two."""


class HostName(NamedTuple):
    """A name or an address, in one spelling."""

    text: str
    is_loopback: bool
    is_address: bool


class Hosts:
    """Who may call the server, by which name. Does not change."""

    def __init__(self, names: Sequence[str], *, is_checked: bool, any_address: bool) -> None:
        self._names = frozenset(map(allowed_name, names))
        self._is_checked = is_checked and ANY not in self._names
        self._any_address = any_address

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `ApiError` for a name that is not one of ours, and for a page of another site. Does not mutate.

        A call without a name is answered: every browser sends one.

        >>> hosts = Hosts(["quire.example"], is_checked=True, any_address=False)
        >>> hosts.check({b"host": b"quire.example:8000"})
        >>> hosts.check({b"host": b"localhost", b"origin": b"http://evil.example"})
        Traceback (most recent call last):
        ...
        quire.serve.errors.ApiError: a page of 'http://evil.example' may not use this server; if it is yours, ...
        """
        if not self._is_checked:
            return
        host, origin = headers.get(b"host", b""), headers.get(b"origin")
        if host and not self._is_ours(host, any_address=self._any_address):
            raise unknown_host(host.decode("latin-1"))
        if origin is not None:
            if not self._is_ours(origin.partition(b"://")[2], any_address=False):
                raise foreign_origin(origin.decode("latin-1"))
        elif headers.get(b"sec-fetch-site") == b"cross-site" and headers.get(b"sec-fetch-dest") != b"document":
            raise foreign_origin("another site")  # embedded there; a link to us is followed

    def _is_ours(self, authority: bytes, *, any_address: bool) -> bool:
        name = name_of(authority.decode("latin-1"))
        if name is None:
            return False
        return name.text in self._names or name.is_loopback or (any_address and name.is_address)


def make_hosts(config: ServerConfig) -> Hosts:
    """Return who may call a server with these settings."""
    is_local = is_loopback(config.host)
    is_open = is_local and not config.has_keys
    return Hosts(config.allowed_host, is_checked=is_open or bool(config.allowed_host), any_address=not is_local)


def require_single(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise `ApiError` where a header that decides who is answered stands more than once."""
    decisive = [name for name, _ in headers if name in DECISIVE]
    for name in set(decisive):
        if decisive.count(name) > 1:
            raise repeated_header(name.decode())


@lru_cache(maxsize=256)
def name_of(authority: str) -> HostName | None:
    """Return the name or address before a port; None where it is neither.

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
    """Return whether a server that listens on `host` is reached from this machine alone."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return ip_address(str(found[0][4][0])).is_loopback


def allowed_name(text: str) -> str:
    """Return a name of `allowed_host` in one spelling; raises `InvalidConfigError` for what is none."""
    name = name_of(text)
    if text != ANY and (name is None or text.rpartition("]")[2].count(":")):
        raise InvalidConfigError("allowed_host", text, "a name or an address without scheme and port, or *")
    return ANY if name is None else name.text
