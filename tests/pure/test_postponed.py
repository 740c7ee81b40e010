"""Entries that the executor postpones: the same tokens come later, and nobody else waits for them."""

from __future__ import annotations

from random import Random

import pytest

from support.control import Control


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_postponed_entry_is_planned_again_with_the_same_token(num_steps: int) -> None:
    control = Control(max_steps_under_way=num_steps)
    control.add("a", [1, 2, 3, 4, 5], max_tokens=6)
    control.add("b", [9, 8, 7], max_tokens=6)
    chance = Random(3)
    control.executor.is_late = lambda: chance.random() < 0.5
    control.run()
    control.check_outputs()
    assert control.executor.num_postponed > 3


@pytest.mark.parametrize("num_tokens", [8, 9, 11])
def test_nobody_waits_for_the_blocks_of_a_postponed_prompt(num_tokens: int) -> None:
    """Its last block may end with the very token that is to be computed again."""
    control = Control(block_size=4, max_num_batched_tokens=64)
    prompt = list(range(1, num_tokens + 1))
    control.add("late", prompt, max_tokens=2)
    late = control.requests["late"]
    control.executor.is_late = lambda: True
    control.step()
    control.executor.is_late = lambda: False
    control.add("other", [*prompt, 40, 41], max_tokens=2)
    control.step()
    assert control.requests["other"].num_computed or control.requests["other"].is_finished
    assert late.num_preemptions == 0
    control.run()
    control.check_outputs()
