"""LivePlaces: how many clients may watch, so that no tenant takes the places of others.

Every tenant has the same share. One place is kept for operators, who are bounded only by all places together.

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
    """Readers at once: of all, of all tenants that are not operators, and of one of them."""

    num_places: int
    num_for_tenants: int
    num_per_tenant: int

    def require(self, tenant: Tenant, watching: Collection[Tenant]) -> None:
        """Raise `ApiError` where a tenant finds no place among those who watch. Does not mutate."""
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
    """What the watches over all models of a server share, kept up to date by them.

    `watching`: the tenants of all readers, whichever model they watch. `served`: for each model, what returns the name
    by which a tenant may call it; "": by none.
    """

    places: LivePlaces
    watching: list[Tenant] = field(default_factory=list)
    served: list[Callable[[Tenant], str]] = field(default_factory=list)
