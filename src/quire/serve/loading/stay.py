"""Stay: a call that keeps its model loaded."""

from __future__ import annotations

from collections.abc import Callable


class Stay:
    """Keeps a model loaded while it lasts. A context manager; calls `end` when it is first left."""

    __slots__ = ("_end",)

    def __init__(self, end: Callable[[], None]) -> None:
        self._end: Callable[[], None] | None = end

    def leave(self) -> None:
        """End the stay. May be called more than once. Mutates."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def __enter__(self) -> Stay:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
