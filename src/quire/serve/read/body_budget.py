"""The budget of bytes: how much the bodies of all calls may hold at once, and those of one tenant.

    a body is announced ──► require ──► bytes come ──► take, step by step ──► the call ends: release
                              │                         │
                              └──── no room: 503, or 429 where it is the tenant's own share that is full

The announced size is checked but not reserved, so a client that announces much and sends nothing takes no room from
others. What has come is held until the call ends, as prompts and messages are needed until then. The first bytes of
each body cost nothing, so small calls go on where large ones hold everything; how much that can be is bounded by the
number of connections.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from quire.core.errors import InvariantError
from quire.serve.errors import too_many_bytes, too_many_bytes_of_key

FREE_BYTES: Final = 16 << 10
"""Bytes of a body that cost nothing."""

RETRY_S: Final = 1.0


class BodyBudget:
    """Counts the bytes of bodies. Use it in one event loop; all operations but `check` are O(1)."""

    def __init__(self, max_bytes: int, max_tenant_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.max_tenant_bytes = max_tenant_bytes
        self._bodies: set[HeldBody] = set()
        self._held_of: Counter[str] = Counter()
        self._held = 0
        self.num_refused = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that are held now."""
        return self._held

    def open(self, tenant: str) -> HeldBody:
        """Return the body of a call, of which nothing has come yet."""
        return HeldBody(self, tenant)

    def check(self) -> None:
        """Raise `InvariantError` unless the counts are those of the bodies."""
        held: Counter[str] = Counter()
        for body in self._bodies:
            held[body.tenant] += body.num_counted
        if held != self._held_of or self._held != held.total() or any(count <= 0 for count in held.values()):
            raise InvariantError("the budget does not match the bytes of the bodies")

    def _require(self, tenant: str, num_bytes: int) -> None:
        has_share = self.max_tenant_bytes < self.max_bytes
        if has_share and self._held_of[tenant] + num_bytes > self.max_tenant_bytes:
            self.num_refused += 1
            raise too_many_bytes_of_key(self.max_tenant_bytes, RETRY_S)
        if self._held + num_bytes > self.max_bytes:
            self.num_refused += 1
            raise too_many_bytes(self.max_bytes, RETRY_S)


class HeldBody:
    """The bytes of one body."""

    __slots__ = ("_budget", "_num_bytes", "num_counted", "tenant")

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self._num_bytes = 0
        self.tenant = tenant
        self.num_counted = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that have come, those that cost nothing too."""
        return self._num_bytes

    def require(self, num_bytes: int) -> None:
        """Raise `ApiError` 429 or 503 if there is no room for this many more bytes now. Counts a refusal."""
        more = self._num_more(num_bytes)
        if more:
            self._budget._require(self.tenant, more)

    def take(self, num_bytes: int) -> None:
        """Hold more bytes; raises as `require` does. Mutates."""
        self.require(num_bytes)
        more = self._num_more(num_bytes)
        self._num_bytes += num_bytes
        if more:
            self.num_counted += more
            self._budget._bodies.add(self)
            self._budget._held_of[self.tenant] += more
            self._budget._held += more

    def release(self) -> None:
        """The call has ended: nothing is held any more. May be called twice. Mutates."""
        budget, counted = self._budget, self.num_counted
        self._num_bytes = self.num_counted = 0
        if counted:
            budget._bodies.remove(self)
            budget._held -= counted
            budget._held_of[self.tenant] -= counted
            if not budget._held_of[self.tenant]:
                del budget._held_of[self.tenant]

    def _num_more(self, num_bytes: int) -> int:
        return max(0, self._num_bytes + num_bytes - FREE_BYTES) - self.num_counted
