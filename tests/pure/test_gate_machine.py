"""The gate against a plain list of calls: who comes in, who is told to wait, and by which rule, in any order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.core.clock import ManualClock
from quire.core.request import CacheScope
from quire.engine.records.stats import ModelState
from quire.serve.errors import ApiError
from quire.serve.gate import Gate, Refusal, Visit
from quire.serve.gate_limits import GateLimits
from quire.serve.tenants import Tenant

TENANTS = (Tenant("a", CacheScope("a")), Tenant("b", CacheScope("b"), max_sequences=3), Tenant("c", CacheScope("c")))


@dataclass
class Call:
    """What the model knows of a call that came in."""

    visit: Visit
    tenant: str
    sequences: int
    tokens: int
    is_waiting: bool = True
    has_left: bool = False


class GateMachine(RuleBasedStateMachine):
    """Plays calls of three tenants; one of them may have three sequences at once."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.state = ModelState.READY
        self.is_draining = False
        self.refused: dict[Refusal, int] = {}
        self.for_want_of_a_place: dict[str, int] = {}

    @initialize(sequences=st.integers(1, 9), tokens=st.integers(1, 60), has_tenants=st.booleans())
    def open(self, sequences: int, tokens: int, has_tenants: bool) -> None:
        self.limits = GateLimits(sequences, tokens, has_tenants=has_tenants)
        self.gate = Gate(ManualClock(), self.limits, lambda: self.state)

    @property
    def inside(self) -> list[Call]:
        return [call for call in self.calls if not call.has_left]

    @property
    def waiting(self) -> list[Call]:
        return [call for call in self.inside if call.is_waiting]

    def expected_refusal(self, tenant: Tenant, sequences: int, tokens: int) -> Refusal | None:
        """The rules, as the head of the module has them, over a list of all calls."""
        if self.is_draining:
            return Refusal.DRAINING
        if self.state is not ModelState.READY:
            return Refusal.ENGINE
        of_key = sum(call.sequences for call in self.inside if call.tenant == tenant.name)
        if tenant.max_sequences is not None and of_key and of_key + sequences > tenant.max_sequences:
            return Refusal.KEY_LIMIT
        own = [call for call in self.waiting if call.tenant == tenant.name]
        if not own:
            return None
        counted = [*self.waiting, *(own if self.limits.has_tenants else [])]
        is_full = (
            sum(call.sequences for call in counted) + sequences > self.limits.max_queued_sequences
            or sum(call.tokens for call in counted) + tokens > self.limits.max_queued_tokens
        )
        return Refusal.QUEUE_FULL if is_full else None

    @rule(tenant=st.sampled_from(TENANTS), sequences=st.integers(1, 4), tokens=st.integers(0, 40))
    def enter(self, tenant: Tenant, sequences: int, tokens: int) -> None:
        expected = self.expected_refusal(tenant, sequences, tokens)
        try:
            visit = self.gate.enter(tenant, sequences, tokens)
        except ApiError as error:
            assert expected is not None
            assert error.status == (429 if expected is Refusal.KEY_LIMIT else 503)
            assert int(error.headers["retry-after"]) >= 1
            self.refused[expected] = self.refused.get(expected, 0) + 1
            if expected in (Refusal.KEY_LIMIT, Refusal.QUEUE_FULL):
                self.for_want_of_a_place[tenant.name] = self.for_want_of_a_place.get(tenant.name, 0) + 1
        else:
            assert expected is None
            self.calls.append(Call(visit, tenant.name, sequences, tokens))

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), tokens=st.integers(0, 40))
    def correct(self, data: Any, tokens: int) -> None:
        call = data.draw(st.sampled_from(self.calls))
        call.visit.correct(tokens)
        call.tokens = tokens

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def begin(self, data: Any) -> None:
        call = data.draw(st.sampled_from(self.calls))
        call.visit.begin()
        call.is_waiting = False

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        call = data.draw(st.sampled_from(self.calls))
        call.visit.leave()
        call.has_left = True

    @rule(state=st.sampled_from([ModelState.READY, ModelState.READY, ModelState.STARTING, ModelState.FAILED]))
    def turn(self, state: ModelState) -> None:
        self.state = state

    @precondition(lambda self: len(self.calls) > 6)
    @rule()
    def drain(self) -> None:
        self.gate.drain()
        self.is_draining = True

    @invariant()
    def counts_are_those_of_the_calls(self) -> None:
        if not hasattr(self, "gate"):
            return
        gate = self.gate
        gate.check()
        assert gate.num_waiting_sequences == sum(call.sequences for call in self.waiting)
        assert gate.num_waiting_tokens == sum(call.tokens for call in self.waiting)
        assert (gate.num_visits, gate.num_sequences) == (
            len(self.inside),
            sum(call.sequences for call in self.inside),
        )
        for tenant in TENANTS:
            visits = [call.visit for call in self.inside if call.tenant == tenant.name]
            assert {id(visit) for visit in gate.visits_of(tenant)} == {id(visit) for visit in visits}
        assert dict(gate.refusals) == self.refused
        assert dict(gate.refusals_of) == self.for_want_of_a_place
        assert gate.is_ready == (not self.is_draining and self.state is ModelState.READY)
        assert (gate.closed() is None) == gate.is_ready


TestGate = GateMachine.TestCase
