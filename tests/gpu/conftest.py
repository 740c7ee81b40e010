"""Where the tests of the GPU engine run: on a GPU where there is one, else in Triton's interpreter.

The interpreter carries kernels out on the CPU, with numpy. It takes their place when they are imported, so that is
decided here, before any of them is. In it a product (`tl.dot`) of bfloat16 is garbage, without a word: test float32
and float16 there.
"""

from __future__ import annotations

import os
from functools import cache
from math import prod
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


def _remember_types() -> None:
    """Make each type of Triton's language once: its interpreter makes those of both operands anew in each operation."""
    from triton.language import core
    from triton.runtime import interpreter

    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    in_numpy: dict[str, Any] = {}
    make_block, find_in_numpy = core.block_type.__init__, interpreter._get_np_dtype

    def block(self: Any, element_type: Any, shape: Any) -> None:
        key = (element_type.name, *[getattr(side, "value", side) for side in shape])
        if key not in blocks:
            make_block(self, element_type, shape)
            blocks[key] = {**vars(self)}
        vars(self).update(blocks[key])

    @cache
    def size(*shape: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(side) for side in shape]), core.constexpr(prod(shape))

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = size(*type.shape) if type.is_block() else size()

    def numpy_type(kind: Any) -> Any:
        if kind.name not in in_numpy:
            in_numpy[kind.name] = find_in_numpy(kind)
        return in_numpy[kind.name]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block, tensor, numpy_type


HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)  # tests run side by side, and their tensors are small
    _mend_interpreter()
    _remember_types()


@pytest.fixture(scope="session")
def device() -> str:
    """What torch calls the device that tests compute on."""
    return "cuda" if HAS_GPU else "cpu"
