"""Where the tests of the GPU engine run: on a GPU where there is one, else in Triton's interpreter.

The interpreter carries kernels out on the CPU, with numpy. It takes their place when they are imported, so that is
decided here, before any of them is. In it a product (`tl.dot`) of bfloat16 is garbage, without a word: test float32
and float16 there.
"""

from __future__ import annotations

import pytest
from tests.gpu.interpreter import interpret

try:
    import torch
except ImportError as error:
    raise pytest.UsageError(f"tests/gpu needs torch ({error}): run them by `make test-gpu`") from None


HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    interpret()
    torch.set_num_threads(1)  # tests run side by side, and their tensors are small


@pytest.fixture
def small_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave little room for tasks in recorded steps if kernels are interpreted: each unused one is a program too."""
    if not HAS_GPU:
        for name, count in (("SPARE_TASKS", 16), ("SPARE_USUAL", 8), ("SPARE_UNCUT", 8)):
            monkeypatch.setattr(f"quire.compute.torch.attention.triton.{name}", count)


@pytest.fixture(scope="session")
def device() -> str:
    """What torch calls the device that tests compute on."""
    return "cuda" if HAS_GPU else "cpu"
