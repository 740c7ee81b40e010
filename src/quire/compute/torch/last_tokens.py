"""LastTokens: the token that each row drew last, on the device, so that the next step does not wait for the host.

draw of row 3 ─► tokens[3] ─► the next step: a token id of -1 - 3 is the last token of row 3
"""

from __future__ import annotations

import numpy as np
import torch

from quire.compute.arrays import IntArray
from quire.compute.worker.model_runner import StepInputs


class LastTokens:
    """The last tokens of rows, at a fixed address, so that recorded steps read and write them. Mutable."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        # The last place belongs to no row: padding of recorded draws is stored there.
        self._tokens = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)

    def store(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Store the tokens of rows; `num_rows` is the row of a token to forget. Mutates; does not wait."""
        # If logits were not finite, the token is -1. The next step of the row computes with any token.
        self._tokens[rows] = tokens.clamp(0, self.vocab_size - 1).to(torch.int32)

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return token ids in which the last tokens of rows replace `coded_ids`. Does not mutate or wait."""
        last = self._tokens[(-1 - token_ids).clamp(min=0)]
        return torch.where(token_ids < 0, last, token_ids)


def coded_ids(inputs: StepInputs) -> IntArray:
    """Return the token ids of a step; the unknown last token of row r is -1 - r. Does not mutate."""
    if inputs.token_ids.min() >= 0:
        return inputs.token_ids
    ids, ends = inputs.token_ids.copy(), inputs.query_starts[1:] - 1
    ids[ends] = np.where(ids[ends] < 0, -1 - inputs.rows, ids[ends])
    return ids
