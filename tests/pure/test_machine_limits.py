"""Machines and what is asked of them: every field at its limits and one past each, and rates against a plain search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidConfigError
from quire.simulate.hardware import MAX_FILE_BYTES, WIDER, Hardware, parse_hardware, read_hardware
from quire.simulate.workload.arrivals import Arrivals
from quire.simulate.workload.closed_loop import ClosedLoop
from quire.simulate.workload.conversations import Turns
from quire.simulate.workload.drawn import DrawnPrompts, SharedPrefixes
from quire.simulate.workload.lengths import FixedLengths

GOOD: dict[str, Any] = {
    "name": "m",
    "memory_bytes": 1 << 30,
    "read_bandwidth": 1e9,
    "matrix_rate": {"float32": 1e12},
    "step_overhead_s": 0.0,
    "host_link_bandwidth": 1e9,
    "notes": "",
}


@pytest.mark.parametrize(
    ("field", "low", "high", "below", "above"),
    [
        ("memory_bytes", 1, 1 << 60, 0, (1 << 60) + 1),
        ("read_bandwidth", 1, 1e18, 0.999, 1.001e18),
        ("step_overhead_s", 0, 10, -1e-9, 10.001),
        ("host_link_bandwidth", 1, 1e18, 0.999, 1.001e18),
    ],
)
def test_each_number_of_a_machine_has_bounds_and_reaches_them(
    field: str, low: float, high: float, below: float, above: float
) -> None:
    for value in (low, high):
        assert getattr(parse_hardware(GOOD | {field: value}), field) == value
    for refused in (below, above, None, True, [low], "", "nan", "inf", float("nan"), float("inf")):
        with pytest.raises(InvalidConfigError, match=rf"^{field} is ") as caught:
            parse_hardware(GOOD | {field: refused})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", *WIDER])
def test_each_rate_has_bounds_and_reaches_them(dtype: str) -> None:
    for value in (1, 1e21, "1e21"):
        assert parse_hardware(GOOD | {"matrix_rate": {"float32": 5.0, dtype: value}}).rate(dtype) == float(value)
    for refused in (0.999, 1.001e21, "", None, True, "nan"):
        with pytest.raises(InvalidConfigError, match=rf"^matrix_rate of {dtype} is "):
            parse_hardware(GOOD | {"matrix_rate": {"float32": 5.0, dtype: refused}})


@given(rates=st.dictionaries(st.sampled_from(["fp8", "int8", "float16", "bfloat16"]), st.floats(1.0, 1e20)))
def test_numbers_without_a_rate_are_widened_step_by_step(rates: dict[str, float]) -> None:
    machine = Hardware("m", 1, 1.0, {"float32": 7.0, **rates})
    ways = {
        "fp8": ["fp8", "bfloat16", "float32"],
        "int8": ["int8", "bfloat16", "float32"],
        "float16": ["float16", "bfloat16", "float32"],
        "bfloat16": ["bfloat16", "float32"],
        "float32": ["float32"],
    }
    for dtype, way in ways.items():
        assert machine.rate(dtype) == next(machine.matrix_rate[name] for name in way if name in machine.matrix_rate)


@pytest.mark.parametrize("field", ["name", "memory_bytes", "read_bandwidth", "matrix_rate"])
def test_a_description_must_say_enough(field: str) -> None:
    given_fields = {name: value for name, value in GOOD.items() if name != field}
    with pytest.raises(InvalidConfigError) as caught:
        parse_hardware(given_fields)
    assert str(caught.value) == f"{field} is None; allowed: a value: this field is required"


def test_rates_that_were_given_cannot_be_changed_behind_a_machine() -> None:
    rates = {"float32": 1.0}
    machine = Hardware("m", 1, 1.0, rates)
    rates["float32"] = 2.0
    assert machine.rate("float32") == 1.0
    with pytest.raises(TypeError):
        machine.matrix_rate["float32"] = 3.0  # type: ignore[index]


def test_a_file_may_be_as_large_as_its_bound_and_not_a_byte_more(tmp_path: Path) -> None:
    path, text = tmp_path / "m.yaml", json.dumps({name: value for name, value in GOOD.items() if name != "name"})
    path.write_text(text + " " * (MAX_FILE_BYTES - len(text)))
    assert read_hardware(path) == parse_hardware(GOOD)
    path.write_text(text + " " * (MAX_FILE_BYTES - len(text) + 1))
    with pytest.raises(InvalidConfigError) as caught:
        read_hardware(path)
    assert str(caught.value) == f"size of {path} is 100001; allowed: at most 100000 bytes"


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"a file that can be read \(Is a directory\)$"):
        read_hardware(tmp_path)
    with pytest.raises(InvalidConfigError, match=r"a file that can be read \(No such file or directory\)$"):
        read_hardware(tmp_path / "none.yaml")


def test_a_list_that_holds_itself_a_billion_times_is_refused_at_once(tmp_path: Path) -> None:
    levels = [f"&a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 9)]
    text = f"notes: [&a0 [x, x], {', '.join(levels)}]\n"
    fields = {name: value for name, value in GOOD.items() if name not in ("name", "notes")}
    (tmp_path / "m.yaml").write_text(text + "\n".join(f"{name}: {json.dumps(value)}" for name, value in fields.items()))
    with pytest.raises(InvalidConfigError, match=r"m\.yaml: notes is \[\['x', 'x'\], .*; allowed: a text$") as caught:
        read_hardware(tmp_path / "m.yaml")
    assert len(str(caught.value)) < 300


# ---- what is asked of them ------------------------------------------------------------------------------------------

PROMPTS = DrawnPrompts(FixedLengths(4, 4))


@pytest.mark.parametrize(
    ("make", "field", "low", "high"),
    [
        (Arrivals, "rate", 1e-6, 1e9),
        (lambda value: Arrivals(1.0, "gamma", variation=value), "variation", 1e-2, 1e2),
        (lambda value: Arrivals(1.0, "bursts", peak=1.0, burst_share=value), "burst_share", 1e-3, 0.999),
        (lambda value: Arrivals(1.0, "bursts", peak=value, burst_share=0.25), "peak", 1.0, 4.0),
        (lambda value: Arrivals(1.0, "bursts", period_s=value), "period_s", 1e-3, 1e9),
        (Turns, "num_turns", 1, 1 << 16),
        (lambda value: Turns(2, value), "thinking_s", 1e-3, 1e9),
        (lambda value: SharedPrefixes(value, 4), "number of prefixes", 1, 1 << 20),
        (lambda value: SharedPrefixes(1, value), "prefix tokens", 0, 1 << 24),
        (lambda value: SharedPrefixes(1, 4, value), "share of requests with a prefix", 0, 1),
        (lambda value: DrawnPrompts(FixedLengths(1, 1), value), "longest", 2, 1 << 30),
        (lambda value: DrawnPrompts(FixedLengths(1, 1), value, SharedPrefixes(1, 50)), "longest", 52, 1 << 30),
        (lambda value: DrawnPrompts(FixedLengths(1, 1), num_sequences=value), "num_sequences", 1, 1 << 10),
        (lambda value: ClosedLoop(value, PROMPTS, duration_s=1.0, seed=0), "num_users", 1, 1 << 20),
        (lambda value: ClosedLoop(1, PROMPTS, duration_s=1.0, seed=0, thinking_s=value), "thinking_s", 0, 1e9),
    ],
)
def test_each_setting_of_a_workload_has_bounds_and_reaches_them(make: Any, field: str, low: Any, high: Any) -> None:
    for value in (low, high):
        make(value)
    below, above = (low - 1, high + 1) if isinstance(low, int) else (low * 0.999, high * 1.001)
    for value in (below, above, True, None, "1", float("nan")):
        with pytest.raises(InvalidConfigError, match=rf"^{field} is "):
            make(value)


@given(rate=st.floats(0.1, 10.0), share=st.floats(0.05, 0.9), seed=st.integers(0, 1 << 20), data=st.data())
def test_bursts_are_a_stretched_even_stream(rate: float, share: float, seed: int, data: st.DataObject) -> None:
    """As many requests come until the end of each burst and of each period as the even stream has until then."""
    peak = data.draw(st.floats(1.0, 1.0 / share))
    bursts = Arrivals(rate, "bursts", peak=peak, burst_share=share, period_s=20.0).times(seed)
    even = Arrivals(rate, "poisson").times(seed)
    for _, at_s, even_s in zip(range(200), bursts, even, strict=False):
        period, within = divmod(at_s / 20.0, 1.0)
        brought = (
            within * peak if within < share else share * peak + (within - share) / (1 - share) * (1 - share * peak)
        )
        assert (period + brought) * 20.0 == pytest.approx(even_s, rel=1e-6, abs=1e-6)
