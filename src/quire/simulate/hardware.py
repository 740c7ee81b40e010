"""Hardware: the limits of a machine, as a plain value for predictions.

    name ──► machines/NAME.yaml ──┐
    path of a YAML or JSON file ──┼──► parse_hardware ──► Hardware ──► Roofline, planner, simulator
    measured by the caller ───────┘

The figures of a description are the vendor's peaks, dense and without overclocking, with their sources in `notes`: a
prediction from them is a bound, not the speed of an engine. A measured machine has measured figures. This module
measures nothing: that needs the compiled core, which the simulator does not import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from quire.core.byte_sizes import parse_bytes
from quire.core.errors import InvalidConfigError
from quire.core.setting_checks import require_int, require_number, require_one_of

MACHINES_FOLDER: Final = Path(__file__).parent / "machines"
DEVICES: Final = ("cpu", "cuda")
MAX_FILE_BYTES: Final = 100_000
WIDER: Final = MappingProxyType({"fp8": "bfloat16", "int8": "bfloat16", "float16": "bfloat16", "bfloat16": "float32"})
"""The dtype to which numbers are widened when they are read, if the machine cannot multiply them directly."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine, or an accelerator in one.

    - `read_bandwidth`: bytes per second read from its memory.
    - `matrix_rate`: additions and multiplications per second in matrix products, by dtype; float32 is required, and a
      missing dtype is widened.
    - `step_overhead_s`: the time of a step besides reading and computing.
    - `host_link_bandwidth`: bytes per second for swapping blocks, in one direction.
    - `link_bandwidth`: bytes per second between two such accelerators, in one direction; `exchange_s`: the time of an
      exchange besides its bytes. `num_ranks`: accelerators that compute each step together.
    - `device`: the default device of an engine on it: cpu, or cuda (a GPU).

    >>> card = Hardware("card", 16 << 30, 672e9, {"float32": 44e12, "bfloat16": 88e12})
    >>> card.rate("int8") == card.rate("bfloat16"), card.rate("float32")
    (True, 44000000000000.0)
    """

    name: str
    memory_bytes: int
    read_bandwidth: float
    matrix_rate: Mapping[str, float]
    step_overhead_s: float = 0.0
    host_link_bandwidth: float = 32e9
    device: str = "cpu"
    notes: str = ""
    link_bandwidth: float = 32e9
    exchange_s: float = 8e-6
    num_ranks: int = 1

    def __post_init__(self) -> None:
        for field in ("name", "notes"):
            if not isinstance(getattr(self, field), str):
                raise InvalidConfigError(field, getattr(self, field), "a text")
        require_int("memory_bytes", self.memory_bytes, 1, 1 << 60)
        require_number("read_bandwidth", self.read_bandwidth, 1.0, 1e18)
        require_number("step_overhead_s", self.step_overhead_s, 0.0, 10.0)
        require_number("host_link_bandwidth", self.host_link_bandwidth, 1.0, 1e18)
        require_number("link_bandwidth", self.link_bandwidth, 1.0, 1e18)
        require_number("exchange_s", self.exchange_s, 0.0, 1.0)
        require_int("num_ranks", self.num_ranks, 1, 64)
        require_one_of("device", self.device, DEVICES)
        known = ("float32", *WIDER)
        if not isinstance(self.matrix_rate, Mapping) or "float32" not in self.matrix_rate:
            raise InvalidConfigError("matrix_rate", self.matrix_rate, "operations per second by dtype, with float32")
        for dtype, rate in self.matrix_rate.items():
            if dtype not in known:
                raise InvalidConfigError("matrix_rate", dtype, f"one of {', '.join(known)}")
            require_number(f"matrix_rate of {dtype}", rate, 1.0, 1e21)
        object.__setattr__(self, "matrix_rate", MappingProxyType(dict(self.matrix_rate)))

    def joined(self, num_ranks: int) -> Hardware:
        """Return several of this accelerator as one, with the sums of their memories, bandwidths and rates. Pure.

        Raises `InvalidConfigError` for a processor, because its ranks would share the same memory and cores.

        >>> pair = Hardware("card", 16 << 30, 672e9, {"float32": 44e12}, device="cuda").joined(2)
        >>> pair.name, pair.memory_bytes >> 30, pair.read_bandwidth
        ('2 x card', 32, 1344000000000.0)
        """
        if num_ranks == 1:
            return self
        if self.device != "cuda":
            raise InvalidConfigError("tensor_parallel", num_ranks, f"1 on {self.name}, which is a processor")
        return replace(
            self,
            name=f"{num_ranks} x {self.name}",
            memory_bytes=num_ranks * self.memory_bytes,
            read_bandwidth=num_ranks * self.read_bandwidth,
            matrix_rate={dtype: num_ranks * rate for dtype, rate in self.matrix_rate.items()},
            host_link_bandwidth=num_ranks * self.host_link_bandwidth,
            num_ranks=num_ranks,
        )

    def rate(self, dtype: str) -> float:
        """Return the operations per second with numbers of a dtype, widened if the machine cannot multiply them."""
        while dtype not in self.matrix_rate:
            dtype = WIDER[dtype]
        return self.matrix_rate[dtype]


def known_hardware() -> tuple[str, ...]:
    """Return the names of the machines with a description in this package, sorted."""
    return tuple(sorted(path.stem for path in MACHINES_FOLDER.glob("*.yaml")))


def find_hardware(name: str) -> Hardware:
    """Return a machine by its name, or by the path of a YAML or JSON file that describes it.

    >>> find_hardware("nvidia-a100-80gb").memory_bytes >> 30
    80
    """
    if name in known_hardware():
        return read_hardware(MACHINES_FOLDER / f"{name}.yaml")
    if Path(name).is_file():
        return read_hardware(Path(name))
    allowed = f"a file, or one of {', '.join(known_hardware())}"
    raise InvalidConfigError("hardware", name, allowed)


def read_hardware(path: Path) -> Hardware:
    """Read a description from a file; raises `InvalidConfigError` that names the file and the field."""
    import yaml  # imported late: only descriptions need it

    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidConfigError(f"size of {path}", path.stat().st_size, f"at most {MAX_FILE_BYTES} bytes")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfigError("hardware", str(path), f"a file that can be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidConfigError):
            raise
        raise InvalidConfigError("hardware", str(path), "a file of YAML or JSON in UTF-8") from None
    if not isinstance(content, dict):
        raise InvalidConfigError("hardware", str(path), "a file of YAML with the fields of a machine")
    try:
        return parse_hardware({"name": path.stem, **content})
    except InvalidConfigError as error:
        raise InvalidConfigError(f"{path}: {error.field}", error.value, error.allowed) from None


def parse_hardware(content: Mapping[str, object]) -> Hardware:
    """Return a machine from the fields of a file; sizes and rates can be texts such as 80GiB and 3.35e12.

    >>> parse_hardware({"name": "m", "memory_bytes": "2GiB", "read_bandwidth": 4e10,
    ...                 "matrix_rate": {"float32": "5e11"}}).matrix_rate["float32"]
    500000000000.0
    """
    names = [field.name for field in fields(Hardware)]
    for key in content:
        if key not in names:
            raise InvalidConfigError("field", key, f"one of {', '.join(names)}")
    for name in names[:4]:
        if name not in content:
            raise InvalidConfigError(name, None, "a value: this field is required")
    values = dict(content)
    size = values["memory_bytes"]
    if isinstance(size, str):
        values["memory_bytes"] = parse_bytes(size, "memory_bytes")
    for name in ("read_bandwidth", "step_overhead_s", "host_link_bandwidth", "link_bandwidth", "exchange_s"):
        if name in values:
            values[name] = _number(values[name])
    rates = values["matrix_rate"]
    if isinstance(rates, Mapping):
        values["matrix_rate"] = {dtype: _number(rate) for dtype, rate in rates.items()}
    return Hardware(**values)  # type: ignore[arg-type]  # each field is checked by the value itself


def _number(value: object) -> object:
    """Return the number of a text such as 3.35e12, which YAML reads as text because its exponent has no sign."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return number if math.isfinite(number) else value
