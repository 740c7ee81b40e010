"""The error of a case in which the server did not cope."""

from __future__ import annotations

from quire.core.errors import QuireError


class CaseFailedError(QuireError):
    """The server did not cope; the message says what went wrong."""


def require(is_so: bool, what: str) -> None:
    """Raise `CaseFailedError` with `what`, unless `is_so`."""
    if not is_so:
        raise CaseFailedError(what)
