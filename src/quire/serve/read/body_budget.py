"""The budget of bytes: how much the bodies of all requests, and of one tenant's requests, may hold at once.

    a body is announced ──► require ──► bytes arrive ──► take, step by step ──► the request ends: release
                              │                           │
                              └──── no room: 503, or 429 if the tenant's own share is full

The announced size is checked but not reserved, so a client that announces much and sends nothing takes no room from
others. Received bytes are held until the request ends, because prompts and messages are needed until then. The first
bytes of each body are free, so small requests still pass when large ones hold the whole budget; the number of
connections bounds the sum of free bytes. A second budget counts the pixels of images, which are more than their bytes:
a small image can become a dozen tiles.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from quire.core.errors import InvariantError
from quire.serve.errors import too_many_bytes, too_many_bytes_of_key

FREE_BYTES: Final = 16 << 10
"""The first bytes of a body, which are free."""

RETRY_S: Final = 1.0


class BodyBudget:
    """Counts the bytes of bodies. Use it in one event loop; all operations except `check` are O(1)."""

    def __init__(self, max_bytes: int, max_tenant_bytes: int, kind: str = "bodies") -> None:
        """Make a budget; `kind`: what is counted, in errors."""
        self.max_bytes = max_bytes
        self.max_tenant_bytes = max_tenant_bytes
        self.kind = kind
        self._bodies: set[HeldBody] = set()
        self._held_of: Counter[str] = Counter()
        self.held_bytes = 0
        self.num_refused = 0

    def open(self, tenant: str) -> HeldBody:
        """Return the empty body of a new request."""
        return HeldBody(self, tenant)

    def check(self) -> None:
        """Raise `InvariantError` unless the counts match the bodies."""
        held: Counter[str] = Counter()
        for body in self._bodies:
            held[body.tenant] += body.num_counted
        if held != self._held_of or self.held_bytes != held.total() or any(count <= 0 for count in held.values()):
            raise InvariantError("the budget does not match the bytes of the bodies")

    def _require(self, tenant: str, num_bytes: int) -> None:
        has_share = self.max_tenant_bytes < self.max_bytes
        if has_share and self._held_of[tenant] + num_bytes > self.max_tenant_bytes:
            self.num_refused += 1
            raise too_many_bytes_of_key(self.max_tenant_bytes, RETRY_S, self.kind)
        if self.held_bytes + num_bytes > self.max_bytes:
            self.num_refused += 1
            raise too_many_bytes(self.max_bytes, RETRY_S, self.kind)


class HeldBody:
    """The bytes of one body."""

    __slots__ = ("_budget", "num_bytes", "num_counted", "tenant")

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self.num_bytes = 0  # received, including free ones
        self.tenant = tenant
        self.num_counted = 0

    def require(self, num_bytes: int) -> None:
        """Raise `ApiError` 429 or 503 if there is no room for this many more bytes now. Counts a refusal."""
        more = self._num_more(num_bytes)
        if more:
            self._budget._require(self.tenant, more)

    def take(self, num_bytes: int) -> None:
        """Hold more bytes; raises like `require`. Mutates."""
        self.require(num_bytes)
        more = self._num_more(num_bytes)
        self.num_bytes += num_bytes
        if more:
            self.num_counted += more
            self._budget._bodies.add(self)
            self._budget._held_of[self.tenant] += more
            self._budget.held_bytes += more

    def release(self) -> None:
        """Free the bytes at the end of the request. May be called twice. Mutates."""
        budget, counted = self._budget, self.num_counted
        self.num_bytes = self.num_counted = 0
        if counted:
            budget._bodies.remove(self)
            budget.held_bytes -= counted
            budget._held_of[self.tenant] -= counted
            if not budget._held_of[self.tenant]:
                del budget._held_of[self.tenant]

    def _num_more(self, num_bytes: int) -> int:
        return max(0, self.num_bytes + num_bytes - FREE_BYTES) - self.num_counted
