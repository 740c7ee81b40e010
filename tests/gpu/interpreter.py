"""Triton's interpreter, mended for kernels of quire: for tests, and to try a command where there is no GPU.

PYTHONPATH=src python -m tests.gpu.interpreter MODULE [ARGUMENT ...]    as `python -m`, with kernels interpreted
"""

from __future__ import annotations

import os
import runpy
import sys
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np


def interpret() -> None:
    """Let kernels that are imported from now on be interpreted. Changes this process."""
    os.environ["TRITON_INTERPRET"] = "1"
    _mend_interpreter()
    _remember_types()


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


if __name__ == "__main__":
    interpret()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
