"""The compiled core reports the machine honestly: against the kernel's own list of flags."""

import platform
from pathlib import Path

import pytest

from quire import _native

CPUINFO = Path("/proc/cpuinfo")

AVX2 = {"avx2", "fma", "f16c"}
AVX2_VNNI = AVX2 | {"avx_vnni"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
AVX512_BF16 = AVX512 | {"avx512_bf16", "avx512_vnni"}
AMX = AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"}  # the same names as in /proc/cpuinfo


def listed_flags() -> set[str]:
    if platform.machine() not in {"x86_64", "AMD64"}:
        return set()  # all of these are features of x86-64
    for line in CPUINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return set(value.split())
    pytest.fail("/proc/cpuinfo has no line of flags")


def test_names_and_types() -> None:
    features = _native.cpu_features()
    assert set(features) == AMX | AVX2_VNNI | {"pclmulqdq"}
    assert all(type(value) is bool for value in features.values())


def test_features_are_the_listed_flags() -> None:
    flags = listed_flags()
    features = _native.cpu_features()
    for name, present in features.items():
        if name.startswith("amx"):
            # A kernel may list AMX and yet refuse the tile registers to a process.
            assert name in flags or not present, name
        else:
            assert present == (name in flags), name


def test_instruction_set_follows_from_the_features() -> None:
    present = {name for name, value in _native.cpu_features().items() if value}
    if present >= AMX:
        expected = "amx"
    elif present >= AVX512_BF16:
        expected = "avx512_bf16"
    elif present >= AVX512:
        expected = "avx512"
    elif present >= AVX2_VNNI:
        expected = "avx2_vnni"
    elif present >= AVX2:
        expected = "avx2"
    else:
        expected = "portable"
    assert _native.instruction_set() == expected
