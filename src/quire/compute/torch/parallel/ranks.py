"""Ranks: the leading one, in the engine's process, and those that follow it, in processes of their own.

    engine process: scheduler, Worker ── LeadingDecoder, LeadingCache ── frames ──► follower: its shard, its KV memory
                                               └────────── gathered columns ──────────────┘

All ranks have one block table: the same blocks, each with the heads of its rank. The leader decides and samples; a
follower does what it is told, and ends with its connection.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from quire.compute.models import ModelDescription, read_model
from quire.compute.models.base import DecoderSpec
from quire.compute.models.hub import resolve_model
from quire.compute.torch.attention.base import KVPair, StepBatch
from quire.compute.torch.cache import TorchCache
from quire.compute.torch.decoder import DecoderOutputs, Engines, TorchDecoder
from quire.compute.torch.load import LoadedModel
from quire.compute.torch.parallel.frames import Allocate, Begin, Frame, Moves, Step, receive_frame, send_frame
from quire.compute.torch.parallel.group import GONE, RankGroup
from quire.compute.torch.parallel.loading import load_shard
from quire.compute.torch.parallel.split import Rank
from quire.compute.torch.settings import TorchSettings
from quire.compute.torch.weights import TorchWeights
from quire.core.errors import ExecutorLostError, QuireError
from quire.core.executor import NoteLoaded
from quire.core.python_process import start_python
from quire.core.step import StepPlan

ENDING_S: Final = 10.0
STARTED: Final = b"s"
"""What a follower says before it joins the group, so that nobody waits there for one that has ended."""


class Followers:
    """The processes of the other ranks."""

    def __init__(self, model: ModelDescription, settings: TorchSettings, meeting: Path) -> None:
        self._connections: list[socket.socket] = []
        self._processes: list[subprocess.Popen[Any]] = []
        for rank in range(1, settings.tensor_parallel):
            ours, theirs = socket.socketpair()
            with theirs:
                arguments = ("-m", "quire.compute.torch.parallel.ranks", str(theirs.fileno()))
                process = start_python(*arguments, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
                self._processes.append(process)
            self._connections.append(ours)
            send_frame([ours], Begin(model.source.name, settings, rank, str(meeting)))

    def wait(self) -> None:
        """Wait until all of them have started. Raises `ExecutorLostError` if one of them has ended."""
        for connection in self._connections:
            if not connection.recv(len(STARTED)):
                raise ExecutorLostError(GONE)

    def send(self, frame: Frame) -> None:
        """Have all of them do the same. Raises `ExecutorLostError` if one is gone."""
        try:
            send_frame(self._connections, frame)
        except OSError as error:
            raise ExecutorLostError(GONE) from error

    def end(self) -> None:
        """End them. May be called twice."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
                continue
            process.kill()
            process.wait()


class LeadingDecoder(TorchDecoder):
    """The decoder of the first rank: the others compute each step with it."""

    def __init__(self, spec: DecoderSpec, weights: TorchWeights, engines: Engines, followers: Followers) -> None:
        super().__init__(spec, weights, engines)
        self._followers = followers

    def run(self, batch: StepBatch, pairs: Sequence[KVPair]) -> DecoderOutputs:
        """Compute one step with all ranks. Raises `ExecutorLostError` if a rank fails: the others cannot go on."""
        self._followers.send(Step.of(batch))
        try:
            return super().run(batch, pairs)
        except (RuntimeError, MemoryError) as error:
            raise ExecutorLostError(f"a step of tensor_parallel has failed: {error}") from error


class LeadingCache(TorchCache):
    """The KV memory of the first rank: what happens to its blocks happens to those of the others."""

    def __init__(self, followers: Followers, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._followers = followers

    def allocate(self) -> None:
        """Allocate the memory of all ranks. Mutates."""
        self._followers.send(Allocate(self.num_blocks, self._num_host_blocks))
        super().allocate()

    def apply(self, plan: StepPlan) -> None:
        """Start the plan's moves and copies on all ranks. Mutates."""
        if plan.moves_out or plan.copies or plan.moves_in:
            self._followers.send(Moves.of(plan))
        super().apply(plan)

    def release(self) -> None:
        """Give the memory back, and end the other ranks. Mutates; may be called twice."""
        super().release()
        self._followers.end()


def load_ranks(model: ModelDescription, settings: TorchSettings, note_loaded: NoteLoaded | None) -> LoadedModel:
    """Start the other ranks, and return the shard of the first as a model; returns once all have loaded theirs.

    Raises `ExecutorLostError` if one of them could not.
    """
    with tempfile.TemporaryDirectory(prefix="quire-ranks-") as folder:
        meeting = Path(folder) / "meeting"
        followers = Followers(model, settings, meeting)
        try:
            followers.wait()
            group = RankGroup(Rank(0, settings.tensor_parallel), meeting)
            shard = load_shard(model, settings, group, note_loaded, partial(LeadingCache, followers))
        except BaseException:
            followers.end()
            raise
    leader = LeadingDecoder(shard.spec, shard.weights, shard.engines, followers)
    return LoadedModel(leader, shard.cache, settings, frozenset(model.eos_token_ids))


def follow(connection: socket.socket, load: Callable[[Begin], tuple[TorchDecoder, TorchCache]]) -> None:
    """Do what the leader says until it is gone."""
    begin = receive_frame(connection)
    if not isinstance(begin, Begin):
        return
    connection.sendall(STARTED)
    decoder, cache = load(begin)
    while (frame := receive_frame(connection)) is not None:
        match frame:
            case Allocate(num_blocks, num_host_blocks):
                cache.resize(num_blocks, num_host_blocks)
                cache.allocate()
            case Moves():
                cache.apply(frame.to_plan())
            case Step():
                decoder.run(frame.to_batch(), cache.pairs())


def load_follower(begin: Begin) -> tuple[TorchDecoder, TorchCache]:
    """Join the group, and load the shard of a rank."""
    rank = Rank(begin.rank, begin.settings.tensor_parallel)
    group = RankGroup(rank, Path(begin.meeting))
    model = read_model(resolve_model(begin.model), begin.settings.max_model_len)
    shard = load_shard(model, begin.settings, group)
    return TorchDecoder(shard.spec, shard.weights, shard.engines), shard.cache


def main(descriptor: int) -> int:
    """Follow the leader at the other end of an inherited socket; returns the exit status."""
    with socket.socket(fileno=descriptor) as connection:
        try:
            follow(connection, load_follower)
        except ExecutorLostError:
            pass  # the leader knows, or is gone
        except QuireError as error:
            print(f"quire: a rank of tensor_parallel has failed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM):  # meant for the leader
        signal.signal(ignored, signal.SIG_IGN)
    sys.exit(main(int(sys.argv[1])))
