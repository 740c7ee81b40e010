"""Residency: decides which models are loaded, within one memory budget. `ModelSet` loads them.

    call ── admits? ── yes ──► stay ──► end of the stay, and after keep-alive without one: unload
              └─ no ──► waits ──► its model's turn: is there room? ── yes ──► load ──► all calls that wait for it stay
                                                       └─ no ──► unload idle models, least recently used first;
                                                                 if that is not enough, let busy ones drain

Models that do not fit together must not displace each other with every call. So a loaded model keeps its place for
`MIN_RESIDENCY_S`, whatever waits. After that, if a waiting model needs the room, the loaded one admits no new calls: it
finishes its running calls and is unloaded, and new calls for it wait their turn. One model at a time is loaded or
unloaded.

Waiting models are loaded in the order of their first calls, but tenants take turns: a tenant that calls ten models
delays another tenant's model by a single load.

Time comes from a clock and nothing waits in here, so tests can replay any sequence from a seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from quire.core.clock import Clock
from quire.core.errors import InvariantError

MIN_RESIDENCY_S: Final = 5.0
"""A loaded model keeps its place at least this long, so two models that share memory alternate every few seconds."""


class Phase(Enum):
    """The phase of a model."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@dataclass(frozen=True, slots=True)
class Load:
    """Load this model now: it fits."""

    name: str


@dataclass(frozen=True, slots=True)
class Unload:
    """Unload this model now: it has no calls."""

    name: str


@dataclass(slots=True)
class _Resident:
    """A model: its memory, its phase, and its calls."""

    name: str
    num_bytes: int
    keep_alive_s: float
    phase: Phase = Phase.UNLOADED
    num_stays: int = 0
    loaded_s: float = 0.0
    used_s: float = 0.0
    waiting: Counter[str] = field(default_factory=Counter)  # calls, by tenant
    arrival: int = 0  # of the first waiting call
    is_lost: bool = False  # its engine is gone for good

    @property
    def expires_s(self) -> float:
        """The time at which it is unloaded without another call."""
        return self.used_s + self.keep_alive_s


class Residency:
    """The models of a server. `sizes`: their memory by name, cut to the budget; `keep_alive_s` may be infinite."""

    def __init__(self, clock: Clock, budget_bytes: int, sizes: Mapping[str, int], keep_alive_s: float) -> None:
        self._clock = clock
        self.budget_bytes = budget_bytes
        self._keep_alive_s = keep_alive_s
        self._residents = {name: _Resident(name, min(size, budget_bytes), keep_alive_s) for name, size in sizes.items()}
        self._next: _Resident | None = None  # the model whose turn it is
        self._leaving: set[str] = set()  # models that drain to make room for it
        self._num_arrivals = 0
        self._turns: dict[str, int] = {}  # by tenant: when a model was last loaded for it

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """The memory of all models that are not unloaded."""
        return sum(each.num_bytes for each in self._residents.values() if each.phase is not Phase.UNLOADED)

    @property
    def num_waiting(self) -> int:
        """Calls that wait for a model."""
        return sum(each.waiting.total() for each in self._residents.values())

    def num_waiting_of(self, tenant: str) -> int:
        """Return the number of a tenant's calls that wait for a model. Does not mutate."""
        return sum(each.waiting[tenant] for each in self._residents.values())

    def phase(self, name: str) -> Phase:
        """Return a model's phase. Does not mutate."""
        return self._residents[name].phase

    def expires_in_s(self, name: str) -> float:
        """Return how long a loaded model will stay without another call. Does not mutate."""
        each = self._residents[name]
        return each.keep_alive_s if each.num_stays else max(each.expires_s - self._clock.now(), 0.0)

    def admits(self, name: str) -> bool:
        """Return whether a model admits calls now. Does not mutate."""
        each = self._residents[name]
        return each.phase is Phase.LOADED and not each.is_lost and name not in self._leaving

    # ---- calls ------------------------------------------------------------------------------------------------------

    def wait(self, name: str, tenant: str) -> None:
        """Note that a call waits for a model. Mutates."""
        each = self._residents[name]
        if not each.waiting:
            self._num_arrivals += 1
            each.arrival = self._num_arrivals
        each.waiting[tenant] += 1

    def stop_waiting(self, name: str, tenant: str) -> None:
        """Note that a call no longer waits, because it left or was admitted. Mutates."""
        each = self._residents[name]
        each.waiting[tenant] -= 1
        if each.waiting[tenant] < 0:
            raise InvariantError(f"no call of this tenant waits for {name}")
        each.waiting += Counter()  # drops zero counts
        self._choose_next()

    def begin(self, name: str) -> None:
        """Note that a model has admitted a call. Mutates."""
        if not self.admits(name):
            raise InvariantError(f"{name} admits no call")
        each = self._residents[name]
        each.num_stays += 1
        each.used_s = self._clock.now()

    def end(self, name: str) -> None:
        """Note that a call has ended. Mutates."""
        each = self._residents[name]
        if each.num_stays <= 0:
            raise InvariantError(f"{name} has no calls")
        each.num_stays -= 1
        each.used_s = self._clock.now()

    def keep(self, name: str, seconds: float) -> None:
        """Set how long a model stays after its last call; holds until it is unloaded. Mutates."""
        self._residents[name].keep_alive_s = seconds

    # ---- models -----------------------------------------------------------------------------------------------------

    def next_step(self) -> Load | Unload | None:
        """Return the next load or unload and count it as begun, or None if there is nothing to do. Mutates."""
        if any(each.phase in (Phase.LOADING, Phase.UNLOADING) for each in self._residents.values()):
            return None
        self._choose_next()
        wanted, now = self._next, self._clock.now()
        for each in self._residents.values():
            if each.is_lost and each.phase is Phase.LOADED and not each.num_stays:
                return self._unload(each)
        if wanted is None:
            return self._unload_expired(now)
        if self._lacking_bytes(wanted) <= 0:
            turn = max(self._turns.values(), default=0) + 1
            self._turns |= dict.fromkeys(wanted.waiting, turn)
            self._leaving, wanted.phase = set(), Phase.LOADING
            return Load(wanted.name)
        leaving = self._making_room(wanted, now)
        self._leaving = {each.name for each in leaving}
        empty = next((each for each in leaving if not each.num_stays), None)
        return self._unload_expired(now) if empty is None else self._unload(empty)

    def note_loaded(self, name: str) -> None:
        """Note that a model has been loaded. Mutates."""
        each = self._require(name, Phase.LOADING)
        each.phase = Phase.LOADED
        each.loaded_s = each.used_s = self._clock.now()
        self._choose_next()

    def note_lost(self, name: str) -> None:
        """Note that a loaded model's engine is gone for good: it admits no calls until it is loaded again. Mutates."""
        self._residents[name].is_lost = True

    def note_unloaded(self, name: str) -> None:
        """Note that a model was unloaded, or could not be loaded. Mutates."""
        each = self._require(name, Phase.LOADING, Phase.UNLOADING)
        each.phase, each.is_lost, each.keep_alive_s = Phase.UNLOADED, False, self._keep_alive_s
        self._choose_next()

    def next_look_s(self) -> float | None:
        """Return the earliest time at which `next_step` may have more to do if nothing else happens; None: never."""
        loaded = [each for each in self._residents.values() if each.phase is Phase.LOADED]
        times = [each.expires_s for each in loaded if not each.num_stays and each.expires_s < math.inf]
        if self._next is not None:
            now = self._clock.now()
            times += [end for each in loaded if (end := each.loaded_s + MIN_RESIDENCY_S) > now]
        return min(times, default=None)

    def check(self) -> None:
        """Raise `InvariantError` unless the state is consistent."""
        if self.used_bytes > self.budget_bytes:
            raise InvariantError(f"models take {self.used_bytes} bytes of {self.budget_bytes}")
        for each in self._residents.values():
            if each.num_stays and each.phase is not Phase.LOADED:
                raise InvariantError(f"{each.name} has calls, but is {each.phase.value}")
            if any(count <= 0 for count in each.waiting.values()):
                raise InvariantError(f"a count of calls that wait for {each.name} is not positive")
        if self._leaving and self._next is None:
            raise InvariantError("models drain, but no model needs the room")

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _choose_next(self) -> None:
        """Keep the model whose turn it is while calls wait for it; then choose another. Mutates."""
        wanted = self._next
        if wanted is not None and wanted.waiting and wanted.phase in (Phase.UNLOADED, Phase.LOADING):
            return
        waiting = [each for each in self._residents.values() if each.waiting and each.phase is Phase.UNLOADED]
        self._next = min(waiting, key=self._turn, default=None)
        self._leaving = set()

    def _turn(self, each: _Resident) -> tuple[int, int]:
        return min(self._turns.get(tenant, 0) for tenant in each.waiting), each.arrival

    def _lacking_bytes(self, wanted: _Resident) -> int:
        return wanted.num_bytes - (self.budget_bytes - self.used_bytes)

    def _making_room(self, wanted: _Resident, now: float) -> list[_Resident]:
        """Return the models past `MIN_RESIDENCY_S` to unload: only idle ones, if they are enough."""
        lacking = self._lacking_bytes(wanted)
        over = [
            each
            for each in self._residents.values()
            if each.phase is Phase.LOADED and now >= each.loaded_s + MIN_RESIDENCY_S
        ]
        idle = _enough([each for each in over if not each.num_stays], lacking)
        if idle:
            return idle
        # Models that drain already keep draining: choosing others would delay the waiting one.
        return _enough(over, lacking, first=self._leaving)

    def _unload_expired(self, now: float) -> Unload | None:
        for each in self._residents.values():
            is_idle = each.phase is Phase.LOADED and not each.num_stays
            if is_idle and now >= each.expires_s:
                return self._unload(each)
        return None

    def _unload(self, each: _Resident) -> Unload:
        each.phase = Phase.UNLOADING
        self._leaving.discard(each.name)
        return Unload(each.name)

    def _require(self, name: str, *phases: Phase) -> _Resident:
        each = self._residents[name]
        if each.phase not in phases:
            raise InvariantError(f"{name} is {each.phase.value}")
        return each


def _enough(models: list[_Resident], lacking_bytes: int, first: Collection[str] = ()) -> list[_Resident]:
    """Return the least recently used models that together hold this many bytes; none if all together hold less."""
    chosen: list[_Resident] = []
    for each in sorted(models, key=lambda each: (each.name not in first, bool(each.num_stays), each.used_s)):
        if sum(other.num_bytes for other in chosen) < lacking_bytes:
            chosen.append(each)
    if sum(each.num_bytes for each in chosen) < lacking_bytes:
        return []
    for each in list(chosen):  # a large model chosen late may be enough without earlier ones
        if sum(other.num_bytes for other in chosen) - each.num_bytes >= lacking_bytes:
            chosen.remove(each)
    return chosen
