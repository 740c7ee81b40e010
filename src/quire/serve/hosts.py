"""Hosts: the names by which the server may be called, and the pages that may call it.

    a page of evil.example ──► evil.example, which now resolves to 127.0.0.1 ──► Host: evil.example       421
                           ──► http://127.0.0.1:8000 itself                  ──► Origin: evil.example     403

A browser on the same machine reaches a server on loopback for every page that it shows. Without keys nothing else
protects such a server, so it answers to loopback names only. `allowed_host` adds names, and `cors_origin` pages. Where
the server has keys, or listens on other addresses, the check is on only if names are given: a foreign page has no key,
and a server that others can reach has names that it cannot know. On other addresses any IP address in the header is
answered as well, because only a name can be pointed somewhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from quire.serve.cors import Origins
from quire.serve.errors import foreign_origin, repeated_header, unknown_host
from quire.serve.host_names import ANY, allowed_name, is_loopback, name_of

if TYPE_CHECKING:
    from quire.serve.config import ServerConfig

DECISIVE: Final = (b"host", b"origin", b"authorization")
"""Headers that decide who is answered. A proxy and a server may each believe another one of two."""


class Hosts:
    """Who may call the server, by which name. Does not change."""

    def __init__(
        self, names: Sequence[str], *, is_checked: bool, any_address: bool, origins: Sequence[str] = ()
    ) -> None:
        self.origins = Origins(origins)
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
        quire.serve.errors.ApiError: web pages from 'http://evil.example' may not use this server; ...
        """
        if not self._is_checked:
            return
        host, origin = headers.get(b"host", b""), headers.get(b"origin")
        if host and not self._is_ours(host, any_address=self._any_address):
            raise unknown_host(host.decode("latin-1"))
        if origin is not None and self.origins.allow(origin):
            return
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
    is_checked = is_open or bool(config.allowed_host)
    return Hosts(config.allowed_host, is_checked=is_checked, any_address=not is_local, origins=config.cors_origin)


def require_single(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise `ApiError` where a header that decides who is answered stands more than once."""
    decisive = [name for name, _ in headers if name in DECISIVE]
    for name in set(decisive):
        if decisive.count(name) > 1:
            raise repeated_header(name.decode())
