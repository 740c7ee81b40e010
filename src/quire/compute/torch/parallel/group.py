"""RankGroup: the ranks of a model, and their exchanges in a step.

    gather       columns of rows, from all ranks to all        whole sums: the bits do not depend on the number of ranks
    sum          numbers of the same rows, added up            with `tensor_parallel_sums` "reduce"
    broadcast    tokens that the first rank has drawn

Ranks find each other through a file in a folder that only this user can enter, and communicate over the loopback
interface; on GPUs, NCCL finds the links between them. On CPUs an exchange waits; on GPUs it is launched like a kernel
and can be recorded.

If one rank is gone, the group can compute no further step. gloo detects this. NCCL's kernels would wait forever, so the
thread that notices the loss calls `abort`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed

from quire.compute.models.sublayers import ExpertsSpec
from quire.compute.torch.experts import ExpertOperations
from quire.compute.torch.parallel.shards import JoiningMatrix, PartialMatrix, ShardedMatrix
from quire.compute.torch.parallel.split import Rank
from quire.compute.torch.products import Matrix, Product
from quire.core.errors import ExecutorLostError

PATIENCE_S: Final = 300
GONE: Final = "a rank of tensor_parallel is gone; the log has the reason"
INTERFACE: Final = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment variables of a rank: by default, ranks listen on an interface that other machines can reach."""


class RankGroup:
    """The ranks of one model, as seen by one of them: each process has its own object."""

    def __init__(self, rank: Rank, meeting: Path, device: str = "cpu") -> None:
        self.rank = rank
        self._on_gpu = device == "cuda"
        os.environ.update(INTERFACE)
        try:
            store = distributed.FileStore(str(meeting), rank.count)
            self._ranks = _joined(store, rank, on_gpu=self._on_gpu)
        except RuntimeError as error:
            raise ExecutorLostError(GONE) from error

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the complete rows, of which each rank has some columns.

        Raises `ExecutorLostError` if a rank is gone.
        """
        count = self.rank.count
        if not rows.numel():
            return rows.new_empty((len(rows), rows.shape[1] * count))
        ours = rows.contiguous().view(torch.uint8)  # a process group supports fewer dtypes than torch
        pieces = ours.new_empty((count * len(ours), ours.shape[1]))
        _wait(lambda: self._ranks._allgather_base(pieces, ours))
        return pieces.view(rows.dtype).view(count, *rows.shape).transpose(0, 1).flatten(1)

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of the rows of all ranks. Mutates them."""
        if rows.numel():
            _wait(lambda: self._ranks.allreduce([rows]))
        return rows

    def broadcast(self, numbers: torch.Tensor) -> None:
        """Replace numbers by those of the first rank. Mutates them."""
        _wait(lambda: self._ranks.broadcast(numbers, 0))

    def abort(self) -> None:
        """End exchanges that wait for a rank that is gone; may be called from any thread."""
        if self._on_gpu:
            self._ranks.abort()


def _joined(store: Any, rank: Rank, *, on_gpu: bool) -> Any:
    """Return the process group of the ranks that share a store."""
    patience = timedelta(seconds=PATIENCE_S)
    if not on_gpu:
        return distributed.ProcessGroupGloo(store, rank.number, rank.count, patience)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = patience
    return distributed.ProcessGroupNCCL(store, rank.number, rank.count, options)


def _wait(exchange: Callable[[], Any]) -> None:
    """Run an exchange: on CPUs wait for it; on GPUs, later launches wait for it."""
    try:
        exchange().wait()
    except RuntimeError as error:
        raise ExecutorLostError(GONE) from error


class RanksProduct:
    """A product of rows with matrices of which each rank has some outputs, or some inputs."""

    def __init__(self, product: Product, group: RankGroup) -> None:
        self._product = product
        self._group = group

    def __call__(self, rows: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """Return the product, with the outputs of all ranks if the next operation needs them."""
        if isinstance(matrix, JoiningMatrix):
            rows = self._group.gather(rows)
        products = self._product(rows, matrix)
        if isinstance(matrix, PartialMatrix):
            return self._group.sum(products)
        return self._group.gather(products) if isinstance(matrix, ShardedMatrix) else products


class RanksExperts:
    """Experts split among ranks, by outputs or by inputs; implements `ExpertOperations`.

    Every rank routes all rows, and has a part of every expert, so the size of an exchange does not depend on the
    routing. The outputs of a row's experts are added up before the exchange, so a row is sent once.
    """

    def __init__(self, experts: ExpertOperations[Any], group: RankGroup, *, sums: bool) -> None:
        self._experts = experts
        self._group = group
        self._join = group.sum if sums else group.gather

    def route(self, scores: torch.Tensor, slots: torch.Tensor, spec: ExpertsSpec, offset: torch.Tensor | None) -> Any:
        """Return the experts of rows."""
        return self._experts.route(scores, slots, spec, offset)

    def product(self, rows: torch.Tensor, experts: Matrix, routing: Any) -> torch.Tensor:
        """Return the product of each pair with the part of its expert that this rank has."""
        if isinstance(experts, JoiningMatrix):
            rows = self._group.gather(rows)
        return self._experts.product(rows, experts, routing)

    def scaled(self, routing: Any, factors: torch.Tensor) -> Any:
        """Return the routing with other weights."""
        return self._experts.scaled(routing, factors)

    def weighed(self, rows: torch.Tensor, routing: Any) -> tuple[torch.Tensor, Any]:
        """Return one row per pair, times its weight, and the routing without weights."""
        return self._experts.weighed(rows, routing)

    def combine(self, outputs: torch.Tensor, routing: Any) -> torch.Tensor:
        """Return the weighted sum of each row's pairs, from all ranks."""
        return self._join(self._experts.combine(outputs, routing))

    def known(self, ids: torch.Tensor, num_experts: int) -> Any:
        """Return the routing of rows whose experts are known."""
        return self._experts.known(ids, num_experts)

    def ids(self, routing: Any) -> torch.Tensor:
        """Return the experts of rows."""
        return self._experts.ids(routing)
