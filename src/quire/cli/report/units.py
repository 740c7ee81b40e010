"""Formats figures as texts."""

from __future__ import annotations

from quire.core.byte_sizes import format_bytes
from quire.reporting.document.axis import show_number


def show_seconds(value: float) -> str:
    """Return a time in a suitable unit.

    >>> show_seconds(0.0123), show_seconds(12.3)
    ('12.3 ms', '12.3 s')
    """
    return show_number(value, "s")


def show_share(value: float) -> str:
    """Return a share in percent.

    >>> show_share(0.0314)
    '3.1 %'
    """
    return f"{100 * value:.1f} %"


def show_count(value: float) -> str:
    """Return a whole number.

    >>> show_count(12345)
    '12,345'
    """
    return f"{value:,.0f}"


def show_bytes(value: float) -> str:
    """Return a size in a suitable unit.

    >>> show_bytes(6 << 30)
    '6.00 GiB'
    """
    return format_bytes(int(value))
