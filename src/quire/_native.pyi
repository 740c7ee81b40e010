"""The compiled core of quire, built from native/."""

from typing import Literal

def cpu_features() -> dict[str, bool]:
    """What the processor and the operating system let a kernel use, by name."""

def instruction_set() -> Literal["portable", "avx2", "avx512", "amx"]:
    """The best form of the kernels here: portable, avx2, avx512 or amx."""
