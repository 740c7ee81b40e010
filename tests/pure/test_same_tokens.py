"""The same requests bring the same tokens, whatever runs beside them and however the engine is set.

One fixed set of requests is run in many ways. What must come out is known without any engine; that the ways really
differ (something was preempted, swapped, hit, chunked, drafted) is checked too.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from quire.core.request import CacheScope, FinishReason
from support.control import Control
from support.covering import covering
from support.simulation import make_guesser

PREFIX = [11, 3, 8, 2, 9, 40, 17, 5, 23, 31, 4, 6]
EOS = (7,)

REQUESTS: dict[str, dict[str, Any]] = {
    "long": {"prompt": [*range(30), *PREFIX], "max_tokens": 20},
    "one token": {"prompt": [1], "max_tokens": 1},
    "prefix": {"prompt": PREFIX, "max_tokens": 9},
    "same prompt": {"prompt": PREFIX, "max_tokens": 16},
    "other salt": {"prompt": PREFIX, "max_tokens": 12, "scope": CacheScope("t", "pepper")},
    "goes on": {"prompt": [*PREFIX, 1, 2, 3, 4], "max_tokens": 24, "priority": -1},
    "samples": {"prompt": [*PREFIX, 9], "max_tokens": 14, "n": 3, "scope": CacheScope("t")},
    "beams": {"prompt": [*PREFIX, 1, 2], "max_tokens": 10, "n": 2, "best_of": 3, "beam_search": True},
    "stops": {"prompt": [*PREFIX, 5], "max_tokens": 40, "stop_token_ids": tuple(range(0, 50, 4)), "min_tokens": 4},
    "no eos": {"prompt": [2, 2, 2], "max_tokens": 30, "ignore_eos": True, "priority": 2},
}
Outputs = dict[str, list[tuple[list[int], FinishReason | None]]]


def run(names: list[str], **settings: Any) -> tuple[Outputs, Control]:
    """Run the requests of these names together; check them against what is known without an engine."""
    control = Control(**{"num_blocks": 300, "eos": EOS} | settings)
    for name in names:
        control.add(name, **REQUESTS[name])
    control.run()
    outputs: Outputs = {}
    for name in names:
        assert control.outputs(name) == control.expected(name)
        outputs[name] = [(member.output_token_ids, member.finish_reason) for member in control.members(name)]
    return outputs, control


def run_all(**settings: Any) -> Control:
    """Run all requests together and compare with each of them alone."""
    outputs, control = run(list(REQUESTS), **settings)
    assert outputs == ALONE
    return control


ALONE: Outputs = {}
for _name in REQUESTS:
    ALONE |= run([_name])[0]


def test_alone_they_end_for_the_reasons_meant() -> None:
    lengths = {name: [len(tokens) for tokens, _ in ends] for name, ends in ALONE.items()}
    assert lengths["beams"] == [10] * 3
    assert lengths["no eos"] == [30]
    reasons = {reason for ends in ALONE.values() for _, reason in ends}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    stopped = ALONE["stops"][0]
    assert stopped[1] is FinishReason.STOP
    assert len(stopped[0]) >= 4


def test_batched() -> None:
    control = run_all()
    assert max(len(plan.rows) for plan in control.plans) > 8


@pytest.mark.parametrize("prefix_index", ["hash_chain", "radix_tree", "none"])
@pytest.mark.parametrize("hash_bits", [4, 128])
def test_any_prefix_index(prefix_index: str, hash_bits: int) -> None:
    control = run_all(prefix_index=prefix_index, hash_bits=hash_bits)
    assert bool(control.memory.ledger().hit_tokens) == (prefix_index != "none")


@pytest.mark.parametrize("block_size", [*range(1, 18), 23, 31, 32, 33, 48, 63, 64])
def test_any_block_size(block_size: int) -> None:
    run_all(block_size=block_size, num_blocks=500 // block_size + 40)


@pytest.mark.parametrize("windows", [(None, 6), (6,), (1,), (3, 17), (None, 40)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_any_window(windows: tuple[int | None, ...], block_size: int) -> None:
    run_all(windows=windows, block_size=block_size, num_blocks=800 // block_size + 60)


@pytest.mark.parametrize("budget", [16, 17, 23, 40, 4096])
def test_any_token_budget(budget: int) -> None:
    control = run_all(max_num_batched_tokens=budget)
    assert max(plan.num_tokens for plan in control.plans) <= budget


@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
@pytest.mark.parametrize(("num_blocks", "block_size"), [(18, 4), (69, 1), (10, 8)])
def test_a_tiny_pool(preemption: str, num_blocks: int, block_size: int) -> None:
    settings = {"num_blocks": num_blocks, "block_size": block_size, "num_host_blocks": 200, "preemption": preemption}
    control = run_all(**settings, max_steps_under_way=2)
    assert control.scheduler.num_preemptions
    swapped = any(plan.moves_in for plan in control.plans)
    assert swapped or preemption != "swap"
    assert not swapped or preemption != "recompute"


@pytest.mark.parametrize("num_blocks", [18, 300])
@pytest.mark.parametrize("max_steps_under_way", [1, 2, 3])
def test_any_number_of_steps_under_way(num_blocks: int, max_steps_under_way: int) -> None:
    run_all(num_blocks=num_blocks, max_steps_under_way=max_steps_under_way)


@pytest.mark.parametrize(
    ("policy", "eviction", "num_blocks"),
    covering(("fcfs", "priority", "fair_share"), ("lru", "fifo", "priority"), (18, 26, 300)),
)
def test_any_policy_and_eviction(policy: str, eviction: str, num_blocks: int) -> None:
    run_all(policy=policy, eviction=eviction, num_blocks=num_blocks, max_cached_blocks_per_tenant=6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_blocks", [18, 300])
def test_any_order_of_arrival(seed: int, num_blocks: int) -> None:
    names = list(REQUESTS)
    random.Random(seed).shuffle(names)
    outputs, _ = run(names, num_blocks=num_blocks)
    assert outputs == ALONE


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("num_blocks", [18, 300])
@pytest.mark.parametrize("max_steps_under_way", [1, 2])
def test_any_drafts(accuracy: float, num_blocks: int, max_steps_under_way: int) -> None:
    guess = make_guesser(accuracy, 1, lambda name: REQUESTS[name].get("scope", CacheScope()).salt)
    control = run_all(guess=guess, num_blocks=num_blocks, max_steps_under_way=max_steps_under_way)
    assert any(plan.drafts for plan in control.plans)


def test_right_drafts_take_fewer_steps() -> None:
    steps = []
    for accuracy in (0.0, 1.0):
        guess = make_guesser(accuracy, 1, lambda name: "")
        steps.append(len(run(["long"], guess=guess)[1].plans))
    assert steps[1] < steps[0]


@pytest.mark.parametrize("num_blocks", [18, 300])
def test_samples_of_a_group_go_on_as_separate_requests_would(num_blocks: int) -> None:
    control = Control(num_blocks=num_blocks)
    control.add("group", PREFIX, n=4, max_tokens=12)
    control.run()
    for branch, output in enumerate(control.outputs("group")):
        control.add(f"branch {branch}", [*PREFIX, output[0]], max_tokens=11)
    control.run()
    for branch, output in enumerate(control.outputs("group")):
        assert control.outputs(f"branch {branch}") == [output[1:]]


def test_pairs_of_requests() -> None:
    for names in itertools.combinations(REQUESTS, 2):
        outputs, _ = run(list(names), num_blocks=20)
        assert outputs == {name: ALONE[name] for name in names}
