"""`quire bench fairness`: the shares that fair_share gives tenants with different traffic, and a newcomer's wait.

Uses the real scheduler and memory over a simulated model. So all results are counts of tokens and steps, and are the
same on any machine.
"""

from __future__ import annotations

import argparse

from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.request import CacheScope, Request
from quire.core.sampling_params import SamplingParams
from quire.instruments.bench.busy_tenants import VOCAB_SIZE, BusyTenants, Habit, worst_miss
from quire.reporting.report import Goal, Section
from quire.reporting.results import Tell, run_benchmark

POLICIES = ("fcfs", "fair_share")
FAIR = 0.05
NUM_ROWS = 8
NUM_TOKENS = 120_000
PAIRS = (
    ("2 tokens, and 65", Habit(2, 2), Habit(2, 65), 16),
    ("2 tokens, and 65; blocks of 256", Habit(2, 2), Habit(2, 65), 256),
    ("texts that end by a stop string", Habit(8, 10, "stop string"), Habit(8, 10), 16),
    ("answers that are aborted", Habit(8, 40, "abort"), Habit(8, 40), 16),
    ("requests that fail", Habit(8, 40, "failure"), Habit(8, 40), 16),
    ("two samples each", Habit(30, 20, "samples"), Habit(30, 20), 16),
    ("searches with two beams", Habit(30, 20, "beams"), Habit(30, 20), 16),
    ("long prompts", Habit(600, 5), Habit(10, 60), 16),
)
FLOODS = (
    ("200 answers of 2,000 tokens", 200, 16, SamplingParams(max_tokens=2000)),
    ("twice n = 32 answers of 2,000 tokens", 2, 16, SamplingParams(max_tokens=2000, n=32)),
    ("200 prompts of 24,000 tokens", 200, 24_000, SamplingParams(max_tokens=100)),
)


DESCRIPTION = (
    "Count the tokens that fair_share gives tenants whose requests differ in length and in the way they end, and "
    "the steps that a small request waits for its first token while another tenant's requests fill the engine."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare no flags: this benchmark has none."""


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""
    return run_benchmark(
        options, "Fair share", lambda tell: [measure_shares(tell), measure_newcomers(tell)], timed=False
    )


def measure_shares(tell: Tell) -> Section:
    """Run pairs of tenants with endless requests; return each tenant's share of the computed tokens."""
    rows, misses = [], {}
    for name, first, second, block_size in PAIRS:
        tell(f"fairness: {name}")
        config = SchedulerConfig(policy="fair_share", max_num_seqs=NUM_ROWS, max_num_batched_tokens=256)
        busy = BusyTenants([first, second], config, block_size=block_size, at_once=4 * NUM_ROWS)
        computed = busy.run(NUM_TOKENS)
        misses[name] = worst_miss(computed)
        shares = (f"{100 * computed[tenant] / computed.total():.1f} %" for tenant in "ab")
        rows.append((name, *shares, *(f"{busy.ended[tenant]:,}" for tenant in "ab")))
    about = (
        f"Two tenants, each with {4 * NUM_ROWS} requests in an engine of {NUM_ROWS} rows, until {NUM_TOKENS:,} tokens "
        "are computed. The row describes the first tenant's requests; the second tenant's answers end by their length."
    )
    header = ("what the first asks", "its share", "the other's", "its answers", "the other's")
    goals = [Goal(f"{name}: share misses the half by, %", 100 * miss, 100 * FAIR) for name, miss in misses.items()]
    return Section("Shares", about, header, rows, {"misses": misses}, goals)


def measure_newcomers(tell: Tell) -> Section:
    """Fill the engine with one tenant's requests, then send a small one of another; return the steps that it waits."""
    rows, waits = [], {}
    for name, count, num_prompt_tokens, sampling in FLOODS:
        tell(f"fairness: {name}")
        prompts = [[(number + index) % VOCAB_SIZE for index in range(num_prompt_tokens)] for number in range(count)]
        waits[name] = {policy: _steps_to_first_token(policy, prompts, sampling) for policy in POLICIES}
        rows.append((name, *(f"{waits[name][policy]:,}" for policy in POLICIES)))
    about = (
        "Steps of 512 tokens until a prompt of 100 tokens has its first token. 20 steps earlier, another tenant sent "
        "the requests named in the row. The engine has 64 rows, and memory for all of them."
    )
    header = ("what the other tenant asked", *POLICIES)
    goals = [Goal(f"during {name}: steps", wait["fair_share"], 5) for name, wait in waits.items()]
    return Section("Newcomers", about, header, rows, {"steps": waits}, goals)


def _steps_to_first_token(policy: str, prompts: list[list[int]], sampling: SamplingParams) -> int:
    config = SchedulerConfig(policy=policy, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=32_768)
    engine = BusyTenants([], config, block_size=16, at_once=0, memory=MemoryConfig(num_blocks=200_000)).engine
    for number, prompt in enumerate(prompts):
        engine.add_request(Request(f"flood {number}", prompt, sampling, scope=CacheScope("flood")))
    for _ in range(20):
        engine.step()
    newcomer = Request("newcomer", range(100), SamplingParams(max_tokens=2), scope=CacheScope("newcomer"))
    engine.add_request(newcomer)
    num_steps = 0
    while not newcomer.num_output_tokens:
        engine.step()
        num_steps += 1
    return num_steps
