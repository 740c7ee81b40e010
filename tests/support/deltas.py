"""The deltas of a request, put together: how they were cut is a matter of time."""

from __future__ import annotations

from typing import Any

from quire.engine.outputs import RequestDelta


def outputs_of(deltas: list[RequestDelta]) -> list[Any]:
    """Return the whole texts of a request, with their tokens, logprobs and ends."""
    parts = [part for delta in deltas for part in delta.outputs]
    return [
        (
            index,
            [token for part in parts if part.index == index for token in part.token_ids],
            "".join(part.text for part in parts if part.index == index),
            [entry for part in parts if part.index == index for entry in part.logprobs or ()],
            [part.finish_reason for part in parts if part.index == index and part.finish_reason],
        )
        for index in sorted({part.index for part in parts})
    ]
