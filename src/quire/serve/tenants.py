"""Tenants: the owners of keys, and the cached blocks that their requests may hit.

    Authorization: Bearer KEY ──► Tenant ──► CacheScope(tenant, salt, the request's own salt)
    x-api-key: KEY ───────────────┘ on the paths of Anthropic's clients: messages and models

The server makes the salt: a keyed hash of the tenant's name, under a secret that is set or random. A client can add its
own salt, which separates its requests from others of the same tenant; it can never reach another tenant's blocks.
Without keys, all clients are one tenant without a name.

A key is compared with all keys in constant time, by digests of one length.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from quire.core.errors import InvalidConfigError, InvalidRequestError
from quire.core.request import DEFAULT_SCOPE, CacheScope
from quire.core.setting_checks import require_int
from quire.core.validate import MAX_PRIORITY, MAX_SALT_LENGTH
from quire.serve.config import ServerConfig, require_key
from quire.serve.model_names import same_model

DIGEST_BYTES: Final = 16
MAX_NAME_LENGTH: Final = 64
FIELDS: Final = ("name", "key", "max_sequences", "best_priority", "operator", "persist", "models")


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of keys. `max_sequences`: maximum concurrent sequences of its requests; None: no limit.

    `best_priority`: the lowest priority number that its requests may have; lower numbers are served sooner.
    `is_operator`: may see all tenants' requests and memory. `models`: models and adapters that it may use; None: all.
    """

    name: str
    scope: CacheScope
    max_sequences: int | None = None
    is_operator: bool = False
    best_priority: int = 0
    models: tuple[str, ...] | None = None

    def may_call(self, name: str) -> bool:
        """Return whether it may call a model or an adapter by a name. Does not mutate."""
        return self.models is None or any(same_model(name, each) for each in self.models)

    def scope_for(self, cache_salt: str | None) -> CacheScope:
        """Return the scope of a request: the tenant's scope, narrowed by the request's own salt if it has one.

        >>> ANYBODY.scope_for(None) == ANYBODY.scope, ANYBODY.scope_for("mine") == ANYBODY.scope_for("yours")
        (True, False)
        """
        if cache_salt is None:
            return self.scope
        if not isinstance(cache_salt, str) or not 1 <= len(cache_salt) <= MAX_SALT_LENGTH:
            allowed = f"a string of 1 to {MAX_SALT_LENGTH} characters"
            raise InvalidRequestError("cache_salt", cache_salt, allowed)
        return replace(self.scope, extra_keys=(_digest(cache_salt),))

    def priority_for(self, wanted: int | None) -> int:
        """Return the priority of a request; raises `InvalidRequestError` if it is better than `best_priority`.

        >>> Tenant("batch", DEFAULT_SCOPE, best_priority=5).priority_for(None), ANYBODY.priority_for(-7)
        (5, -7)
        """
        if wanted is None:
            return max(self.best_priority, 0)
        if wanted < self.best_priority:
            raise InvalidRequestError("priority", wanted, f"{self.best_priority} or more with this API key")
        return wanted


ANYBODY: Final = Tenant("", DEFAULT_SCOPE, is_operator=True, best_priority=-MAX_PRIORITY)
"""The tenant of all clients if no keys are set."""


class Tenants:
    """The keys of a server. Immutable."""

    def __init__(self, keys: Mapping[str, Tenant]) -> None:
        self._keys = tuple((_key_digest(key.encode("ascii")), tenant) for key, tenant in keys.items())

    @property
    def each(self) -> Collection[Tenant]:
        """The tenants, each once."""
        return {tenant.name: tenant for _, tenant in self._keys}.values()

    @property
    def has_keys(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._keys)

    def find(self, key: bytes) -> Tenant | None:
        """Return the tenant of a key, or None. Takes the same time for any key: O(keys).

        >>> bob = Tenant("bob", DEFAULT_SCOPE)
        >>> tenants = Tenants({"sesame": bob})
        >>> tenants.find(b"sesame") is bob, tenants.find(b"Sesame")
        (True, None)
        """
        found, digest = None, _key_digest(key)
        for known, tenant in self._keys:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def read_tenants(config: ServerConfig, random_secret: bytes) -> Tenants:
    """Return the configured tenants; reads the keys file, if there is one.

    Salts derive from `random_secret` unless `tenant_secret` is set.
    """
    secret = random_secret if config.tenant_secret is None else config.tenant_secret.encode()
    limit = config.max_sequences_per_key
    keys: dict[str, Tenant] = {}
    for index, key in enumerate(config.api_key, start=1):
        name = f"key-{index}"
        is_alone = not config.may_have_several_tenants
        best_priority = -MAX_PRIORITY if is_alone else 0  # a lone tenant competes only with itself
        keys[key] = Tenant(name, _scope(name, secret, persist=is_alone), limit, is_alone, best_priority)
    if config.api_keys_file is None:
        return Tenants(keys)
    names = {tenant.name for tenant in keys.values()}
    for index, entry in enumerate(_read_entries(config.api_keys_file)):
        where = f"api_keys_file[{index}]"
        own_keys, tenant = _read_entry(where, entry, secret)
        if tenant.name in names:
            raise InvalidConfigError(f"{where}.name", tenant.name, "a name that no other tenant uses")
        names.add(tenant.name)
        if tenant.max_sequences is None:
            tenant = replace(tenant, max_sequences=limit)
        for key in own_keys:
            if key in keys:
                raise InvalidConfigError(f"{where}.key", "a key that is already used", "each key once")
            keys[key] = tenant
    return Tenants(keys)


def _scope(name: str, secret: bytes, *, persist: bool) -> CacheScope:
    key = hashlib.blake2b(secret, digest_size=hashlib.blake2b.MAX_KEY_SIZE).digest()
    salt = hashlib.blake2b(name.encode(), key=key, digest_size=DIGEST_BYTES).hexdigest()
    return CacheScope(name, salt, persist=persist)


def _key_digest(key: bytes) -> bytes:
    return hashlib.blake2b(key).digest()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).hexdigest()


def _read_entries(path: str) -> list[Any]:
    import yaml  # needed only for a keys file

    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError):  # the error would show the file's content
        raise InvalidConfigError("api_keys_file", path, "a file of YAML in UTF-8") from None
    except OSError as error:
        raise InvalidConfigError("api_keys_file", path, f"a file that can be read: {error.strerror}") from None
    if not isinstance(entries, list) or not entries:
        raise InvalidConfigError("api_keys_file", path, f"a list of tenants, each with {', '.join(FIELDS)}")
    return entries


def _read_entry(where: str, entry: object, secret: bytes) -> tuple[list[str], Tenant]:
    """Return a tenant and its keys. It can have several keys, so that keys can be rotated without a break.

    Errors never show texts of the file, because a key may be in the wrong place.
    """
    if not isinstance(entry, dict):
        raise InvalidConfigError(where, f"a {type(entry).__name__}", f"a tenant, with {', '.join(FIELDS)}")
    for place, field in enumerate(entry, start=1):
        if field not in FIELDS:
            raise InvalidConfigError(where, f"a tenant whose field {place} is unknown", f"only {', '.join(FIELDS)}")
    name, limit, is_operator = entry.get("name"), entry.get("max_sequences"), entry.get("operator", False)
    persist = entry.get("persist", False)
    for field, value in (("operator", is_operator), ("persist", persist)):
        if not isinstance(value, bool):
            raise InvalidConfigError(f"{where}.{field}", _shown(value), "true or false")
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= MAX_NAME_LENGTH:
        raise InvalidConfigError(f"{where}.name", _shown(name), f"1 to {MAX_NAME_LENGTH} printable characters")
    if limit is not None:
        require_int(f"{where}.max_sequences", _shown(limit), 1, 1 << 40)
    best_priority = entry.get("best_priority", 0)
    require_int(f"{where}.best_priority", _shown(best_priority), -MAX_PRIORITY, MAX_PRIORITY)
    keys = entry.get("key")
    keys = keys if isinstance(keys, list) else [keys]
    if not keys:
        raise InvalidConfigError(f"{where}.key", [], "one key, or a list of them")
    models = entry.get("models")
    if models is not None:
        models = tuple(models) if isinstance(models, list) else (models,)
        if not models or not all(isinstance(each, str) and each for each in models):
            raise InvalidConfigError(f"{where}.models", _shown(entry["models"]), "a name, or a list of names")
    tenant = Tenant(name, _scope(name, secret, persist=persist), limit, is_operator, best_priority, models)
    return [require_key(f"{where}.key", key) for key in keys], tenant


def _shown(value: object) -> object:
    """Return a value as an error may show it: a number, which cannot be a key, or the kind of any other value."""
    if isinstance(value, str):
        return f"a text of {len(value)} characters"
    return value if isinstance(value, int | float | None) else f"a {type(value).__name__}"
