"""AdapterRows: the adapters of a worker's rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.compute.worker.model_runner import StepInputs
from quire.core.errors import InvalidRequestError
from quire.core.step import RowStart


class AdapterRows:
    """The adapters of rows, by digest. A step without adapters takes the usual path."""

    def __init__(self, has_adapter: Callable[[str], bool] | None) -> None:
        self._has_adapter = has_adapter
        self._rows: dict[int, str] = {}

    def start(self, start: RowStart) -> None:
        """Note the adapter of a row; raises `InvalidRequestError` if it is not in memory. Mutates."""
        self.release(start.row)
        digest = start.scope.adapter
        if not digest:
            return
        if self._has_adapter is None or not self._has_adapter(digest):
            raise InvalidRequestError("adapter", digest, "one that is loaded")
        self._rows[start.row] = digest

    def release(self, row: int) -> None:
        """Forget the adapter of a row. Mutates."""
        self._rows.pop(row, None)

    def with_adapters(self, inputs: StepInputs) -> StepInputs:
        """Return the inputs of a step with the adapters of its sequences. Does not mutate."""
        if not self._rows:
            return inputs
        named = tuple(self._rows.get(row, "") for row in inputs.rows.tolist())
        return replace(inputs, adapters=named) if any(named) else inputs
