"""The step log: every request, plan and result of a run, in the order in which they happened.

    magic │ record │ record │ …    record = kind (1 byte) │ time (8) │ length (4) │ checksum (4) │ payload

The scheduler is a pure function of what goes in: the settings, the requests, the aborts and stops, the results. So the
log of a run can be **replayed**: `replay` feeds a new scheduler the same inputs and compares every plan that it makes
with the one in the log, byte for byte. A bug report is a log; a refactoring that must not change decisions is a replay.

A log that ends between two records is the log of a shorter run; one that ends within a record, or in which a byte was
altered, is refused. The time of a record is the engine's clock when it was written; no decision depends on it, and
whoever reads the log knows how long everything took. Drafts come from outside; on replay they are taken from the logged
plans. An eviction policy that was handed in as an object is not in the log, so a run with one cannot be replayed.

The key of the prefix hash is not written: it is a secret, and no decision depends on it. Nor are cache salts: a digest
stands in for each, because all that counts is which are equal.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import asdict
from typing import BinaryIO, NamedTuple

from quire.core.clock import Clock
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import ExecutionError, OutOfMemoryError, StepLogError, TornStepLogError
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.core.request import CacheScope, Request
from quire.core.sampling_wire import read_sampling, write_sampling
from quire.core.step import StepPlan, StepResult
from quire.core.validate import RequestLimits
from quire.core.wire import WireReader, WireWriter
from quire.memory.manager import KVCacheManager
from quire.scheduler.commit import StepOutcome
from quire.scheduler.scheduler import Drafter, Scheduler

MAGIC = b"quire step log 6\n"
_HEAD = struct.Struct("<cdII")
SETTINGS, ADDED, ABORTED, FAILED, STOPPED, CLEARED, PLANNED, IDLED, COMPUTED, LOST, OUT_OF_MEMORY = (
    bytes([code]) for code in b"SAXFTCPIRLM"
)


class StepLogWriter:
    """Writes the log of one engine to a binary file."""

    def __init__(self, file: BinaryIO, clock: Clock) -> None:
        self._file = file
        self._clock = clock

    def _record(self, kind: bytes, payload: bytes) -> None:
        at_s = self._clock.now()
        self._write(_HEAD.pack(kind, at_s, len(payload), _checksum(kind, at_s, payload)) + payload)

    def _write(self, data: bytes) -> None:
        """Append a whole record, or what stands before the first."""
        self._file.write(data)

    def begin(self, scheduler: Scheduler) -> None:
        """Write the settings that decisions depend on."""
        memory = scheduler.memory
        settings = {
            "spec": asdict(memory.spec),
            "memory": {name: value for name, value in asdict(memory.config).items() if name != "hash_key"},
            "scheduler": asdict(scheduler.config),
            "limits": asdict(scheduler.limits),
            "eos": sorted(scheduler.eos_token_ids),
            "drafts": scheduler.has_drafter,
        }
        self._write(MAGIC)
        self._record(SETTINGS, json.dumps(settings, separators=(",", ":")).encode())

    def added(self, request: Request) -> None:
        """Write a request."""
        writer = WireWriter()
        for text in (request.request_id, request.scope.tenant, _stand_in(request.scope.salt)):
            writer.text(text)
        writer.integer(len(request.scope.extra_keys))
        for key in request.scope.extra_keys:
            writer.text(key)
        writer.integer(request.priority)
        writer.number(request.arrival_s)
        writer.column(request.tokens)
        write_sampling(writer, request.sampling)
        self._record(ADDED, writer.to_bytes())

    def aborted(self, request_id: str) -> None:
        """Write that a request was aborted."""
        self._record(ABORTED, request_id.encode("utf-8", "surrogatepass"))

    def failed(self, request_id: str, message: str) -> None:
        """Write that a request was ended with an error."""
        writer = WireWriter()
        writer.text(request_id)
        writer.text(message)
        self._record(FAILED, writer.to_bytes())

    def stopped(self, request_id: str, branch: int) -> None:
        """Write that a sequence reached a stop string."""
        writer = WireWriter()
        writer.text(request_id)
        writer.integer(branch)
        self._record(STOPPED, writer.to_bytes())

    def cleared(self) -> None:
        """Write that everything cached was forgotten."""
        self._record(CLEARED, b"")

    def planned(self, plan: StepPlan) -> None:
        """Write a plan."""
        self._record(PLANNED, plan.to_bytes())

    def idled(self) -> None:
        """Write that the scheduler was asked for a plan, and there was nothing to do."""
        self._record(IDLED, b"")

    def computed(self, result: StepResult) -> None:
        """Write a result."""
        self._record(COMPUTED, result.to_bytes())

    def lost(self, error: ExecutionError) -> None:
        """Write that the steps under way were lost, and whether for lack of memory."""
        kind = OUT_OF_MEMORY if isinstance(error, OutOfMemoryError) else LOST
        self._record(kind, str(error).encode("utf-8", "replace"))

    def close(self) -> None:
        """Flush; the file is the caller's."""
        self._file.flush()


def _stand_in(salt: str) -> str:
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest() if salt else ""


class _LoggedDrafts:
    """A drafter that guesses what was guessed in the plan that is to be made again."""

    def __init__(self) -> None:
        self.plan: StepPlan | None = None

    def __call__(self, request: Request, most: int) -> array[int]:
        return self.plan.drafts.get(request.row, array("i")) if self.plan else array("i")


def _checksum(kind: bytes, at_s: float, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("<cd", kind, at_s)))


class Record(NamedTuple):
    """A record of a log. `at_s`: the engine's clock when it was written."""

    kind: bytes
    at_s: float
    payload: bytes


def read_records(file: BinaryIO) -> Iterator[Record]:
    """Read the records of a log. Raises `StepLogError` where it was altered, `TornStepLogError` where it is torn."""
    if file.read(len(MAGIC)) != MAGIC:
        raise StepLogError("this is no step log, or one of another version")
    while head := file.read(_HEAD.size):
        if len(head) < _HEAD.size:
            raise TornStepLogError("the log ends within a record")
        kind, at_s, length, checksum = _HEAD.unpack(head)
        payload = file.read(length)
        if len(payload) < length:
            raise TornStepLogError("the log ends within a record")
        if _checksum(kind, at_s, payload) != checksum:
            raise StepLogError("a record is not what was written")
        yield Record(kind, at_s, payload)


def read_request(payload: bytes) -> Request:
    """Read a request back as it was when it came in."""
    reader = WireReader(payload)
    request_id, tenant, salt = reader.text(), reader.text(), reader.text()
    extra_keys = tuple(reader.text() for _ in range(reader.integer()))
    priority, arrival_s, tokens = reader.integer(), reader.number(), reader.column()
    scope = CacheScope(tenant, salt, extra_keys)
    return Request(request_id, tokens, read_sampling(reader), scope=scope, priority=priority, arrival_s=arrival_s)


def read_scheduler(payload: bytes, drafter: Drafter) -> Scheduler:
    """Make a scheduler, with its memory, of the settings in a log; the drafter is used if the run had one."""
    try:
        settings = json.loads(payload)
        spec = settings["spec"]
        spec["groups"] = tuple(KVGroup(tuple(group["layers"]), group["window"]) for group in spec["groups"])
        limits = settings["limits"]
        limits["eos_token_ids"] = tuple(limits["eos_token_ids"])
        return Scheduler(
            SchedulerConfig(**settings["scheduler"]),
            KVCacheManager(KVCacheSpec(**spec), MemoryConfig(**settings["memory"])),
            RequestLimits(**limits),
            eos_token_ids=frozenset(settings["eos"]),
            drafter=drafter if settings["drafts"] else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StepLogError(f"the settings in the log are not those of this version: {error}") from error


class Replayed(NamedTuple):
    """A record that has taken effect: what was planned, or what a step brought, where it is a record of that."""

    kind: bytes
    at_s: float
    scheduler: Scheduler
    plan: StepPlan | None = None
    outcome: StepOutcome | None = None


def replay(file: BinaryIO) -> int:
    """Feed a log to a new scheduler; return the number of plans, all equal to those logged to the byte.

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
    drafts = _LoggedDrafts()
    scheduler = read_scheduler(first.payload, drafts)
    num_plans = 0
    for kind, at_s, payload in records:
        if kind == PLANNED:
            drafts.plan = StepPlan.from_bytes(payload)
            plan = scheduler.schedule()
            if plan is None or plan.to_bytes() != payload:
                raise StepLogError(f"plan {num_plans} differs from the one logged")
            num_plans += 1
            yield Replayed(kind, at_s, scheduler, plan=plan)
        elif kind == COMPUTED:
            yield Replayed(kind, at_s, scheduler, outcome=scheduler.update(StepResult.from_bytes(payload)))
        elif kind == IDLED:
            if scheduler.schedule() is not None:
                raise StepLogError(f"plan {num_plans} was not made in the log")
            yield Replayed(kind, at_s, scheduler)
        else:
            _carry_out(kind, payload, scheduler)
            yield Replayed(kind, at_s, scheduler)


def _carry_out(kind: bytes, payload: bytes, scheduler: Scheduler) -> None:
    """Do what was asked of the scheduler between steps."""
    reader = WireReader(payload)
    if kind == ADDED:
        scheduler.add(read_request(payload))
    elif kind == ABORTED:
        scheduler.abort(payload.decode("utf-8", "surrogatepass"))
    elif kind == FAILED:
        scheduler.fail(reader.text(), reader.text())
    elif kind == STOPPED:
        scheduler.stop(reader.text(), reader.integer())
    elif kind == CLEARED:
        scheduler.memory.reset()
    elif kind in (LOST, OUT_OF_MEMORY):
        scheduler.lose_steps((ExecutionError if kind == LOST else OutOfMemoryError)(payload.decode()))
    else:
        raise StepLogError(f"a record of kind {kind!r} is unknown")
