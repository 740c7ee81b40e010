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
    _remember_operands()


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
    interpreter._patch_attr = _patch_attribute
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
            blocks[key] = {**vars(self), "size": size(*self.shape)}
        vars(self).update(blocks[key])

    def size(*shape: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(side) for side in shape]), core.constexpr(prod(shape))

    single = size()

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.size if type.is_block() else single

    def numpy_type(kind: Any) -> Any:
        if kind.name not in in_numpy:
            in_numpy[kind.name] = find_in_numpy(kind)
        return in_numpy[kind.name]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block, tensor, numpy_type
    interpreter.TensorHandle.__post_init__ = lambda self: None  # it compares sizes of types in bits


def _patch_attribute(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Replace an operation of Triton's language by one that finds its meaning in the interpreter."""
    from triton.runtime.interpreter import TritonSemantic

    semantic, function = TritonSemantic(builder), getattr(member, "__wrapped__", member)

    def called(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return function(*arguments, **named)

    scope.set_attr(place, name, called)


def _remember_operands() -> None:
    """Find the types of two operands once for each pair, and leave it to numpy to repeat the smaller of two blocks.

    Triton finds them again for each operation: what numbers become, the type of both, the shape that both are repeated
    to. Only what it allows is remembered.
    """
    from triton.language.core import tensor
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import TensorHandle

    find, repeat = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    plans: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def key_of(operand: Any) -> Any:
        return operand.type.name if isinstance(operand, tensor) else (type(operand), operand)

    def plan_of(semantic: Any, operand: Any, type: Any) -> tuple[Any, Any]:
        """Return the type of an operand, and a number's handle: of a single one, whatever its type."""
        number = None if isinstance(operand, tensor) else semantic.scalar_constant(operand, type.scalar).handle
        return type, number

    def as_planned(semantic: Any, operand: Any, type: Any, number: Any) -> Any:
        if number is None:
            if operand.type.name == type.name:
                return operand
            number = semantic.cast(operand, type.scalar).handle
        return tensor(number, type)

    def operands(self: Any, left: Any, right: Any, *options: bool, **named: bool) -> tuple[Any, Any]:
        key = (key_of(left), key_of(right), options, *named.items())
        if key not in plans:
            first, second = find(self, left, right, *options, **named)
            plans[key] = *plan_of(self, left, first.type), *plan_of(self, right, second.type)
        plan = plans[key]
        return as_planned(self, left, *plan[:2]), as_planned(self, right, *plan[2:])

    def repeated(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        key = left.type.name, right.type.name
        if key not in plans:
            plans[key] = tuple(each.type for each in repeat(self, left, right))
        return in_full(left, plans[key][0]), in_full(right, plans[key][1])

    def in_full(operand: Any, type: Any) -> Any:
        if operand.type.name == type.name:
            return operand
        return tensor(TensorHandle(np.broadcast_to(operand.handle.data, type.shape.values), type.scalar), type)

    TritonSemantic.broadcast_impl_value = repeated
    TritonSemantic.binary_op_type_checking_impl = operands


if __name__ == "__main__":
    interpret()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
