"""From a budget to blocks, and from blocks to the longest sequence."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quire.core.errors import InvalidConfigError
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.memory.sizing import max_beam_tokens, max_sequence_tokens, size_pool

LLAMA_31_8B = KVCacheSpec.from_layers([None] * 32, block_size=16, num_kv_heads=8, head_dim=128, dtype="float16")
BLOCK = 2 << 20


def test_a_budget_divides_into_blocks_of_2_mib_for_llama_31_8b() -> None:
    assert size_pool(10 * BLOCK + 5, LLAMA_31_8B) == 10


@given(st.integers(BLOCK, 1 << 45))
def test_blocks_leave_less_than_a_block_of_the_budget(budget: int) -> None:
    assert 0 <= budget - size_pool(budget, LLAMA_31_8B) * BLOCK < BLOCK


def test_one_block_is_the_least() -> None:
    assert size_pool(BLOCK, LLAMA_31_8B) == 1
    with pytest.raises(InvalidConfigError, match=rf"kv_memory is {BLOCK - 1}; allowed: {BLOCK} bytes \(one block\)"):
        size_pool(BLOCK - 1, LLAMA_31_8B)


@pytest.mark.parametrize("budget", [0, -1, True, float(BLOCK), float("nan"), float("inf"), None, "4GB"])
def test_a_budget_that_is_none_is_refused(budget: object) -> None:
    with pytest.raises(InvalidConfigError, match="kv_memory"):
        size_pool(budget, LLAMA_31_8B)  # type: ignore[arg-type]


def test_full_attention_holds_as_many_tokens_as_slots() -> None:
    assert max_sequence_tokens(100, LLAMA_31_8B) == 1600


def test_groups_share_the_blocks() -> None:
    spec = KVCacheSpec(16, 1, 8, "float32", (KVGroup((0,)), KVGroup((1,))))
    assert max_sequence_tokens(101, spec) == 50 * 16


def test_with_windows_alone_a_sequence_has_no_end() -> None:
    spec = KVCacheSpec(16, 1, 8, "float32", (KVGroup((0,), window=32),))
    assert max_sequence_tokens(3, spec) == 1 << 30
    assert max_sequence_tokens(2, spec) == 32


@given(
    num_blocks=st.integers(1, 40),
    block_size=st.integers(1, 8),
    windows=st.lists(st.one_of(st.none(), st.integers(1, 20)), min_size=1, max_size=4),
    longest_chunk=st.integers(1, 9),
)
def test_the_longest_sequence_fits_and_one_token_more_does_not(
    num_blocks: int, block_size: int, windows: list[int | None], longest_chunk: int
) -> None:
    groups = tuple(KVGroup((layer,), window) for layer, window in enumerate(windows))
    spec = KVCacheSpec(block_size, 1, 8, "float32", groups)
    longest = max_sequence_tokens(num_blocks, spec, longest_chunk=longest_chunk)
    assert spec.num_blocks_for(longest, longest_chunk=longest_chunk) <= num_blocks
    if longest < 1 << 30:
        assert spec.num_blocks_for(longest + 1, longest_chunk=longest_chunk) > num_blocks


@given(
    num_blocks=st.integers(1, 40),
    block_size=st.integers(1, 6),
    windows=st.lists(st.one_of(st.none(), st.integers(1, 12)), max_size=2),
    num_beams=st.integers(2, 5),
    num_prompt_tokens=st.integers(1, 30),
)
def test_the_longest_beams_fit_and_those_of_one_token_more_do_not(
    num_blocks: int, block_size: int, windows: list[int | None], num_beams: int, num_prompt_tokens: int
) -> None:
    """Full blocks of the prompt are shared, in the groups without a window; each beam has all others to itself."""
    groups = tuple(KVGroup((layer,), window) for layer, window in enumerate([None, *windows]))
    spec = KVCacheSpec(block_size, 1, 8, "float32", groups)

    def num_held(num_tokens: int) -> int:
        held = set()
        for group, kind in enumerate(groups):
            for beam in range(num_beams):
                for index in range(spec.most_blocks(kind, num_tokens)):
                    is_shared = kind.window is None and (index + 1) * block_size <= num_prompt_tokens
                    held.add((group, 0 if is_shared else beam, index))
        return len(held)

    longest = max_beam_tokens(num_blocks, spec, num_beams, num_prompt_tokens)
    assert num_held(longest) <= num_blocks < num_held(longest + 1)


def test_beams_of_a_pool_that_is_too_small_have_no_room_at_all() -> None:
    assert max_beam_tokens(2, LLAMA_31_8B, num_beams=3, num_prompt_tokens=5) == 0
    assert max_beam_tokens(3, LLAMA_31_8B, num_beams=3, num_prompt_tokens=5) == 16
    assert max_beam_tokens(3, LLAMA_31_8B, num_beams=3, num_prompt_tokens=48) == 48
    assert max_beam_tokens(1, LLAMA_31_8B, num_beams=1, num_prompt_tokens=1) == 16
