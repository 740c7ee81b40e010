"""Hardware: what a machine can do at most, as a plain value that predictions are made from.

    name ──► machines/NAME.yaml ──┐
    path of a YAML or JSON file ──┼──► parse_hardware ──► Hardware ──► Roofline, planner, simulator
    measured by the caller ───────┘

The figures of a description are the vendor's peaks, dense and without overclocking, each with its source in `notes`: a
prediction from them says what is possible, not what some engine reaches. A measured machine has what was reached once.
Nothing here measures anything: that needs the compiled core, which the simulator does not import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from quire.core.byte_sizes import parse_bytes
from quire.core.config import require_int, require_number, require_one_of
from quire.core.errors import InvalidConfigError

MACHINES_FOLDER: Final = Path(__file__).parent / "machines"
DEVICES: Final = ("cpu", "cuda")
MAX_FILE_BYTES: Final = 100_000
WIDER: Final = MappingProxyType({"fp8": "bfloat16", "int8": "bfloat16", "float16": "bfloat16", "bfloat16": "float32"})
"""What numbers are multiplied as where the machine knows nothing faster: they are widened when they are read."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine, or an accelerator in one.

    - `read_bandwidth`: bytes a second that are read from its memory.
    - `matrix_rate`: additions and multiplications a second in products of matrices, by the numbers multiplied;
      float32 at least, and what is not there is widened.
    - `step_overhead_s`: what a step takes in addition to reading and computing.
    - `host_link_bandwidth`: bytes a second that blocks are swapped with, one way.
    - `link_bandwidth`: bytes a second between two such accelerators, one way; `exchange_s`: what an exchange takes in
      addition to its bytes. `num_ranks`: accelerators that compute each step together.
    - `device`: what an engine computes on there unless it is told: cpu, or cuda (a GPU).

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
            raise InvalidConfigError("matrix_rate", self.matrix_rate, "operations a second by dtype, float32 at least")
        for dtype, rate in self.matrix_rate.items():
            if dtype not in known:
                raise InvalidConfigError("matrix_rate", dtype, f"one of {', '.join(known)}")
            require_number(f"matrix_rate of {dtype}", rate, 1.0, 1e21)
        object.__setattr__(self, "matrix_rate", MappingProxyType(dict(self.matrix_rate)))

    def joined(self, num_ranks: int) -> Hardware:
        """Return several of this accelerator as one that has the sum of their memories, bandwidths and rates. Pure.

        Raises `InvalidConfigError` for a processor: its ranks would share what it has.

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
        """Return operations a second with numbers of a dtype, widened to what the machine multiplies."""
        while dtype not in self.matrix_rate:
            dtype = WIDER[dtype]
        return self.matrix_rate[dtype]


def known_hardware() -> tuple[str, ...]:
    """Return the names of the machines that are described here, sorted."""
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
    import yaml  # only where a description is read

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
    """Return a machine from the fields of a file, where sizes and rates may be texts such as 80GiB and 3.35e12.

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
            raise InvalidConfigError(name, None, "given: a description without it says too little")
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
    """YAML takes 3.35e12, without a sign in its exponent, for a text."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return number if math.isfinite(number) else value
