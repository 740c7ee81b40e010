"""SamplingColumns: how each row chooses its tokens, and the draws of one step.

The settings of a row are entered once, when a request takes it, into one array per setting; a step gathers them by row.
A row makes one draw as a rule. A row that opens into k sequences makes k, all from the same logits, each with the seed
of its sequence. A row with d drafts makes 1 + d, from the logits behind each of them: it will accept as many drafts as
it would have drawn itself, so drafts change the number of steps and never the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np

from quire.compute.arrays import IntArray
from quire.compute.sampling.draws import Draws
from quire.core.step import RowStart

NO_LOGPROBS: Final = -1
MAX_SEED: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """The rows that sample in a step, one entry each.

    `next_positions` is where the first token drawn will stand; `num_draws` counts an entry's draws, and `drafted` tells
    those that follow drafts from those that open sequences.
    """

    rows: IntArray
    logit_starts: IntArray
    next_positions: IntArray
    num_draws: IntArray
    drafted: IntArray  # 1 or 0


class SamplingColumns:
    """The sampling settings of a worker's rows."""

    def __init__(self, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self._eos_token_ids = eos_token_ids
        self._numbers = np.zeros((3, 1), np.float32)  # temperature, top_p, min_p: [3, num_rows]
        self._integers = np.zeros((4, 1), np.int64)  # top_k, seed, logprobs, end of the ban: [4, num_rows]
        self._banned: dict[int, list[int]] = {}

    def start(self, start: RowStart) -> None:
        """Enter the settings of a request that takes a row. Mutates."""
        row, sampling = start.row, start.sampling
        missing = row + 1 - self._numbers.shape[1]
        if missing > 0:
            width = ((0, 0), (0, max(missing, self._numbers.shape[1])))
            self._numbers = np.pad(self._numbers, width)
            self._integers = np.pad(self._integers, width)
        self._numbers[:, row] = sampling.temperature, sampling.top_p, sampling.min_p
        logprobs = NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs
        ban_end = start.num_prompt_tokens + sampling.min_tokens
        self._integers[:, row] = max(0, sampling.top_k), seed_of(start), logprobs, ban_end
        self._banned.pop(row, None)
        if sampling.min_tokens:
            eos = frozenset() if sampling.ignore_eos else self._eos_token_ids
            self._banned[row] = sorted(eos | set(sampling.stop_token_ids))

    def draws(self, sampling: Sampling) -> Draws:
        """Return the draws of a step, those of each entry one after another. Does not mutate."""
        counts = sampling.num_draws
        entry = np.repeat(np.arange(len(counts)), counts)
        index = np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts)  # within the entry
        along = index * sampling.drafted[entry]
        rows = sampling.rows[entry]
        temperatures, top_p, min_p = self._numbers[:, rows]
        top_k, seeds, logprobs, ban_ends = self._integers[:, rows]
        positions = sampling.next_positions[entry] + along
        starts, ids = self._banned_columns(rows, positions < ban_ends)
        return Draws(
            logit_rows=sampling.logit_starts[entry] + along,
            temperatures=np.ascontiguousarray(temperatures),
            top_k=np.ascontiguousarray(top_k),
            top_p=np.ascontiguousarray(top_p),
            min_p=np.ascontiguousarray(min_p),
            seeds=(seeds + index - along) & MAX_SEED,
            positions=positions,
            banned_starts=starts,
            banned_ids=ids,
            num_logprobs=np.ascontiguousarray(logprobs),
        )

    def _banned_columns(self, rows: IntArray, is_banned: np.ndarray) -> tuple[IntArray, IntArray]:
        starts = np.zeros(len(rows) + 1, np.int64)
        ids: list[int] = []
        for draw in np.flatnonzero(is_banned):
            banned = self._banned.get(int(rows[draw]), [])
            ids += banned
            starts[draw + 1] = len(banned)
        return np.cumsum(starts), np.array(ids, np.int64)


def seed_of(start: RowStart) -> int:
    """Return the seed of a row: the request's, moved on by its branch; without one, drawn from the request's id."""
    seed = start.sampling.seed
    if seed is None:
        digest = blake2b(start.request_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
    return (seed + start.branch) & MAX_SEED
