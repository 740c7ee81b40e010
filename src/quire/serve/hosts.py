"""Hosts: the host names that the server answers to, and the web pages that may call it.

    a page of evil.example ──► evil.example, which now resolves to 127.0.0.1 ──► Host: evil.example       421
                           ──► http://127.0.0.1:8000 itself                  ──► Origin: evil.example     403

Through a browser on the same machine, every web page can reach a server on loopback. Without keys nothing else protects
such a server, so it answers to loopback names only. `allowed_host` adds names, and `cors_origin` pages. If the server
has keys, or listens on other addresses, the check is on only if names are given: a foreign page has no key, and a
server that others can reach has names that it cannot know. A server on other addresses also accepts any IP address in
the header, because only a name can be made to resolve to a different machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from quire.serve.cors import Origins
from quire.serve.errors import foreign_origin, repeated_header, unknown_host
from quire.serve.host_names import ANY, allowed_name, is_loopback, name_of

if TYPE_CHECKING:
    from quire.serve.config import ServerConfig

DECISIVE: Final = (b"host", b"origin", b"authorization", b"x-api-key")
"""Headers that decide access. Given two, a proxy and a server might each believe a different one."""


class Hosts:
    """Which pages may call the server, by which host names. Immutable."""

    def __init__(
        self, names: Sequence[str], *, is_checked: bool, any_address: bool, origins: Sequence[str] = ()
    ) -> None:
        self.origins = Origins(origins)
        self._names = frozenset(map(allowed_name, names))
        self._is_checked = is_checked and ANY not in self._names
        self._any_address = any_address

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `ApiError` for a foreign host name, and for a page of another site. Does not mutate.

        A request without a name passes: it is not from a browser, because every browser sends one.

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
            raise foreign_origin("another site")  # embedded in a page; following a link to us is allowed

    def _is_ours(self, authority: bytes, *, any_address: bool) -> bool:
        name = name_of(authority.decode("latin-1"))
        if name is None:
            return False
        return name.text in self._names or name.is_loopback or (any_address and name.is_address)


def make_hosts(config: ServerConfig) -> Hosts:
    """Return the check of host names and pages for a server with these settings."""
    is_local = is_loopback(config.host)
    is_open = is_local and not config.has_keys
    is_checked = is_open or bool(config.allowed_host)
    return Hosts(config.allowed_host, is_checked=is_checked, any_address=not is_local, origins=config.cors_origin)


def require_single(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise `ApiError` if a header that decides access occurs more than once."""
    decisive = [name for name, _ in headers if name in DECISIVE]
    for name in set(decisive):
        if decisive.count(name) > 1:
            raise repeated_header(name.decode())
