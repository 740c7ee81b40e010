"""KernelVariant: one compiled form of a kernel, and requirements for its machine code.

A Triton kernel is a template: types, constants, warps and stages turn it into machine code. Next to its kernels, each
module of this folder has a table `VARIANTS` of the forms that its launchers choose from. The compile gate
(`tests/gpu/compile_gate.py`) compiles them all for GPUs that the machine need not have, and checks the requirements: a
pipeline that the compiler has silently given up, a spilled register or a narrow load costs half the speed, and no
result shows it. Kernels that are launched are named `…_kernel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CAPABILITIES = (80, 90, 100)
"""The GPUs that variants are compiled for: A100, H100 and H200, B200."""


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """A kernel with everything that shapes its code.

    - `arguments`: Triton's type of each parameter that is not a constant, such as "*bf16", "i32" or "fp32"; with ":16"
      if its value at launch is a known multiple of 16 (addresses from torch are, and most strides). A NamedTuple
      parameter has a tuple of types, with None or a number for a member that is this constant.
    - `constants`: the other parameters.
    - `num_buffers`: tiles in shared memory at once for each tensor that the loop reads ahead; None: it reads nothing
      ahead. The compiler must use this number, and loads must run while it computes.
    - `fuses`: whether products and sums may be rounded once, together; if not, no instruction may do that.
    - `min_wide_share`: the least share of loaded bytes to load 16 at a time; 0: no requirement.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, str | tuple[Any, ...]]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    num_buffers: int | None = None
    min_wide_share: float = 0.75
    fuses: bool = True
    capabilities: tuple[int, ...] = CAPABILITIES
