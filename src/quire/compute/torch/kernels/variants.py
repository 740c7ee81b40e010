"""KernelVariant: one form in which a kernel ships, and what its machine code must be like.

A Triton kernel is a template: types, constants, warps and stages make machine code of it. Beside its kernels each
module of this folder keeps a table `VARIANTS` of the forms that its launchers choose from. The compile gate
(`tests/gpu/compile_gate.py`) compiles them all for GPUs that need not be there, and holds them to this: a pipeline that
the compiler has quietly given up, a spilled register or a narrow load costs half the speed, and no result shows it.
What is launched is named `…_kernel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CAPABILITIES = (80, 90, 100)
"""Of the GPUs that variants are compiled for: A100, H100 and H200, B200."""


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """A kernel with everything that shapes its code.

    - `arguments`: Triton's type of each parameter that is no constant, as "*bf16", "i32" or "fp32"; with ":16" where it
      is known to be a multiple of 16 when it is launched (addresses from torch are, strides mostly). A parameter that
      is a NamedTuple has one of types, where None or a number stands for a member that is this constant.
    - `constants`: the others.
    - `num_buffers`: tiles that are in shared memory at once for each tensor that the loop reads ahead; None: it reads
      nothing ahead. The compiler's number must be this one, and loads must be under way while it computes.
    - `min_wide_share`: of the bytes that it loads, how many at least by 16 at a time; 0: not asked for.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, str | tuple[Any, ...]]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    num_buffers: int | None = None
    min_wide_share: float = 0.75
    capabilities: tuple[int, ...] = CAPABILITIES
