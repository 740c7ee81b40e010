"""The size of an installation: quire's files and its dependencies in this environment."""

from __future__ import annotations

import re
from importlib import metadata, util
from pathlib import Path

import quire

BESIDE = "numpy"
"""Not counted: nearly every Python installation for computing has it."""

NAME = re.compile(r"[A-Za-z0-9._-]+")


def installed_bytes() -> dict[str, int]:
    """Return the bytes of quire and of each required distribution except numpy, by name."""
    needed = _requirements("quire", {"quire", BESIDE}) - {"quire", BESIDE}
    return {"quire": _own_bytes()} | {name: _bytes_of(metadata.distribution(name)) for name in sorted(needed)}


def _own_bytes() -> int:
    """Return the bytes of the package and the compiled core, which is elsewhere if sources are used in place."""
    package = Path(quire.__file__).resolve().parent
    files = {path.resolve() for path in package.rglob("*") if path.is_file()}
    core = util.find_spec("quire._native")
    if core is not None and core.origin is not None:
        files.add(Path(core.origin).resolve())
    return sum(path.stat().st_size for path in files)


def _requirements(name: str, seen: set[str]) -> set[str]:
    """Return the names of all distributions that a distribution requires here, without extras. Mutates `seen`."""
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # for other systems or versions of Python
        return set()
    found = {name}
    for line in lines:
        requirement, _, marker = line.partition(";")
        match = NAME.match(requirement)
        wanted = "" if match is None else re.sub(r"[-_.]+", "-", match[0]).lower()
        if wanted and "extra" not in marker and wanted not in seen:
            seen.add(wanted)
            found |= _requirements(wanted, seen)
    return found


def _bytes_of(distribution: metadata.Distribution) -> int:
    files = (Path(str(file.locate())) for file in distribution.files or ())
    return sum(path.stat().st_size for path in files if path.is_file())
