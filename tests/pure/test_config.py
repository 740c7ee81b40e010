"""The settings: what each one allows, that nothing changes them, and that each has its help."""

from __future__ import annotations

import math
import sys
from dataclasses import FrozenInstanceError, asdict, fields, replace
from typing import Any

import pytest

from quire.core.config import MOST_DRAFTS, MemoryConfig, SchedulerConfig
from quire.core.errors import InvalidConfigError
from quire.core.setting_checks import require_number

Config = MemoryConfig | SchedulerConfig
LARGEST = (1 << 31) - 1

INTEGERS: list[tuple[type[Config], str, int, int]] = [
    (MemoryConfig, "num_blocks", 1, LARGEST),
    (MemoryConfig, "num_host_blocks", 0, LARGEST),
    (MemoryConfig, "hash_bits", 1, 512),
    (MemoryConfig, "max_cached_blocks_per_tenant", 0, LARGEST),
    (MemoryConfig, "num_disk_slots", 0, LARGEST),
    (SchedulerConfig, "max_num_seqs", 1, 1 << 20),
    (SchedulerConfig, "max_num_batched_tokens", 1, 1 << 30),
    (SchedulerConfig, "max_model_len", 1, 1 << 30),
    (SchedulerConfig, "max_steps_under_way", 1, 16),
    (SchedulerConfig, "max_drafts", 0, 15),
    (SchedulerConfig, "max_depth", 0, 15),
]
NUMBERS: list[tuple[str, float, float]] = [
    ("priority_ageing_s", 1e-3, 1e9),
    ("headroom", 0.0, 0.9),
    ("recompute_tokens_per_s", 1e-3, 1e12),
    ("swap_bytes_per_s", 1.0, 1e15),
    ("itl_slo_ms", 1.0, 1e6),
    ("max_slowdown", 0.0, 1e6),
]
OPTIONAL_NUMBERS = ("itl_slo_ms",)
NAMES: list[tuple[type[Config], str, tuple[str, ...]]] = [
    (MemoryConfig, "prefix_index", ("hash_chain", "radix_tree", "none")),
    (MemoryConfig, "eviction", ("lru", "fifo", "priority")),
    (MemoryConfig, "disk_write", ("on_hit", "always")),
    (SchedulerConfig, "policy", ("fcfs", "priority", "fair_share")),
    (SchedulerConfig, "preemption", ("recompute", "swap", "auto")),
]


def make(kind: type[Config], field: str, value: object) -> Config:
    """Make a config of one setting; the two that depend on each other stay out of the way."""
    wide: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 1 << 30} if kind is SchedulerConfig else {}
    wide |= {"max_drafts": MOST_DRAFTS} if field == "max_depth" else {}
    return kind(**(wide | {field: value}))


def expect_refusal(kind: type[Config], field: str, value: object, allowed: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        make(kind, field, value)
    assert (caught.value.field, caught.value.value, caught.value.allowed) == (field, value, allowed)


def test_the_tables_name_every_setting() -> None:
    tabled = {field for _, field, *_ in INTEGERS} | {field for field, *_ in NUMBERS} | {field for _, field, _ in NAMES}
    assert tabled | {"hash_key", "keeps_on_host"} == {
        field.name for kind in (MemoryConfig, SchedulerConfig) for field in fields(kind)
    }


def test_a_truth_is_one() -> None:
    expect_refusal(MemoryConfig, "keeps_on_host", 1, "True or False")


@pytest.mark.parametrize(("kind", "field", "low", "high"), INTEGERS)
def test_the_limits_of_integers(kind: type[Config], field: str, low: int, high: int) -> None:
    for value in (low, high):
        assert getattr(make(kind, field, value), field) == value
    for wrong in (low - 1, high + 1, float(low), True, str(low), b"1", [low], math.nan, math.inf):
        if repr(wrong) == "nan":
            with pytest.raises(InvalidConfigError, match=f"^{field} is nan; allowed: an integer from {low} to {high}$"):
                make(kind, field, wrong)
        else:
            expect_refusal(kind, field, wrong, f"an integer from {low} to {high}")


@pytest.mark.parametrize(("field", "low", "high"), NUMBERS)
def test_the_limits_of_numbers(field: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(make(SchedulerConfig, field, value), field) == value
    for outside in (low - 1e-6, -1, high * 1.001, 1e300):
        expect_refusal(SchedulerConfig, field, outside, f"a number from {low:g} to {high:g}")
    for wrong in (True, "1", None, [1.0], math.inf, -math.inf):
        if wrong is not None or field not in OPTIONAL_NUMBERS:
            expect_refusal(SchedulerConfig, field, wrong, "a finite number")
    with pytest.raises(InvalidConfigError, match=f"^{field} is nan; allowed: a finite number$"):
        make(SchedulerConfig, field, math.nan)


@pytest.mark.parametrize("field", [field for field, *_ in NUMBERS])
def test_an_integer_beyond_the_range_of_floats_is_refused_like_any_other(field: str) -> None:
    with pytest.raises(InvalidConfigError, match=field):
        make(SchedulerConfig, field, 10**400)


def test_the_largest_number_is_finite() -> None:
    largest = sys.float_info.max
    for value in (largest, -largest):
        require_number("x", value, -largest, largest)
    with pytest.raises(InvalidConfigError, match=r"^x is inf; allowed: a finite number$"):
        require_number("x", math.inf, -math.inf, math.inf)


@pytest.mark.parametrize(("kind", "field", "names"), NAMES)
def test_choices_are_by_name(kind: type[Config], field: str, names: tuple[str, ...]) -> None:
    for name in names:
        assert getattr(make(kind, field, name), field) == name
    for wrong in ("", names[0].upper(), f" {names[0]}", ", ".join(names), None, 0, True, [names[0]]):
        expect_refusal(kind, field, wrong, f"one of {', '.join(names)}")


@pytest.mark.parametrize(("kind", "field", "names"), NAMES)
def test_the_help_of_a_choice_names_what_may_be_chosen(kind: type[Config], field: str, names: tuple[str, ...]) -> None:
    text = next(setting.metadata["help"] for setting in fields(kind) if setting.name == field)
    for name in names:
        assert name in text


@pytest.mark.parametrize("key", [b"", b"k", bytes(64)])
def test_a_hash_key_has_at_most_64_bytes(key: bytes) -> None:
    assert MemoryConfig(hash_key=key).hash_key == key


@pytest.mark.parametrize("key", ["text", None, 1, bytearray(b"k")])
def test_a_hash_key_is_bytes(key: object) -> None:
    expect_refusal(MemoryConfig, "hash_key", key, "at most 64 bytes")


def test_a_hash_key_is_a_secret_and_is_never_shown() -> None:
    assert "sesame" not in repr(MemoryConfig(hash_key=b"sesame"))
    with pytest.raises(InvalidConfigError) as caught:
        MemoryConfig(hash_key=b"sesame" * 11)
    assert str(caught.value) == "hash_key is '66 bytes'; allowed: at most 64 bytes"


def test_a_tenant_may_be_unlimited() -> None:
    assert MemoryConfig(max_cached_blocks_per_tenant=None).max_cached_blocks_per_tenant is None


def test_a_step_has_room_for_one_token_of_every_sequence() -> None:
    assert SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8).max_num_batched_tokens == 8
    with pytest.raises(InvalidConfigError) as caught:
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=7)
    assert str(caught.value) == "max_num_batched_tokens is 7; allowed: max_num_seqs (8) or more"


@pytest.mark.parametrize("kind", [MemoryConfig, SchedulerConfig])
def test_nothing_changes_a_config(kind: type[Config]) -> None:
    config = kind()
    for field in fields(kind):
        with pytest.raises(FrozenInstanceError):
            setattr(config, field.name, getattr(config, field.name))
    assert asdict(replace(config)) == asdict(config)
    assert hash(replace(config)) == hash(config)


@pytest.mark.parametrize("kind", [MemoryConfig, SchedulerConfig])
def test_every_setting_has_a_default_and_a_line_of_help(kind: type[Config]) -> None:
    for field in fields(kind):
        text = field.metadata["help"]
        assert text == text.strip() != ""
        assert "\n" not in text
        assert not text.endswith(".")
        assert getattr(kind(), field.name) == field.default


def test_replace_checks_again() -> None:
    with pytest.raises(InvalidConfigError, match="num_blocks"):
        replace(MemoryConfig(), num_blocks=0)
