"""LivePlaces: how many clients may read /live, so that no tenant takes the places of others.

Every tenant has the same share. One place is reserved for operators, whose only limit is the total.

>>> from quire.core.request import DEFAULT_SCOPE
>>> ada, bob, owner = (Tenant(name, DEFAULT_SCOPE, is_operator=name == "owner") for name in ("ada", "bob", "owner"))
>>> live_places(7, [ada, bob, owner])
LivePlaces(num_places=7, num_for_tenants=6, num_per_tenant=3)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from quire.serve.errors import too_many_readers, too_many_readers_of_key
from quire.serve.tenants import Tenant


@dataclass(frozen=True, slots=True)
class LivePlaces:
    """Limits of concurrent readers: in total, for all tenants that are not operators, and for each such tenant."""

    num_places: int
    num_for_tenants: int
    num_per_tenant: int

    def require(self, tenant: Tenant, watching: Collection[Tenant]) -> None:
        """Raise `ApiError` if there is no place for another reader of a tenant. Does not mutate."""
        others = [each for each in watching if not each.is_operator]
        if not tenant.is_operator and sum(each.name == tenant.name for each in others) >= self.num_per_tenant:
            raise too_many_readers_of_key(self.num_per_tenant)
        if len(watching) >= self.num_places or (not tenant.is_operator and len(others) >= self.num_for_tenants):
            raise too_many_readers(self.num_places)


def live_places(num_places: int, tenants: Iterable[Tenant]) -> LivePlaces:
    """Return the places for the tenants of a server."""
    are_operators = [tenant.is_operator for tenant in tenants]
    num_for_tenants = max(num_places - any(are_operators), 0)
    return LivePlaces(num_places, num_for_tenants, max(num_for_tenants // max(are_operators.count(False), 1), 1))


@dataclass(frozen=True, slots=True)
class LiveShared:
    """Shared by the `Live` of each model of a server, which keep it up to date.

    `watching`: the tenants of the readers of all models. `served`: for each model, a function that returns the name by
    which a tenant may call it, or "".
    """

    places: LivePlaces
    watching: list[Tenant] = field(default_factory=list)
    served: list[Callable[[Tenant], str]] = field(default_factory=list)
