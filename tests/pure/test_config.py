"""Every setting checks itself, and says what would be allowed."""

from __future__ import annotations

import dataclasses
import math

import pytest

from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import InvalidConfigError

WRONG = [None, "1", [], {}, b"1", float("nan"), math.inf, -math.inf, 10**400, -(10**400), 1j]
INT31 = (1 << 31) - 1
INTEGERS = [
    (MemoryConfig, "num_blocks", 1, INT31),
    (MemoryConfig, "num_host_blocks", 0, INT31),
    (MemoryConfig, "hash_bits", 1, 512),
    (MemoryConfig, "max_cached_blocks_per_tenant", 0, INT31),
    (SchedulerConfig, "max_num_seqs", 1, 2048),  # max_num_batched_tokens, by default
    (SchedulerConfig, "max_num_batched_tokens", 256, 1 << 30),  # max_num_seqs, by default
    (SchedulerConfig, "max_model_len", 1, 1 << 30),
    (SchedulerConfig, "max_steps_under_way", 1, 16),
]
NUMBERS = [
    (SchedulerConfig, "priority_ageing_s", 1e-3, 1e9),
    (SchedulerConfig, "headroom", 0.0, 0.9),
    (SchedulerConfig, "recompute_tokens_per_s", 1e-3, 1e12),
    (SchedulerConfig, "swap_bytes_per_s", 1.0, 1e15),
]
CHOICES = [
    (MemoryConfig, "prefix_index", ("hash_chain", "radix_tree", "none")),
    (MemoryConfig, "eviction", ("lru", "fifo", "priority")),
    (SchedulerConfig, "policy", ("fcfs", "priority", "fair_share")),
    (SchedulerConfig, "preemption", ("recompute", "swap", "auto")),
]
Config = type[MemoryConfig] | type[SchedulerConfig]


def refusal(config: Config, field: str, value: object) -> InvalidConfigError:
    with pytest.raises(InvalidConfigError) as caught:
        config(**{field: value})  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{caught.value.field} is ")
    assert f"; allowed: {caught.value.allowed}" in str(caught.value)
    return caught.value


def test_every_field_stands_in_these_tests() -> None:
    tested = {(config, field) for config, field, *_ in [*INTEGERS, *NUMBERS, *CHOICES]} | {(MemoryConfig, "hash_key")}
    fields = {
        (config, field.name) for config in (MemoryConfig, SchedulerConfig) for field in dataclasses.fields(config)
    }
    assert tested == fields


@pytest.mark.parametrize(("config", "field", "low", "high"), INTEGERS, ids=str)
def test_integers_are_taken_within_their_range_only(config: Config, field: str, low: int, high: int) -> None:
    for value in (low, high):
        assert getattr(config(**{field: value}), field) == value
    for value in (low - 1, high + 1, True, False, float(low), *WRONG):
        if value is None and field == "max_cached_blocks_per_tenant":
            continue
        error = refusal(config, field, value)
        assert error.field in (field, "max_num_batched_tokens")
        assert error.field != field or error.value is value


@pytest.mark.parametrize(("config", "field", "low", "high"), NUMBERS, ids=str)
def test_numbers_are_taken_within_their_range_only(config: Config, field: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(config(**{field: value}), field) == value
    for value in (math.nextafter(low, -math.inf), math.nextafter(high, math.inf), True, *WRONG):
        error = refusal(config, field, value)
        assert (error.field, error.value is value) == (field, True)


@pytest.mark.parametrize(("config", "field", "allowed"), CHOICES, ids=str)
def test_names_are_taken_if_they_are_known(config: Config, field: str, allowed: tuple[str, ...]) -> None:
    for value in allowed:
        assert getattr(config(**{field: value}), field) == value
    for value in ("", "LRU", "fcfs ", 1, *WRONG):
        error = refusal(config, field, value)
        assert (error.field, error.allowed) == (field, f"one of {', '.join(allowed)}")


def test_a_step_has_a_token_for_every_sequence() -> None:
    with pytest.raises(InvalidConfigError, match=r"max_num_batched_tokens is 8; allowed: max_num_seqs \(9\) or more"):
        SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=8)


@pytest.mark.parametrize("value", [b"", bytes(64)])
def test_a_hash_key_has_at_most_64_bytes(value: bytes) -> None:
    assert MemoryConfig(hash_key=value).hash_key == value


@pytest.mark.parametrize("value", [bytes(65), "key", None, 5, bytearray(3)], ids=repr)
def test_anything_else_is_no_hash_key(value: object) -> None:
    assert refusal(MemoryConfig, "hash_key", value).field == "hash_key"


def test_a_hash_key_is_a_secret_and_is_never_shown() -> None:
    assert "open sesame" not in repr(MemoryConfig(hash_key=b"open sesame"))
    assert "open sesame" not in str(refusal(MemoryConfig, "hash_key", b"open sesame" * 9))


def test_the_defaults_are_allowed() -> None:
    assert MemoryConfig().num_blocks == 1024
    assert SchedulerConfig().max_steps_under_way == 1


@pytest.mark.parametrize("config", [MemoryConfig, SchedulerConfig])
def test_every_setting_has_its_help(config: Config) -> None:
    assert all(field.metadata["help"] for field in dataclasses.fields(config))


@pytest.mark.parametrize("config", [MemoryConfig(), SchedulerConfig()], ids=lambda config: type(config).__name__)
def test_a_config_never_changes(config: object) -> None:
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, 1)
