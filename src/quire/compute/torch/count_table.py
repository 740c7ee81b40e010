"""CountTable: which tokens are in the texts of rows, and how often, on the device that draws them.

    a text whose tokens the host knows ──► its counts, from the host, into the row of the table ─┐
    a text whose last token is UNKNOWN ──► the row as it is                                      ├─► penalties ─► token
                                                                 the row counts the token ◄──────┴───────────────┘

So a step with penalties need not wait for the step before it, and the host sends the counts of a text once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from quire.compute.arrays import BoolArray, IntArray
from quire.compute.sampling.draws import Draws, TokenLists
from quire.compute.torch.upload import on_device

NEUTRAL: Final = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""The penalties, in the order of the kernel, with the values that change nothing."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The draws of a step with penalties, and the counts of their texts.

    A count is 0 for a token that is not in the text, and otherwise 1 more than its occurrences in the output.
    """

    draws: IntArray  # which draws of the step
    places: IntArray  # their rows of the table
    table: torch.Tensor  # int32 [num_rows, vocab_size]

    def add(self, tokens: torch.Tensor) -> None:
        """Count the tokens of all draws of the step. Mutates the table; does not wait."""
        place = on_device(self.places, tokens.device), tokens[on_device(self.draws, tokens.device)]
        counts = self.table[place]
        self.table[place] = torch.where(counts == 0, 2, counts + 1)

    def applied(self, draws: Draws) -> Draws:
        """Return the draws with these counts as lists. Waits for the device."""
        rows = {draw: self.table[place].cpu().numpy() for draw, place in zip(self.draws, self.places, strict=True)}
        lists = [np.flatnonzero(rows[draw]) if draw in rows else np.zeros(0, np.int64) for draw in range(len(draws))]
        counts = [rows[draw][ids] - 1 for draw, ids in enumerate(lists) if draw in rows]
        rules = replace(draws.rules, seen=TokenLists.of(lists), counts=np.concatenate(counts).astype(np.int64))
        return replace(draws, rules=rules)


def penalized(draws: Draws) -> IntArray:
    """Return which draws have a penalty."""
    return np.flatnonzero(np.logical_or.reduce([draws.parameter(name) != value for name, value in NEUTRAL.items()]))


class CountTable:
    """The counts of rows. `make_room` takes 4 bytes for each row and token of the vocabulary."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._table = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)

    def make_room(self, num_rows: int) -> None:
        """Make room for this many rows. Mutates."""
        missing = num_rows - len(self._table)
        if missing > 0:
            room = self._table.new_zeros((max(missing, len(self._table)), self._table.shape[1]))
            self._table = torch.cat((self._table, room))

    def take(self, draws: Draws, rows: IntArray, goes_on: BoolArray) -> tuple[Draws, Counted | None]:
        """Move the counts of draws into their rows of the table; return the draws without them, and the counts.

        `goes_on`: draws whose counts are in the table already. Mutates the table; does not wait.
        """
        mine = penalized(draws)
        if not len(mine):
            return draws, None
        self.make_room(int(rows[mine].max()) + 1)
        counted = Counted(mine, rows[mine].astype(np.int64), self._table)
        begins = mine[~goes_on[mine]]
        if len(begins):
            seen, device = draws.rules.seen, self._table.device
            self._table.index_fill_(0, on_device(rows[begins].astype(np.int64), device), 0)
            owners = np.repeat(rows.astype(np.int64), np.diff(seen.starts))
            place = on_device(owners, device), on_device(seen.ids, device)
            self._table[place] = on_device((draws.rules.counts + 1).astype(np.int32), device)
        nothing = TokenLists.of([np.zeros(0, np.int64)] * len(draws))
        return replace(draws, rules=replace(draws.rules, seen=nothing, counts=nothing.ids)), counted
