"""Case: one attack on a server, and its required outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.instruments.torture.stage import Stage


@dataclass(frozen=True, slots=True)
class Case:
    """A case. `run` returns a remark, and raises if the server does not cope; None: not implemented."""

    number: str
    name: str
    run: Callable[[Stage], str] | None


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of a case."""

    number: str
    name: str
    is_built: bool
    has_passed: bool
    remark: str
    seconds: float
    num_leaked_blocks: int
    num_changed: int

    @property
    def verdict(self) -> str:
        """The result, in one word."""
        return "ok" if self.has_passed else "FAILED" if self.is_built else "not built"

    def __str__(self) -> str:
        """Return the line to print."""
        remark = f": {self.remark}" if self.remark else ""
        return f"{self.number:<4} {self.verdict:<9} {self.seconds:6.1f} s  {self.name}{remark}"
