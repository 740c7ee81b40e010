"""Where the tests of the GPU engine run: on a GPU where there is one, else in Triton's interpreter.

The interpreter carries kernels out on the CPU, with numpy. It takes their place when they are imported, so that is
decided here, before any of them is. In it a product (`tl.dot`) of bfloat16 is garbage, without a word: test float32
and float16 there.
"""

from __future__ import annotations

import os
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

try:
    import torch
except ImportError as error:
    raise pytest.UsageError(f"tests/gpu needs torch ({error}): run them by `make test-gpu`") from None


def _mend_interpreter() -> None:
    """Let an array of one bound a loop, as numpy did before 2.4, and compute each row of a product by itself.

    A matrix unit gives a row of a product the same bits wherever in a tile it stands; BLAS does not.

    And leave out what takes longer than to compute. At each launch and at each call of a function in a kernel, Triton
    looks through all of its language for what to replace; here nothing is compiled, so once is enough. It also computes
    sums and products of integers in 64 bits beside, for an assertion that only its debug mode asks.
    """
    from triton import language
    from triton.runtime import interpreter

    patch, patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor

    def patched_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: int(number.handle.data.item()))

    @cache
    def patch_all() -> SimpleNamespace:
        patch(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
        return SimpleNamespace(restore=lambda: None)

    def row_by_row(first: Any, second: Any, dtype: Any) -> Any:
        return np.matmul(first[..., None, :], second[..., None, :, :], dtype=dtype)[..., 0, :]

    interpreter._patch_lang_tensor = patched_tensor
    interpreter._patch_lang = lambda function: patch_all()
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.np = SimpleNamespace(**{**vars(np), "matmul": row_by_row})


HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)  # tests run side by side, and their tensors are small
    _mend_interpreter()


@pytest.fixture(scope="session")
def device() -> str:
    """What torch calls the device that tests compute on."""
    return "cuda" if HAS_GPU else "cpu"
