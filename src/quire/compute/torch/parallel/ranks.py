"""The leading rank, in the engine's process, and its connection to the others.

    engine process: scheduler, Worker ── LeadingRunner, LeadingCache ── frames ──► follower: its shard, its KV memory
                                               └────────── gathered columns ──────────────┘

All ranks have one block table: the same blocks, each with the heads of its rank. The leader decides, samples, and
encodes images, whose rows it sends; a follower executes the leader's frames, and ends with its connection. On GPUs each
follower sees only the GPU with the number of its rank. All ranks launch and record steps in the same way. A step counts
as done only if no follower is gone: NCCL leaves arbitrary numbers in the results of an exchange that was aborted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from quire.compute.backend import WorkerParts
from quire.compute.models import ModelDescription
from quire.compute.sampling.draws import Draws
from quire.compute.torch.cache import TorchCache
from quire.compute.torch.decoder import DecoderOutputs
from quire.compute.torch.footprint import DeviceMemory, Footprint
from quire.compute.torch.graphs import StepGraphs
from quire.compute.torch.last_tokens import LastTokens
from quire.compute.torch.load import Guessers, LoadedModel, image_encoder
from quire.compute.torch.parallel.frames import (
    Allocate,
    Begin,
    Frame,
    Inbox,
    Measure,
    Measured,
    Moves,
    Prepare,
    Ready,
    Step,
    send_frame,
)
from quire.compute.torch.parallel.group import GONE, RankGroup
from quire.compute.torch.parallel.loading import Shard, load_shard
from quire.compute.torch.parallel.split import Rank
from quire.compute.torch.runner import Graphs, TorchRunner
from quire.compute.torch.settings import TorchSettings
from quire.compute.vision.encoder import TowerEncoder
from quire.compute.worker.kv_memory import FinishRead
from quire.compute.worker.model_runner import StepInputs, StepOutputs
from quire.compute.worker.step_ahead import Drawn, StepUnderWay
from quire.core.errors import ExecutorLostError
from quire.core.executor import NoteLoaded
from quire.core.granted import with_gpus
from quire.core.python_process import start_python
from quire.core.step import StepPlan

FOLLOWER: Final = "quire.compute.torch.parallel.follower"
ENDING_S: Final = 10.0


class Followers:
    """The processes of the other ranks, and the folder in which all ranks meet: NCCL reads it until it ends."""

    def __init__(self, model: ModelDescription, settings: TorchSettings) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quire-ranks-")
        self.meeting = Path(self._folder.name) / "meeting"
        self._connections: list[socket.socket] = []
        self._inboxes: list[Inbox] = []
        self._processes: list[subprocess.Popen[Any]] = []
        self._when_gone: Callable[[], None] | None = None
        self._is_whole = True
        for rank in range(1, settings.tensor_parallel):
            ours, theirs = socket.socketpair()
            environment = with_gpus(os.environ, rank) if settings.device == "cuda" else None
            with theirs:
                self._processes.append(
                    start_python(
                        *("-m", FOLLOWER, str(theirs.fileno())),
                        environment=environment,
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                    )
                )
            self._connections.append(ours)
            send_frame([ours], Begin(model.source.name, settings, rank, str(self.meeting)))
            self._inboxes.append(Inbox(ours, self._note_end))

    @contextlib.contextmanager
    def ended_on_failure(self) -> Iterator[None]:
        """End the followers if an action of all ranks fails."""
        try:
            yield
        except BaseException:
            self.end()
            raise

    def wait(self) -> None:
        """Wait until all followers have started. Raises `ExecutorLostError` if one has ended."""
        self._answers(Ready)

    def end_with(self, group: RankGroup) -> None:
        """From now on, abort the exchanges of a group if a follower is gone. Mutates."""
        self._when_gone = group.abort
        if not self._is_whole:
            group.abort()

    def measured(self) -> list[Footprint]:
        """Return the memory that each follower measured. Waits. Raises `ExecutorLostError` if one has ended."""
        return [frame.footprint for frame in self._answers(Measured)]

    def send(self, frame: Frame) -> None:
        """Send a frame to all followers. Raises `ExecutorLostError` if one is gone."""
        try:
            send_frame(self._connections, frame)
        except OSError as error:
            raise ExecutorLostError(GONE) from error

    def require_all(self) -> None:
        """Raise `ExecutorLostError` if a follower is gone."""
        if not self._is_whole:
            raise ExecutorLostError(GONE)

    def end(self) -> None:
        """End the followers. May be called twice."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it may be closed already
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads it, unlike close
            connection.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
                continue
            process.kill()
            process.wait()
        self._folder.cleanup()

    def _answers(self, kind: type[Any]) -> list[Any]:
        answers = [inbox.take() for inbox in self._inboxes]
        if not all(isinstance(answer, kind) for answer in answers):
            raise ExecutorLostError(GONE)
        return answers

    def _note_end(self) -> None:
        """Note that a follower is gone, before an exchange with it can end. Mutates; called by any thread."""
        self._is_whole = False
        if self._when_gone is not None:
            self._when_gone()


class SharedLastTokens(LastTokens):
    """The last tokens of rows, which the first rank draws and sends to the others."""

    def __init__(self, group: RankGroup, num_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(num_rows, vocab_size, device)
        self._group = group

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return token ids without unknown ones, as the first rank knows them. All ranks call this."""
        found = super().known(token_ids)
        self._group.broadcast(found)
        return found


class RankRunner(TorchRunner):
    """Runs the steps of a rank. The first rank sends the tokens that only it knows."""

    def __init__(self, group: RankGroup, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._last_tokens = SharedLastTokens(group, self._last_tokens.num_rows, self.vocab_size, self._device)

    def follow(self, inputs: StepInputs, cache: TorchCache) -> None:
        """Start a step whose logits only the first rank needs. Mutates its slots in the cache."""
        self._logits(self._computed(inputs, cache))

    def _computed(self, inputs: StepInputs, cache: TorchCache) -> DecoderOutputs:
        """Start a step. A failed step is not retried in halves, because the other ranks cannot continue."""
        with _lost_if_it_fails():
            return super()._computed(inputs, cache)

    def _logits(self, outputs: DecoderOutputs) -> torch.Tensor:
        """Return the logits of a step, with the columns of all ranks."""
        with _lost_if_it_fails():
            return super()._logits(outputs)


@contextlib.contextmanager
def _lost_if_it_fails() -> Iterator[None]:
    """Raise `ExecutorLostError` for errors in a step, after which the ranks no longer agree."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise ExecutorLostError(f"a step of tensor_parallel has failed: {error}") from error


class LeadingCache:
    """The KV memory of the first rank; implements `KVMemory`. All ranks move and copy the same blocks."""

    def __init__(self, own: TorchCache, followers: Followers, num_host_blocks: int) -> None:
        self.spec = own.spec
        self.num_blocks = own.num_blocks
        self.own = own
        self._num_host_blocks = num_host_blocks
        self._followers = followers

    def allocate(self) -> None:
        """Allocate the memory of all ranks. Mutates."""
        with self._followers.ended_on_failure():
            self._followers.send(Allocate(self.num_blocks, self._num_host_blocks))
            self.own.allocate()

    def apply(self, plan: StepPlan) -> None:
        """Start the plan's moves and copies on all ranks. Mutates."""
        if plan.moves_out or plan.copies or plan.moves_in:
            self._followers.send(Moves.of(plan))
        self.own.apply(plan)

    def read_block(self, block: int, group: int, buffer: memoryview) -> FinishRead:
        """Start to copy this rank's part of a block into `buffer`. Does not mutate."""
        return self.own.read_block(block, group, buffer)

    def write_block(self, block: int, group: int, buffer: memoryview) -> None:
        """Copy bytes in the format of `read_block` into a block of this rank. Mutates."""
        self.own.write_block(block, group, buffer)

    def release(self) -> None:
        """Free the memory, and end the other ranks. Mutates; may be called twice."""
        self.own.release()
        self._followers.end()


class LeadingRunner:
    """Runs steps on the first rank and sends them to the others; implements `ModelRunner` and `Launcher`."""

    def __init__(self, runner: RankRunner, followers: Followers) -> None:
        self._runner = runner
        self._followers = followers

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the model."""
        return self._runner.vocab_size

    def prepare(self, cache: LeadingCache) -> None:
        """Compute the largest steps and record others, on all ranks. Does not mutate the cache."""
        with self._followers.ended_on_failure():
            self._followers.send(Prepare())
            self._runner.prepare(cache.own)
            self._followers.require_all()

    def run(self, inputs: StepInputs, cache: LeadingCache) -> StepOutputs:
        """Compute one step with all ranks and wait for it. Raises `ExecutorLostError` if a rank fails."""
        self._followers.send(Step.of(inputs, cache.spec.block_size))
        outputs = self._runner.run(inputs, cache.own)
        self._followers.require_all()
        return outputs

    def launch(self, inputs: StepInputs, draws: Draws, cache: LeadingCache) -> StepOfRanks:
        """Start a step and its draws with all ranks. Mutates its slots in the cache."""
        self._followers.send(Step.of(inputs, cache.spec.block_size))
        return StepOfRanks(self._runner.launch(inputs, draws, cache.own), self._followers)


class StepOfRanks:
    """A running step of all ranks; implements `StepUnderWay`."""

    def __init__(self, step: StepUnderWay, followers: Followers) -> None:
        self._step = step
        self._followers = followers

    def wait(self) -> Drawn:
        """Wait for the results, and return them. Raises `ExecutorLostError` if a rank is gone."""
        drawn = self._step.wait()
        self._followers.require_all()
        return drawn


class RankModel(LoadedModel):
    """The shard of a rank as a model."""

    def __init__(
        self,
        shard: Shard,
        group: RankGroup,
        settings: TorchSettings,
        eos_token_ids: frozenset[int],
        encoder: TowerEncoder | None = None,
    ) -> None:
        super().__init__(
            shard.decoder, shard.cache, settings, eos_token_ids, guessers=Guessers(shard.draft), encoder=encoder
        )
        self._group = group

    def runner(self, graphs: StepGraphs | None, *, launches: bool = True) -> RankRunner:
        """Return a runner of the shard. Its draws are not recorded: only the first rank draws."""
        parts = self._group, self.decoder, self.sampler
        num_rows = self._settings.max_num_seqs
        return RankRunner(*parts, graphs=Graphs(graphs), rehearsals=self.rehearsals(), num_rows=num_rows)


class LeadingModel(RankModel):
    """The shard of the first rank as a model; the other ranks repeat each action with their shards."""

    def __init__(self, followers: Followers, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._followers = followers

    def measured(self, memory: DeviceMemory, note_loaded: NoteLoaded | None = None) -> Footprint:
        """Return the memory without KV blocks, each kind as in the fullest rank. Waits for all ranks."""
        with self._followers.ended_on_failure():
            self._followers.send(Measure())
            footprints = [super().measured(memory, note_loaded), *self._followers.measured()]
        return Footprint(
            weight_bytes=max(each.weight_bytes for each in footprints),
            activation_bytes=max(each.activation_bytes for each in footprints),
            graph_bytes=max(each.graph_bytes for each in footprints),
            free_bytes=min(each.free_bytes for each in footprints),
        )

    def parts(self, num_blocks: int, num_host_blocks: int = 0, note_loaded: NoteLoaded | None = None) -> WorkerParts:
        """Return the parts of a worker that leads the other ranks. Mutates: the worker gets the KV memory."""
        parts = super().parts(num_blocks, num_host_blocks, note_loaded)
        runner = LeadingRunner(self.runner(self.new_graphs(note_loaded)), self._followers)
        cache = LeadingCache(self.cache, self._followers, num_host_blocks)
        return replace(parts, runner=runner, launcher=runner, cache=cache, adapters=None, has_adapter=None)


def load_ranks(model: ModelDescription, settings: TorchSettings, note_loaded: NoteLoaded | None) -> LoadedModel:
    """Start the other ranks, and return the shard of the first as a model, once all have loaded theirs.

    Raises `ExecutorLostError` if a rank could not.
    """
    followers = Followers(model, settings)
    with followers.ended_on_failure():
        followers.wait()
        group = RankGroup(Rank(0, settings.tensor_parallel), followers.meeting, settings.device)
        followers.end_with(group)
        shard = load_shard(model, settings, group, note_loaded)
        encoder = image_encoder(model, settings, shard.cache.device)
        followers.require_all()
    return LeadingModel(followers, shard, group, settings, frozenset(model.eos_token_ids), encoder)
