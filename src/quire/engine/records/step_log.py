"""The step log: every request, plan and result of a run, in the order in which they happened.

    magic │ record │ record │ …    record = kind (1 byte) │ time (8) │ length (4) │ checksum (4) │ payload

The scheduler is a pure function of its inputs: the settings, the requests, the aborts and stops, the results. So the
log of a run can be **replayed**: `replay` feeds the same inputs to a new scheduler and compares each of its plans with
the one in the log, byte for byte. A log makes a bug report, and a replay shows that a refactoring changes no decision.

A log that ends between two records is the log of a shorter run. A log that ends within a record, or has an altered
byte, is refused. The time of a record is the engine's clock when it was written; no decision depends on it. A step's
result includes its guessed tokens and its duration. An eviction policy that was passed as an object is not in the log,
so such a run cannot be replayed.

The key of the prefix hash is not written: it is a secret, and no decision depends on it. Cache salts are written as
digests, because only their equality matters; so are images.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, BinaryIO, NamedTuple

from quire.core.clock import Clock
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import ExecutionError, OutOfMemoryError, StepLogError, TornStepLogError
from quire.core.kept_block import KeptBlock, may_be_kept
from quire.core.kv_spec import KVCacheSpec, KVGroup, KVHeads
from quire.core.request import CacheScope
from quire.core.step import StepPlan, StepResult
from quire.core.transfers import read_kept_block, write_kept_block
from quire.core.validate import RequestLimits
from quire.core.wire import WireReader, WireWriter
from quire.engine.commands import Add, Command, KeepPrompt, TakeBlocks, carry_out, command_bytes, read_command
from quire.memory.manager import KVCacheManager
from quire.scheduler.commit import StepOutcome
from quire.scheduler.scheduler import Scheduler

MAGIC = b"quire step log 18\n"
_HEAD = struct.Struct("<cdII")
SETTINGS, COMMANDED, PLANNED, IDLED, COMPUTED, LOST, OUT_OF_MEMORY = (bytes([code]) for code in b"SCPIRLM")


class StepLogWriter:
    """Writes the log of one engine to a binary file."""

    def __init__(self, file: BinaryIO, clock: Clock) -> None:
        self._file = file
        self._clock = clock

    def _record(self, kind: bytes, payload: bytes) -> None:
        at_s = self._clock.now()
        self._write(_HEAD.pack(kind, at_s, len(payload), _checksum(kind, at_s, payload)) + payload)

    def _write(self, data: bytes) -> None:
        """Append a complete record, or the header of the log."""
        self._file.write(data)

    def begin(self, scheduler: Scheduler) -> None:
        """Write the settings that decisions depend on."""
        memory = scheduler.memory
        settings = {
            "spec": asdict(memory.spec),
            "memory": {name: value for name, value in asdict(memory.config).items() if name != "hash_key"},
            "scheduler": asdict(scheduler.config),
            "limits": asdict(scheduler.limits),
            "kept": [_logged(block) for block in memory.kept],
        }
        self._write(MAGIC)
        self._record(SETTINGS, json.dumps(settings, separators=(",", ":")).encode())

    def commanded(self, command: Command) -> None:
        """Write a command to the engine, with a digest in place of a salt."""
        if isinstance(command, Add | KeepPrompt):
            command = replace(command, scope=_without_salt(command.scope))
            if isinstance(command, Add) and command.images:
                command = replace(command, images=tuple(image.without_pixels() for image in command.images))
        elif isinstance(command, TakeBlocks):
            command = replace(command, blocks=tuple(map(_kept_without_salt, command.blocks)))
        self._record(COMMANDED, command_bytes(command))

    def planned(self, plan: StepPlan) -> None:
        """Write a plan, with digests in place of salts."""
        if any(start.scope.salt for start in plan.row_starts):
            starts = tuple(replace(start, scope=_without_salt(start.scope)) for start in plan.row_starts)
            plan = replace(plan, row_starts=starts)
        if any(store.kept.scope and store.kept.scope.salt for store in plan.transfers.stores):
            stores = tuple(
                store if store.kept.scope is None else store._replace(kept=_kept_without_salt(store.kept))
                for store in plan.transfers.stores
            )
            plan = replace(plan, transfers=replace(plan.transfers, stores=stores))
        self._record(PLANNED, plan.to_bytes())

    def idled(self) -> None:
        """Write that the scheduler had nothing to plan."""
        self._record(IDLED, b"")

    def computed(self, result: StepResult) -> None:
        """Write a result."""
        self._record(COMPUTED, result.to_bytes())

    def lost(self, error: ExecutionError) -> None:
        """Write that the steps in flight were lost, and whether for lack of memory."""
        kind = OUT_OF_MEMORY if isinstance(error, OutOfMemoryError) else LOST
        self._record(kind, str(error).encode("utf-8", "replace"))

    def close(self) -> None:
        """Flush the file, which the caller owns."""
        self._file.flush()


def _without_salt(scope: CacheScope) -> CacheScope:
    """Return a scope with a digest in place of its salt; it is kept on disk exactly if the original is."""
    if not scope.salt:
        return scope
    digest = hashlib.blake2b(scope.salt.encode("utf-8", "surrogatepass"), digest_size=16)
    return replace(scope, salt=digest.hexdigest(), persist=may_be_kept(scope))


def _kept_without_salt(block: KeptBlock) -> KeptBlock:
    return block if block.scope is None else replace(block, scope=_without_salt(block.scope))


def _logged(block: KeptBlock) -> str:
    """Return the text of a block that was on the disk at the start, with a digest in place of its salt."""
    writer = WireWriter()
    write_kept_block(writer, _kept_without_salt(block))
    return writer.to_bytes().hex()


def _checksum(kind: bytes, at_s: float, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("<cd", kind, at_s)))


class Record(NamedTuple):
    """A record of a log. `at_s`: the engine's clock when it was written."""

    kind: bytes
    at_s: float
    payload: bytes


def read_records(file: BinaryIO) -> Iterator[Record]:
    """Read the records of a log. Raises `StepLogError` if it was altered, `TornStepLogError` if it is torn."""
    if file.read(len(MAGIC)) != MAGIC:
        raise StepLogError("not a step log, or a log of another version")
    while head := file.read(_HEAD.size):
        if len(head) < _HEAD.size:
            raise TornStepLogError("the log ends within a record")
        kind, at_s, length, checksum = _HEAD.unpack(head)
        payload = file.read(length)
        if len(payload) < length:
            raise TornStepLogError("the log ends within a record")
        if _checksum(kind, at_s, payload) != checksum:
            raise StepLogError("a record is corrupt")
        yield Record(kind, at_s, payload)


def read_scheduler(payload: bytes) -> Scheduler:
    """Make a scheduler, with its memory, from the settings in a log."""
    try:
        settings = json.loads(payload)
        limits = settings["limits"]
        limits["eos_token_ids"] = tuple(limits["eos_token_ids"])
        kept = [read_kept_block(WireReader(bytes.fromhex(block))) for block in settings["kept"]]
        return Scheduler(
            SchedulerConfig(**settings["scheduler"]),
            KVCacheManager(_read_spec(settings["spec"]), MemoryConfig(**settings["memory"]), kept=kept),
            RequestLimits(**limits),
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise StepLogError(f"the settings in the log do not match this version: {error}") from error


def _read_spec(fields: dict[str, Any]) -> KVCacheSpec:
    groups = tuple(map(_read_group, fields["groups"]))
    draft = None if fields["draft"] is None else _read_spec(fields["draft"])
    return KVCacheSpec(**fields | {"groups": groups, "draft": draft})


def _read_group(fields: dict[str, Any]) -> KVGroup:
    heads = fields.get("heads")
    heads = None if heads is None else KVHeads(**heads)
    return KVGroup(**fields | {"layers": tuple(fields["layers"]), "heads": heads})


class Replayed(NamedTuple):
    """A record that has taken effect, with its command, plan or outcome if it has one."""

    kind: bytes
    at_s: float
    scheduler: Scheduler
    command: Command | None = None
    plan: StepPlan | None = None
    outcome: StepOutcome | None = None


def replay(file: BinaryIO) -> int:
    """Feed a log to a new scheduler; return the number of plans, each equal to the logged one, byte for byte.

    Raises `StepLogError` at the first plan that differs.
    """
    return sum(each.kind == PLANNED for each in replayed(file))


def replayed(file: BinaryIO) -> Iterator[Replayed]:
    """Feed a log to a new scheduler; yield each record after it has taken effect.

    Raises `StepLogError` at the first plan that differs.
    """
    records = read_records(file)
    first = next(records, None)
    if first is None or first.kind != SETTINGS:
        raise StepLogError("the log does not begin with the settings")
    scheduler = read_scheduler(first.payload)
    num_plans = 0
    for kind, at_s, payload in records:
        if kind == PLANNED:
            plan = scheduler.schedule()
            if plan is None or plan.to_bytes() != payload:
                raise StepLogError(f"plan {num_plans} differs from the logged one")
            num_plans += 1
            yield Replayed(kind, at_s, scheduler, plan=plan)
        elif kind == COMPUTED:
            yield Replayed(kind, at_s, scheduler, outcome=scheduler.update(StepResult.from_bytes(payload)))
        elif kind == IDLED:
            if scheduler.schedule() is not None:
                raise StepLogError(f"plan {num_plans} is not in the log")
            yield Replayed(kind, at_s, scheduler)
        elif kind == COMMANDED:
            command = read_command(payload)
            carry_out(command, scheduler)
            yield Replayed(kind, at_s, scheduler, command=command)
        elif kind in (LOST, OUT_OF_MEMORY):
            scheduler.lose_steps((ExecutionError if kind == LOST else OutOfMemoryError)(payload.decode()))
            yield Replayed(kind, at_s, scheduler)
        else:
            raise StepLogError(f"unknown kind of record: {kind!r}")
