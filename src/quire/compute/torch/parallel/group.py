"""RankGroup: the ranks of a model, and what they exchange while they compute: columns of rows, gathered.

Ranks meet by a file in a folder that only this user can enter, and talk over the loopback interface. Nothing is summed
across ranks. A rank that is gone, or silent for too long, is the end of the group: no later step can be computed.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
from torch import distributed

from quire.compute.torch.parallel.shards import JoiningMatrix, ShardedMatrix
from quire.compute.torch.parallel.split import Rank
from quire.compute.torch.products import Matrix, Product
from quire.core.errors import ExecutorLostError

PATIENCE_S: Final = 300
GONE: Final = "a rank of tensor_parallel is gone; its reason is in the log"
INTERFACE: Final = {"GLOO_SOCKET_IFNAME": "lo"}
"""What a process of a group has in its environment: by default, ranks listen on an interface that others reach."""


class RankGroup:
    """The ranks of one model; each process has its own."""

    def __init__(self, rank: Rank, meeting: Path) -> None:
        self.rank = rank
        os.environ.update(INTERFACE)
        try:
            store = distributed.FileStore(str(meeting), rank.count)
            self._gloo = distributed.ProcessGroupGloo(store, rank.number, rank.count, timedelta(seconds=PATIENCE_S))
        except RuntimeError as error:
            raise ExecutorLostError(GONE) from error

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of which each rank has some columns, whole. Waits for all ranks.

        Raises `ExecutorLostError` if one of them is gone.
        """
        if not rows.numel():
            return rows.new_empty((len(rows), rows.shape[1] * self.rank.count))
        ours = rows.contiguous().view(torch.uint8)  # a group knows fewer number types than torch
        pieces = [torch.empty_like(ours) for _ in range(self.rank.count)]
        try:
            self._gloo.allgather([pieces], [ours]).wait()
        except RuntimeError as error:
            raise ExecutorLostError(GONE) from error
        return torch.cat([piece.view(rows.dtype) for piece in pieces], dim=-1)


class GatheringProduct:
    """A product of rows with matrices of which each rank has some outputs."""

    def __init__(self, product: Product, group: RankGroup) -> None:
        self._product = product
        self._group = group

    def __call__(self, rows: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """Return the product, with the outputs of all ranks where those are needed next."""
        if isinstance(matrix, JoiningMatrix):
            rows = self._group.gather(rows)
        products = self._product(rows, matrix)
        return self._group.gather(products) if isinstance(matrix, ShardedMatrix) else products
