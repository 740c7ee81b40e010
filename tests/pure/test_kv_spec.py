"""KVCacheSpec: layers into groups, groups into bytes and blocks."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quire.core.errors import InvalidConfigError
from quire.core.kv_spec import SHARED, KVCacheSpec, KVGroup, KVHeads

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_dim": 128, "dtype": "float16"}
GEMMA_3_1B = [None if (layer + 1) % 6 == 0 else 512 for layer in range(26)]
WINDOWS = st.lists(st.sampled_from([None, None, 16, 512]), min_size=1, max_size=64)


def test_a_model_with_one_kind_of_attention_has_one_group() -> None:
    spec = KVCacheSpec.from_layers([None] * 28, **SHAPE)
    assert spec.groups == (KVGroup(tuple(range(28))),)
    assert spec.padding_fraction == 0.0


def test_a_block_of_llama_31_8b_has_2_mib() -> None:
    spec = KVCacheSpec.from_layers([None] * 32, **SHAPE)
    assert spec.bytes_per_layer_token == 2 * 8 * 128 * 2
    assert spec.bytes_per_token == 128 << 10
    assert spec.bytes_per_block == 2 << 20


def test_gemma_3_1b_has_one_full_group_and_six_with_a_window() -> None:
    spec = KVCacheSpec.from_layers(GEMMA_3_1B, block_size=16, num_kv_heads=1, head_dim=256, dtype="bfloat16")
    assert [(len(group.layers), group.window) for group in spec.groups] == [(4, None), *[(4, 512)] * 5, (2, 512)]
    assert spec.groups[0].layers == (5, 11, 17, 23)
    assert spec.groups[1].layers == (0, 1, 2, 3)
    assert spec.padding_fraction == pytest.approx(2 / 28)
    assert spec.bytes_per_token == 26 * 1024
    assert spec.bytes_per_block == 16 * 4 * 1024, "four layers, whichever group holds the block"


@given(WINDOWS)
def test_every_layer_is_in_one_group_of_its_own_kind(windows: list[int | None]) -> None:
    spec = KVCacheSpec.from_layers(windows, **SHAPE)
    assert sorted(layer for group in spec.groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in spec.groups for layer in group.layers)


@given(WINDOWS)
def test_groups_are_of_one_size_with_little_padding(windows: list[int | None]) -> None:
    spec = KVCacheSpec.from_layers(windows, **SHAPE)
    room = spec.num_places * len(spec.groups)
    assert room - len(windows) <= 0.10 * room
    assert spec.padding_fraction == pytest.approx(1 - len(windows) / room)
    assert spec.bytes_per_block * len(spec.groups) >= spec.bytes_per_token * spec.block_size


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ([None, 8], [1, 1]),
        ([None] * 3 + [8] * 3, [3, 3]),
        ([None] * 2 + [8] * 4, [2, 2, 2]),
        ([None] + [8] * 9, [1] * 10),
        ([None] * 9 + [8] * 10, [9, 10]),
    ],
)
def test_the_largest_size_with_little_padding_is_chosen(windows: list[int | None], sizes: list[int]) -> None:
    assert [len(group.layers) for group in KVCacheSpec.from_layers(windows, **SHAPE).groups] == sizes


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_bytes_follow_the_data_type(dtype: str, num_bytes: int) -> None:
    assert KVCacheSpec.from_layers([None], **SHAPE | {"dtype": dtype}).bytes_per_token == 2 * 8 * 128 * num_bytes


def test_a_head_of_int8_has_a_scale() -> None:
    assert KVCacheSpec.from_layers([None], **SHAPE | {"dtype": "int8"}).bytes_per_token == 2 * 8 * (128 + 4)


@pytest.mark.parametrize(("window", "position", "first"), [(None, 99, 0), (1, 9, 9), (4, 2, 0), (4, 3, 0), (4, 4, 1)])
def test_a_query_reads_back_to_the_begin_of_its_window(window: int | None, position: int, first: int) -> None:
    assert KVGroup((0,), window).first_needed(position) == first


@given(
    block_size=st.integers(1, 8),
    window=st.one_of(st.none(), st.integers(1, 20)),
    num_tokens=st.integers(0, 60),
    longest_chunk=st.integers(1, 9),
)
def test_a_sequence_never_holds_more_than_its_bound(
    block_size: int, window: int | None, num_tokens: int, longest_chunk: int
) -> None:
    group = KVGroup((0,), window)
    bound = KVCacheSpec(block_size, 1, 8, "float32", (group,)).num_blocks_for(num_tokens, longest_chunk=longest_chunk)
    held = [
        (end - 1) // block_size - group.first_needed(start) // block_size + 1
        for start in range(num_tokens)
        for end in range(start + 1, min(start + longest_chunk, num_tokens) + 1)
    ]
    assert max(held, default=0) <= bound
    if window is None or num_tokens >= window + longest_chunk + 2 * block_size:
        assert max(held, default=0) == bound, "and the bound is reached"


def test_all_groups_together_hold_blocks() -> None:
    spec = KVCacheSpec(4, 1, 8, "float32", (KVGroup((0,)), KVGroup((1,)), KVGroup((2,), window=4)))
    assert spec.num_blocks_for(40) == 10 + 10 + 2


@pytest.mark.parametrize("value", [0, -1, 4097, 16.0, "16", True, None, float("nan")])
def test_a_block_size_out_of_range_is_refused(value: object) -> None:
    with pytest.raises(InvalidConfigError, match=r"block_size is .*; allowed: an integer from 1 to 4096"):
        KVCacheSpec.from_layers([None], **SHAPE | {"block_size": value})


@pytest.mark.parametrize("field", ["num_kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -8, 65537, 8.0, "8", False, None])
def test_heads_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidConfigError, match=rf"{field} is .*; allowed: an integer from 1 to 65536"):
        KVCacheSpec.from_layers([None], **SHAPE | {field: value})


@pytest.mark.parametrize("value", ["float64", "", None, 2, ["float16"]])
def test_an_unknown_data_type_is_refused(value: object) -> None:
    with pytest.raises(InvalidConfigError, match=r"dtype is .*; allowed: one of float32, bfloat16, float16, int8"):
        KVCacheSpec.from_layers([None], **SHAPE | {"dtype": value})


@pytest.mark.parametrize("window", [0, -1, 4.0, True, "4"])
def test_a_window_out_of_range_is_refused(window: object) -> None:
    with pytest.raises(InvalidConfigError, match=r"window is .*; allowed: an integer from 1"):
        KVCacheSpec(16, 8, 128, "float16", (KVGroup((0,), window),))  # type: ignore[arg-type]


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="at least one"):
        KVCacheSpec.from_layers([], **SHAPE)
    for groups in ((), (KVGroup(()),)):
        with pytest.raises(InvalidConfigError, match="at least one layer"):
            KVCacheSpec(16, 8, 128, "float16", groups)


@pytest.mark.parametrize(
    ("field", "low", "high"), [("block_size", 1, 4096), ("num_kv_heads", 1, 65536), ("head_dim", 1, 65536)]
)
def test_the_bounds_themselves_are_allowed(field: str, low: int, high: int) -> None:
    for value in (low, high):
        assert getattr(KVCacheSpec.from_layers([None], **SHAPE | {field: value}), field) == value


@pytest.mark.parametrize("window", [1, 1 << 31])
def test_a_window_may_be_of_one_token_or_of_any_context(window: int) -> None:
    assert KVCacheSpec(16, 8, 128, "float16", (KVGroup((0,), window),)).groups[0].window == window
    with pytest.raises(InvalidConfigError, match=r"^window is 2147483649; allowed: an integer from 1 to 2147483648$"):
        KVCacheSpec(16, 8, 128, "float16", (KVGroup((0,), (1 << 31) + 1),))


def test_a_step_takes_one_token_of_a_sequence_where_nothing_else_is_said() -> None:
    group = KVGroup((0,), window=17)  # 17 tokens lie in two blocks of 16 at most, 18 may lie in three
    spec = KVCacheSpec(16, 1, 8, "float32", (group,))
    assert (spec.num_blocks_for(999), spec.most_blocks(group, 999)) == (2, 2)
    assert (spec.num_blocks_for(999, longest_chunk=2), spec.most_blocks(group, 999, longest_chunk=2)) == (3, 3)


def test_full_layers_come_first_and_windows_by_their_size() -> None:
    spec = KVCacheSpec.from_layers([512, None, 16, 512, None, 16], **SHAPE)
    assert spec.groups == (KVGroup((1, 4)), KVGroup((2, 5), 16), KVGroup((0, 3), 512))


def test_a_tenth_of_a_pool_may_be_padding_and_no_more() -> None:
    assert [len(group.layers) for group in KVCacheSpec.from_layers([None] * 10 + [8] * 8, **SHAPE).groups] == [10, 8]
    assert KVCacheSpec.from_layers([None] * 10 + [8] * 8, **SHAPE).padding_fraction == pytest.approx(0.1)
    sizes = [len(group.layers) for group in KVCacheSpec.from_layers([None] * 10 + [8] * 7, **SHAPE).groups]
    assert max(sizes) < 10
    with pytest.raises(InvalidConfigError, match="at least one group"):
        KVCacheSpec(16, 8, 128, "float16", (KVGroup(()), KVGroup((), 8)))
    assert KVCacheSpec(16, 8, 128, "float16", (KVGroup(()), KVGroup((0,), 8))).num_places == 1


@pytest.mark.parametrize(
    ("dtype", "head_dim", "key", "value"),
    [
        ("bfloat16", 128, 256, 256),
        ("int8", 128, 132, 132),
        ("k8v4", 128, 132, 68),
        ("int4", 128, 80, 68),
        ("int4", 80, 52, 44),  # the last group of a key has 16 numbers, and a scale of its own
        ("int4", 1, 5, 5),
    ],
)
def test_keys_and_values_have_forms_of_their_own(dtype: str, head_dim: int, key: int, value: int) -> None:
    spec = KVCacheSpec.from_layers([None] * 2, block_size=16, num_kv_heads=8, head_dim=head_dim, dtype=dtype)
    assert (spec.key_head_bytes, spec.value_head_bytes) == (key, value)
    assert spec.bytes_per_layer_token == 8 * (key + value)
    assert spec.bytes_per_block == 16 * 2 * 8 * (key + value)


# --- layers with different heads ------------------------------------------------------------------

HEADS = st.one_of(st.none(), st.builds(KVHeads, st.integers(1, 4), st.sampled_from([16, 24, 32, 64])))
MIXED = st.lists(st.tuples(st.sampled_from([None, 16, 512, SHARED]), HEADS), min_size=1, max_size=40)
NAMES = st.sampled_from(["float32", "bfloat16", "int8", "k8v4", "int4"])


def mixed(layers: list[tuple[int | None, KVHeads | None]], **changes: Any) -> KVCacheSpec:
    settings: dict[str, Any] = {"block_size": 16, "dtype": "bfloat16", **changes}
    return KVCacheSpec.from_mixed_layers(layers, KVHeads(2, 32), **settings)


@given(MIXED, NAMES, st.sampled_from([1, 16, 32]))
def test_every_layer_has_bytes_of_its_own_in_the_blocks_of_its_group(
    layers: list[tuple[int | None, KVHeads | None]], dtype: str, step: int
) -> None:
    stored = [index for index, (window, _) in enumerate(layers) if window != SHARED]
    if not stored:
        with pytest.raises(InvalidConfigError, match="windows"):
            mixed(layers)
        return
    spec = mixed(layers, dtype=dtype).with_padded_heads(step)
    assert sorted(layer for group in spec.groups for layer in group.layers) == stored
    rooms = (spec.key_block_bytes, spec.value_block_bytes)
    assert spec.bytes_per_block == spec.num_places * sum(rooms)
    for group in spec.groups:
        assert {layers[layer][0] for layer in group.layers} == {group.window}
        assert {layers[layer][1] or KVHeads(2, 32) for layer in group.layers} == {
            mixed(layers).heads_of(other) for other in mixed(layers).groups if other.layers == group.layers
        }
        assert spec.heads_of(group).head_dim % step == 0
        assert 1 <= len(group.layers) <= spec.num_places * spec.layers_per_place(group)
        assert spec.places_of(group) <= spec.num_places
        for taken, room in zip(spec.layer_bytes(group), rooms, strict=True):
            assert spec.layers_per_place(group) * taken <= room
    assert 0.0 <= spec.padding_fraction < 1.0
    token = sum(sum(spec.layer_bytes(group)) * len(group.layers) for group in spec.groups)
    assert spec.bytes_per_token == token // 16


def test_two_full_layers_of_gemma_4_26b_share_the_place_of_one_with_a_window() -> None:
    layers = [(None, KVHeads(2, 512)) if (layer + 1) % 6 == 0 else (1024, None) for layer in range(30)]
    spec = KVCacheSpec.from_mixed_layers(layers, KVHeads(8, 256), block_size=16, dtype="bfloat16")
    assert [(len(group.layers), spec.layers_per_place(group)) for group in spec.groups] == [(5, 2), *[(5, 1)] * 5]
    assert spec.bytes_per_token == 25 * 8192 + 5 * 4096
    assert spec.bytes_per_block == 16 * 5 * 8192


def test_the_least_padding_is_chosen_if_none_is_little() -> None:
    layers = [(None, None)] + [(16, KVHeads(1, 16))] * 5  # a place has room for four of the small ones
    spec = mixed(layers)
    assert [(len(group.layers), spec.layers_per_place(group)) for group in spec.groups] == [(1, 1), (4, 4), (1, 4)]
