"""A step on the device: its arrays in one copy, and its shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from quire.compute.arrays import BoolArray
from quire.compute.torch.attention.base import MOST_SHORT, GivenRows, StepBatch, StepShape
from quire.compute.torch.last_tokens import coded_ids
from quire.compute.torch.upload import on_device, together
from quire.compute.worker.model_runner import StepInputs


def uploaded(inputs: StepInputs, block_size: int, device: torch.device, *, ahead_in_windows: bool = False) -> StepBatch:
    """Return a step on the device; `ahead_in_windows` as in `AttentionSpec`. Does not mutate."""
    shape = replace(step_shape(inputs, block_size), ahead_in_windows=ahead_in_windows)
    columns = [coded_ids(inputs), inputs.positions, inputs.query_starts, shape.lengths, inputs.logit_indices]
    token_ids, positions, query_starts, lengths, logit_indices, states, *rest = together(
        [*columns, inputs.state_indices, *inputs.slots, *shape.needed_tables(block_size)], device
    )
    num_groups = len(inputs.slots)
    given = coordinates = None
    if len(inputs.given):
        tokens = np.flatnonzero(inputs.given >= 0)
        [indices] = together([tokens], device)
        given = GivenRows(indices, on_device(inputs.given_rows[inputs.given[tokens]], device))
    if len(inputs.coordinates):
        coordinates = tuple(together(list(inputs.coordinates), device))
    return StepBatch(
        token_ids=token_ids,
        positions=positions,
        query_starts=query_starts,
        lengths=lengths,
        slots=tuple(rest[:num_groups]),
        block_tables=tuple(rest[num_groups:]),
        logit_indices=logit_indices,
        shape=shape,
        state_indices=states if len(inputs.state_indices) else None,
        given=given,
        coordinates=coordinates,
    )


def step_shape(inputs: StepInputs, block_size: int) -> StepShape:
    """Return the shape of a step; tables are cut to the longest context. Does not mutate."""
    counts = np.diff(inputs.query_starts)
    lengths = inputs.positions[inputs.query_starts[1:] - 1] + 1
    longest = int(lengths.max())
    return StepShape(
        num_decodes=_num_first(counts == 1),
        num_short=int(np.count_nonzero(counts <= MOST_SHORT)),
        longest_query=int(counts.max()),
        query_starts=inputs.query_starts,
        lengths=lengths,
        block_tables=tuple(table[:, : -(-longest // block_size)] for table in inputs.block_tables),
        ends_seen=inputs.ends_seen if len(inputs.ends_seen) else None,
    )


def _num_first(flags: BoolArray) -> int:
    """Return how many flags are set before the first that is not."""
    return len(flags) if flags.all() else int(np.argmin(flags))
