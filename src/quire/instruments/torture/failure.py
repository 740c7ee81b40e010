"""How a case says that the server did not cope."""

from __future__ import annotations

from quire.core.errors import QuireError


class CaseFailedError(QuireError):
    """The server did not cope; the message says with what."""


def require(is_so: bool, what: str) -> None:
    """Raise `CaseFailedError` unless something is so."""
    if not is_so:
        raise CaseFailedError(what)
