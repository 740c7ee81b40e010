"""The identity of a store: everything that the bits of its blocks depend on.

Two engines may share blocks only if they compute the same bits. So the name of a store's folder is a digest of the
weights, the settings of the model, the engine with its instruction set, the form of the KV memory and `BITS`. Another
model, number type, block size or version has its own folder, and never sees a block of this store.

The weights are read once for the digest. `weights.json` keeps their digests, by path, size and time of change.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from quire.compute.backend import BackendFacts
from quire.compute.bits import BITS
from quire.compute.models import ModelDescription
from quire.core.errors import InvariantError
from quire.core.model_files import open_model_file

DIGESTS: Final = "weights.json"
MAX_DIGESTS_BYTES: Final = 1 << 20
READ_AT_ONCE: Final = 1 << 20


def identity_of(
    model: ModelDescription, facts: BackendFacts, digest: Callable[[Iterable[Path]], str]
) -> dict[str, object]:
    """Return everything that the bits of an engine's blocks depend on. `digest` computes that of weight files."""
    config = facts.config
    identity: dict[str, object] = {
        "bits": BITS,
        "quire": _version("quire"),
        "weights": digest(model.source.weight_paths()),
        "model": fingerprint({"spec": _plain(model.spec)}),
        "backend": facts.name,
        "instruction_set": facts.instruction_set,
        "dtype": facts.dtype,
        "weight_type": facts.weights,
        "block_types": list(facts.block_types),
        "kv": _plain(facts.kv_spec),
    }
    if model.vision is not None:
        identity["vision"] = fingerprint({"spec": _plain(model.vision)})
    if model.draft is not None:  # its keys and values are in the same blocks
        identity["draft"] = digest(model.draft.source.weight_paths())
        identity["draft_model"] = fingerprint({"spec": _plain(model.draft.spec)})
    if facts.name == "torch":
        identity["torch"] = [_version(name) for name in ("torch", "triton", "flashinfer")]
        identity["attention"] = [facts.device, config.attention_backend, config.batch_invariant]
    return identity


def fingerprint(identity: Mapping[str, object]) -> str:
    """Return the name of the folder for an identity. Pure.

    >>> fingerprint({"bits": 1}) == fingerprint({"bits": 1}) != fingerprint({"bits": 2})
    True
    """
    return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=12).hexdigest()


def weights_digest(paths: Iterable[Path], parent: Path) -> str:
    """Return a digest of the bytes of files, in order; reads only files that have changed."""
    known = _read_digests(parent / DIGESTS)
    whole, used = hashlib.blake2b(digest_size=16), {}
    for path in paths:
        key = _file_state(path)
        used[key] = known.get(key) or _file_digest(path)
        whole.update(bytes.fromhex(used[key]))
    if used.items() - known.items():
        _write_digests(parent / DIGESTS, known | used)
    return whole.hexdigest()


def files_digest(paths: Iterable[Path]) -> str:
    """Return a digest of the paths, sizes and modification times of files, without reading them."""
    return hashlib.blake2b("\n".join(map(_file_state, paths)).encode(), digest_size=16).hexdigest()


def _file_state(path: Path) -> str:
    status = os.stat(path)
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"


def _file_digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open_model_file(path) as file:
        while piece := file.read(READ_AT_ONCE):
            digest.update(piece)
    return digest.hexdigest()


def _read_digests(path: Path) -> dict[str, str]:
    """Return the kept digests; empty if their file cannot be read, or is not ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if os.fstat(descriptor).st_uid != os.geteuid():
                return {}
            found = json.loads(file.read(MAX_DIGESTS_BYTES))
        return {str(key): bytes.fromhex(value).hex() for key, value in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _write_digests(path: Path, digests: dict[str, str]) -> None:
    data = json.dumps(digests, indent=1).encode()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    if len(data) > MAX_DIGESTS_BYTES:
        return
    with suppress(OSError):  # the next start reads the weights again
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(partial, path)


def _plain(value: object) -> object:
    """Return a value in a JSON form that is the same in each process, unlike the order of a set."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return sorted([str(_plain(key)), _plain(each)] for key, each in value.items())
    if isinstance(value, Set):
        return sorted(str(_plain(each)) for each in value)
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise InvariantError(f"a setting of a model is a {type(value).__name__}, which has no fixed form")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
