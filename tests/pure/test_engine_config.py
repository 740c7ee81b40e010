"""The settings of an engine: what they allow, how sizes are written, and where the memory goes before it is taken."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, asdict, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.byte_sizes import format_bytes, parse_bytes
from quire.core.config import (
    LARGE_GPU_BYTES,
    EngineConfig,
    EngineSettings,
    MemoryConfig,
    ResolvedConfig,
    SchedulerConfig,
)
from quire.core.errors import InvalidConfigError, shortened
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.core.memory_needs import MemoryNeeds
from quire.engine.memory_plan import USEFUL_TOKENS, MemoryPlan, plan_memory

MIB, GIB = 1 << 20, 1 << 30
SPEC = KVCacheSpec.from_layers([None] * 4, block_size=16, num_kv_heads=2, head_dim=32, dtype="float32")
NEEDS = MemoryNeeds(weight_bytes=10 * MIB, activation_bytes=2 * MIB, rest_bytes=40 * MIB, free_bytes=100 * MIB)


# ---- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1024", 1024),
        ("4GiB", 4 << 30),
        ("4gib", 4 << 30),
        ("4G", 4 << 30),
        ("4GB", 4_000_000_000),
        (" 512 MiB ", 512 << 20),
        ("1.5k", 1536),
        ("2TiB", 2 << 40),
        (7, 7),
    ],
)
def test_sizes_are_read(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1", "4 GiBs", "1e9", "0.5", "1..5G", "0x10", "٤G", "9" * 400, -1, 1.5, True, None, "2000000TiB"],
)
def test_what_is_no_size_is_refused_by_its_name(text: Any) -> None:
    with pytest.raises(InvalidConfigError, match=r"^kv_memory is "):
        parse_bytes(text, "kv_memory")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1b", 1),
        ("1B", 1),
        ("3kib", 3 << 10),
        ("3kb", 3000),
        ("3MB", 3_000_000),
        ("3m", 3 << 20),
        ("3tb", 3 * 10**12),
        ("0.5KiB", 512),
        ("1.9b", 1),
        ("007", 7),
        ("0" * 30 + "7", 7),
        ("0" * 5000 + "16MiB", 16 << 20),
        ("0" * 40 + ".5KiB", 512),
        ("0" * 40, 0),
        ("9" * 18, 10**18 - 1),
        (str(1 << 60), 1 << 60),
        (1 << 60, 1 << 60),
        ("1048576TiB", 1 << 60),
    ],
)
def test_each_unit_has_its_size_and_a_number_is_read_exactly(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *((1 << 60) + 1, str((1 << 60) + 1), "1048577TiB", "1 0", "1,000", "1.", ".5G", "5P"),
        *("9" * 31, "1" + "0" * 30, "9" * 31 + ".5", "1" + "0" * 400 + ".5"),
    ],
)
def test_a_size_beyond_the_largest_or_in_no_unit_is_refused_in_full(text: int | str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        parse_bytes(text)
    shown = shortened(repr(text))
    assert str(caught.value) == f"size is {shown}; allowed: a number of bytes, or a size such as 512MiB or 4GiB"


@pytest.mark.parametrize("text", ["1{}!", "1{}1", "{}1{}", "1.{}", "1 M{}M"])
def test_a_size_with_many_spaces_costs_no_more_than_its_length(text: str) -> None:
    """A pattern that tries every way to share the spaces out takes hours."""
    with pytest.raises(InvalidConfigError):
        parse_bytes(text.replace("{}", " " * 1_000_000) + "?")


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        ((1 << 20) - 1, "1,024.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (1 << 30, "1.00 GiB"),
        (5 << 40, "5,120.00 GiB"),
        (-5, "-5 B"),
    ],
)
def test_a_size_is_shown_in_the_unit_that_it_reaches(size: int, shown: str) -> None:
    assert format_bytes(size) == shown


@given(st.integers(0, 1 << 50))
def test_a_size_that_is_shown_can_be_read(size: int) -> None:
    assert abs(parse_bytes(format_bytes(size).replace(",", "")) - size) <= size / 20


# ---- the config ----------------------------------------------------------------------------------------------------


def test_every_setting_has_its_help_and_a_keyword() -> None:
    names = [field.name for field in fields(EngineConfig)]
    assert all(field.metadata["help"] for field in fields(EngineConfig))
    assert ["model", *get_type_hints(EngineSettings)] == names


def test_settings_that_narrower_configs_have_too_have_their_names_and_limits() -> None:
    config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=7, policy="priority", eviction="fifo").resolved()
    scheduler, memory = config.scheduler_config(100), config.memory_config(5, 2, b"key")
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.policy) == (3, 7, "priority")
    assert (memory.num_blocks, memory.num_host_blocks, memory.eviction, memory.hash_key) == (5, 2, "fifo", b"key")
    assert replace(config, enable_prefix_caching=False).memory_config(1, 0, b"").prefix_index == "none"
    own = set(inspect.signature(EngineConfig).parameters)
    assert {"max_num_seqs", "policy", "preemption"} <= own & {field.name for field in fields(SchedulerConfig)}
    assert {"prefix_index", "eviction"} <= own & {field.name for field in fields(MemoryConfig)}


def test_paths_are_kept_as_text_and_nothing_changes_a_config() -> None:
    config = EngineConfig(model=Path("folder"), tokenizer=Path("other"))  # type: ignore[arg-type]
    assert (config.model, config.tokenizer) == ("folder", "other")
    with pytest.raises(FrozenInstanceError):
        config.model = "another"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model", ""),
        ("model", None),
        ("model", "a\0b"),
        ("model", 7),
        ("tokenizer", ""),
        ("dtype", "float8"),
        ("dtype", "int3"),
        ("weights", "int3"),
        ("kv_dtype", "int2"),
        ("kv_dtype", None),
        ("touch_kv_memory", 1),
        ("weights", "bfloat16"),
        ("weights", None),
        ("dtype", None),
        ("backend", "cuda"),
        ("attention_backend", "fa3"),
        ("device", "gpu"),
        ("batch_invariant", 1),
        ("cuda_graphs", None),
        ("tensor_parallel_sums", "ring"),
        ("tensor_parallel_sums", None),
        ("num_threads", 0),
        ("block_size", 0),
        ("block_size", "16"),
        ("kv_memory", "lots"),
        ("kv_memory", -1),
        ("swap_space", "x"),
        ("max_num_seqs", 0),
        ("max_num_seqs", "8"),
        ("max_num_batched_tokens", 0),
        ("max_num_batched_tokens", 2.5),
        ("max_model_len", 0),
        ("max_model_len", 2.5),
        ("enable_prefix_caching", 1),
        ("prefix_index", "tree"),
        ("prefix_index", None),
        ("eviction", []),
        ("eviction", None),
        ("policy", "random"),
        ("policy", None),
        ("preemption", "never"),
        ("preemption", None),
        ("max_cached_blocks_per_tenant", -1),
        ("max_steps_under_way", 0),
        ("itl_slo_ms", 0),
        ("itl_slo_ms", "fast"),
        ("itl_slo_ms", float("nan")),
        ("max_slowdown", -1),
        ("max_slowdown", "slow"),
        ("seed", -1),
        ("seed", 1 << 63),
        ("step_log", ""),
        ("step_log", 7),
    ],
)
def test_what_is_not_allowed_is_refused_by_its_name(setting: str, value: object) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        EngineConfig(**{setting: value})  # type: ignore[arg-type]
    assert caught.value.field == setting


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("block_size", 1, 4096),
        ("seed", 0, (1 << 63) - 1),
        ("num_threads", 1, 1024),
        ("max_num_seqs", 1, 1 << 20),
        ("max_num_batched_tokens", 1, 1 << 30),
        ("max_model_len", 1, 1 << 30),
        ("max_steps_under_way", 1, 16),
        ("max_image_patches", 1024, 1 << 16),
        ("max_cached_blocks_per_tenant", 0, (1 << 31) - 1),
    ],
)
def test_each_number_may_be_its_bounds_and_nothing_beyond_them(field: str, low: int, high: int) -> None:
    for value in (low, high):
        assert getattr(EngineConfig(**{field: value}), field) == value  # type: ignore[arg-type]
    for value in (low - 1, high + 1, float(low), True):
        with pytest.raises(InvalidConfigError) as caught:
            EngineConfig(**{field: value})  # type: ignore[arg-type]
        assert str(caught.value) == f"{field} is {value}; allowed: an integer from {low} to {high}"


@pytest.mark.parametrize("field", ["skip_tokenizer_init", "batch_invariant"])
def test_what_changes_an_engine_is_off_until_it_is_asked_for(field: str) -> None:
    assert getattr(EngineConfig(), field) is False
    assert getattr(EngineConfig(**{field: True}), field) is True  # type: ignore[arg-type]
    assert (EngineConfig().cuda_graphs, EngineConfig().enable_prefix_caching) == (True, True)


# ---- what is left open -----------------------------------------------------------------------------------------------


def sizes(config: ResolvedConfig) -> tuple[int, int, int]:
    return config.max_num_seqs, config.max_num_batched_tokens, config.max_steps_under_way


@pytest.mark.parametrize(
    ("given", "gpu_bytes", "found"),
    [
        ({}, None, (64, 512, 1)),
        ({}, 0, (256, 2048, 2)),
        ({}, 24 * GIB, (256, 2048, 2)),
        ({}, LARGE_GPU_BYTES - 1, (256, 2048, 2)),
        ({}, LARGE_GPU_BYTES, (256, 8192, 2)),
        ({}, 192 * GIB, (256, 8192, 2)),
        ({"backend": "torch"}, None, (64, 512, 2)),
        ({"max_steps_under_way": 1}, 24 * GIB, (256, 2048, 1)),
        ({"max_steps_under_way": 3}, None, (64, 512, 3)),
        ({"max_num_seqs": 8}, None, (8, 512, 1)),
        ({"max_num_seqs": 8}, 24 * GIB, (8, 2048, 2)),
        ({"max_num_seqs": 600}, None, (600, 600, 1)),
        ({"max_num_seqs": 600}, 24 * GIB, (600, 2048, 2)),
        ({"max_num_seqs": 10_000}, 192 * GIB, (10_000, 10_000, 2)),
        ({"max_num_batched_tokens": 7}, None, (7, 7, 1)),
        ({"max_num_batched_tokens": 100}, None, (64, 100, 1)),
        ({"max_num_batched_tokens": 100}, 192 * GIB, (100, 100, 2)),
        ({"max_num_batched_tokens": 10_000}, None, (64, 10_000, 1)),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 5}, 192 * GIB, (3, 5, 2)),
    ],
)
def test_what_is_left_open_is_chosen_for_the_device(
    given: dict[str, Any], gpu_bytes: int | None, found: tuple[int, int, int]
) -> None:
    assert sizes(EngineConfig(**given).resolved(gpu_bytes)) == found


def test_prompts_slow_texts_down_by_a_limited_factor_unless_a_time_is_set() -> None:
    def slowdown(config: EngineConfig, gpu_bytes: int | None = None) -> float:
        return config.resolved(gpu_bytes).scheduler_config(100).max_slowdown

    assert (slowdown(EngineConfig()), slowdown(EngineConfig(max_slowdown=0))) == (4.0, 0.0)
    assert (slowdown(EngineConfig(), 80 << 30), slowdown(EngineConfig(max_slowdown=9), 80 << 30)) == (0.0, 9.0)
    assert slowdown(EngineConfig(itl_slo_ms=200)) == 0.0
    with pytest.raises(InvalidConfigError, match="max_slowdown is 4; allowed: 0 with itl_slo_ms"):
        EngineConfig(itl_slo_ms=200, max_slowdown=4)


@given(
    sequences=st.none() | st.integers(1, 1 << 20),
    tokens=st.none() | st.integers(1, 1 << 30),
    steps=st.none() | st.integers(1, 16),
    gpu_bytes=st.none() | st.integers(0, 1 << 40),
)
def test_what_was_given_stays_and_nothing_contradicts_it(
    sequences: int | None, tokens: int | None, steps: int | None, gpu_bytes: int | None
) -> None:
    given = {"max_num_seqs": sequences, "max_num_batched_tokens": tokens, "max_steps_under_way": steps}
    try:
        config = EngineConfig(policy="priority", **given)  # type: ignore[arg-type]
    except InvalidConfigError as error:
        assert sequences is not None and tokens is not None and tokens < sequences
        assert str(error) == f"max_num_batched_tokens is {tokens}; allowed: max_num_seqs ({sequences}) or more"
        return
    resolved = config.resolved(gpu_bytes)
    for name, value in asdict(config).items():
        assert getattr(resolved, name) == value or (value is None and name in {*given, "block_size", "max_slowdown"})
    scheduler = resolved.scheduler_config(100)
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_steps_under_way) == sizes(resolved)
    assert (scheduler.policy, scheduler.max_model_len) == ("priority", 100)
    assert resolved.resolved(gpu_bytes) == resolved.resolved() == resolved, "nothing is left to choose"


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_steps_under_way"])
def test_nothing_can_be_opened_again(name: str) -> None:
    with pytest.raises(InvalidConfigError, match=rf"^{name} is None; allowed: an integer from 1 to"):
        replace(EngineConfig().resolved(), **{name: None})  # type: ignore[arg-type]


# ---- where the memory goes -------------------------------------------------------------------------------------------


def plan(**settings: Any) -> MemoryPlan:
    needs = settings.pop("needs", NEEDS)
    return plan_memory(EngineConfig(**settings).resolved(), SPEC, 4096, needs)


def test_the_parts_add_up() -> None:
    made = plan(kv_memory="20MiB", swap_space="5MiB")
    assert dict(made.parts) == {
        "weights": 10 * MIB,
        "KV blocks": made.num_blocks * SPEC.bytes_per_block,
        "swap": made.num_host_blocks * SPEC.bytes_per_block,
        "activations": 2 * MIB,
        "rest of the process": 40 * MIB,
    }
    assert made.total_bytes == sum(size for _, size in made.parts)
    assert 20 * MIB - SPEC.bytes_per_block < made.num_blocks * SPEC.bytes_per_block <= 20 * MIB


def test_without_a_size_half_of_what_is_left_is_taken_but_no_more_than_can_be_used() -> None:
    assert plan().num_blocks == 44 * MIB // SPEC.bytes_per_block
    assert plan(max_num_seqs=2, max_model_len=64).num_blocks == 2 * 4
    unknown = replace(NEEDS, free_bytes=None)
    assert plan(needs=unknown, max_num_seqs=256).num_blocks == (1 << 30) // SPEC.bytes_per_block


def test_of_a_gpu_more_is_taken_and_swap_is_the_hosts() -> None:
    needs = replace(NEEDS, kv_share=0.9, host_bytes=300 * MIB)
    made = plan(needs=needs, swap_space="200MiB")
    assert made.num_blocks == int(88 * MIB * 0.9) // SPEC.bytes_per_block
    parts = dict(made.parts)
    assert parts["swap, on the host"] == made.swap_bytes == 200 * MIB
    assert made.total_bytes == sum(parts.values()) - 200 * MIB
    assert (
        plan(needs=needs, kv_memory="88MiB", swap_space="300MiB").num_host_blocks == 300 * MIB // SPEC.bytes_per_block
    )
    with pytest.raises(
        InvalidConfigError, match=r"^swap_space is '301\.0 MiB'; .* 300\.0 MiB, the free memory of the host"
    ):
        plan(needs=needs, swap_space="301MiB")


def test_nothing_but_torch_runs_on_a_gpu() -> None:
    for backend in ("auto", "torch"):
        assert EngineConfig(device="cuda", backend=backend).device == "cuda"
    for backend in ("native", "reference"):
        with pytest.raises(InvalidConfigError, match=r"^backend is .*; allowed: torch or auto: nothing else runs on"):
            EngineConfig(device="cuda", backend=backend)


def test_a_context_is_cut_to_what_the_blocks_hold_unless_it_was_asked_for() -> None:
    made = plan(kv_memory=10 * SPEC.bytes_per_block)
    assert (made.num_blocks, made.max_model_len) == (10, 161)  # the last token is not stored
    assert made.num_full_sequences == 1
    assert plan(kv_memory=10 * SPEC.bytes_per_block, max_model_len=161).max_model_len == 161
    with pytest.raises(InvalidConfigError, match=r"^kv_memory is .* for one sequence of 162 tokens"):
        plan(kv_memory=10 * SPEC.bytes_per_block, max_model_len=162)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_memory": 100}, r"^kv_memory is 100; allowed: 32768 bytes \(one block\) or more"),
        ({"kv_memory": 2 * SPEC.bytes_per_block}, rf"^kv_memory is .* for one sequence of {USEFUL_TOKENS} tokens"),
        ({"kv_memory": "89MiB"}, r"^kv_memory is '89\.0 MiB'; allowed: at most 88\.0 MiB"),
        ({"kv_memory": "80MiB", "swap_space": "20MiB"}, r"^kv_memory is .*at most 68\.0 MiB"),
        ({"swap_space": "88MiB"}, r"^swap_space is '88\.0 MiB'"),
        ({"swap_space": 4}, r"^swap_space is 4; allowed: 0, or 32768 \(one block\) or more"),
        ({"max_model_len": 4097}, r"^max_model_len is 4097; allowed: at most 4096, the model's"),
        ({"needs": replace(NEEDS, weight_bytes=200 * MIB)}, r"^memory of weights .* is '202\.0 MiB'; .* 100\.0 MiB"),
        ({"needs": replace(NEEDS, free_bytes=12 * MIB)}, r"^memory of weights and activations is"),
        ({"needs": replace(NEEDS, free_bytes=12 * MIB + 1)}, r"^swap_space is|^kv_memory is"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        plan(**settings)


def test_what_is_left_is_what_nothing_else_takes() -> None:
    needs = MemoryNeeds(weight_bytes=10, activation_bytes=20, graph_bytes=5, free_bytes=100)
    assert (needs.rest_bytes, needs.kv_share, needs.left_bytes) == (0, 0.5, 65)
    assert (needs.left_beside(30), replace(needs, host_bytes=7).left_beside(30)) == (35, 65)
    assert replace(needs, free_bytes=34).left_bytes == -1
    assert replace(needs, free_bytes=None).left_bytes == 2 << 30
    assert MemoryNeeds(1, 2).graph_bytes == 0


GROUPED = KVCacheSpec(4, 1, 8, "float32", (KVGroup((0,)), KVGroup((1,), window=6)))


@given(
    st.sampled_from([SPEC, GROUPED]),
    st.integers(0, 60),
    st.none() | st.integers(1, 80),
    st.integers(0, 20),
    st.none() | st.integers(1, 400),
    st.integers(1, 9),
    st.none() | st.integers(0, 20),
)
def test_a_plan_fits_and_is_as_large_as_can_be_used(
    spec: KVCacheSpec, left: int, asked: int | None, swap: int, longest: int | None, num_seqs: int, host: int | None
) -> None:
    """Sizes are counted in blocks."""
    block = spec.bytes_per_block
    needs = MemoryNeeds(3000, 500, 70, 3500 + left * block, 0.5, None if host is None else host * block, 0)
    config = EngineConfig(
        kv_memory=None if asked is None else asked * block,
        swap_space=swap * block,
        max_model_len=longest,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=16,
    ).resolved()
    beside = left - (swap if host is None else 0)
    try:
        made = plan_memory(config, spec, 300, needs)
    except InvalidConfigError as error:
        names = {"swap_space", "kv_memory", "max_model_len", "memory of weights and activations"}
        assert error.field in names
        if error.field == "max_model_len":
            assert longest is not None and longest > 300
        elif error.field == "swap_space":
            assert (host is not None and swap > host) or beside < 1
        elif error.field == "kv_memory":
            budget = asked if asked is not None else max(1, beside // 2)
            wanted = longest if longest is not None else USEFUL_TOKENS
            assert budget > beside or spec.num_blocks_for(wanted - 1, longest_chunk=2) > budget
        else:
            assert left == 0
        return

    def needed(num_tokens: int) -> int:
        return spec.num_blocks_for(num_tokens - 1, longest_chunk=2)  # the last token is not stored

    wanted = longest or 300
    assert (made.num_host_blocks, made.bytes_per_block, made.num_groups) == (swap, block, len(spec.groups))
    assert made.num_blocks <= beside
    if asked is not None:
        assert made.num_blocks == asked
    else:
        most = spec.num_blocks_for(wanted, longest_chunk=2) * num_seqs
        assert made.num_blocks == min(max(1, int(beside * 0.5)), most)
    assert made.max_model_len == max(length for length in range(1, wanted + 1) if needed(length) <= made.num_blocks)
    assert made.num_full_sequences == made.num_blocks // max(1, needed(max(2, made.max_model_len)))
    on_device = made.num_blocks + (swap if host is None else 0)
    assert made.total_bytes == 3000 + 500 + 70 + on_device * block <= needs.free_bytes + 70  # type: ignore[operator]


@pytest.mark.parametrize(
    ("steps", "longest"), [(1, 77), (3, 77), (4, 73), (8, 69)]
)  # of 22 blocks a window of 6 takes three, or more where several tokens may be under way
def test_a_window_holds_the_tokens_of_all_steps_under_way(steps: int, longest: int) -> None:
    config = EngineConfig(kv_memory=22 * GROUPED.bytes_per_block, max_steps_under_way=steps).resolved()
    made = plan_memory(config, GROUPED, 4096, NEEDS)
    assert made.max_model_len == longest


def test_graphs_are_a_part_of_their_own() -> None:
    made = plan(needs=replace(NEEDS, graph_bytes=3 * MIB))
    assert dict(made.parts)["graphs"] == 3 * MIB
    assert made.total_bytes == sum(size for _, size in made.parts)
    assert "graphs" not in dict(plan().parts)
    with pytest.raises(InvalidConfigError) as caught:
        plan(needs=replace(NEEDS, graph_bytes=88 * MIB))
    assert str(caught.value) == (
        "memory of weights and activations is '100.0 MiB'; allowed: less than the 100.0 MiB of free memory"
    )


def test_the_rest_of_a_swap_block_is_left_to_kv_blocks() -> None:
    block = SPEC.bytes_per_block
    needs = replace(NEEDS, free_bytes=NEEDS.weight_bytes + NEEDS.activation_bytes + 5 * block)
    made = plan(needs=needs, swap_space=2 * block - 1, max_model_len=16, kv_memory=4 * block)
    assert (made.num_blocks, made.num_host_blocks) == (4, 1)


def test_the_largest_swap_that_is_said_to_fit_does() -> None:
    needs = replace(NEEDS, free_bytes=12 * MIB + 4 * SPEC.bytes_per_block)
    with pytest.raises(InvalidConfigError) as caught:
        plan(needs=needs, swap_space=4 * SPEC.bytes_per_block)
    assert str(caught.value) == (
        "swap_space is '128.0 KiB'; allowed: at most 96.0 KiB, to leave room for the KV memory"
    )
    assert plan(needs=needs, swap_space=0, max_model_len=32, kv_memory=4 * SPEC.bytes_per_block).num_blocks == 4
    made = plan(needs=needs, swap_space=2 * SPEC.bytes_per_block, max_model_len=16, kv_memory=2 * SPEC.bytes_per_block)
    assert (made.num_blocks, made.num_host_blocks) == (2, 2)
