"""Failpoints as they are written."""

from __future__ import annotations

import pytest

from quire.core.errors import InvalidConfigError
from quire.core.failpoints import Failpoint, parse_failpoints


def test_failpoints_are_read_as_they_are_written() -> None:
    text = "error:token=17,nan:tokens=0, memory:step=3"
    assert parse_failpoints(text) == (
        Failpoint("error", "token", 17),
        Failpoint("nan", "tokens", 0),
        Failpoint("memory", "step", 3),
    )
    assert ", ".join(map(str, parse_failpoints(text))) == "error:token=17, nan:tokens=0, memory:step=3"


@pytest.mark.parametrize("text", ["", "  "])
def test_none_are_armed_by_nothing(text: str) -> None:
    assert parse_failpoints(text) == ()


@pytest.mark.parametrize(
    "text",
    [
        *("error", "error:token", "error:token=", "error:token=-1", "error:token=1.5"),
        "crash:token=1",
        "error:when=1",
        "error:token=٣",
        "error:token=1,,nan:token=2",
        f"error:token={'9' * 5000}",
        "sleep:token=1",
        "sleep.5:token=1",
        "sleep1.:token=1",
        "sleep1.2345:token=1",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="QUIRE_FAILPOINTS"):
        parse_failpoints(text)
