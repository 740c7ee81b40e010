"""Engines on a Ray cluster that have prefixes from each other, through Ray's object store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.ray_cluster import ClusterHome, both_ready, metric
from support.served_process import ServedProcess, served_process
from support.waiting import wait_until

NUM_USERS = 24  # more than the engine that holds the prefix is given before the other one has less work
MOST_TRIES = 30


def answers(server: ServedProcess, prefix: list[int]) -> list[Any]:
    def ask(number: int) -> Any:
        answer = server.complete({"prompt": [*prefix, number], "max_tokens": 20, "seed": 3, "ignore_eos": True})
        return answer["choices"][0]

    with ThreadPoolExecutor(NUM_USERS) as pool:
        return list(pool.map(ask, range(5, 5 + NUM_USERS)))


def test_an_engine_has_a_prefix_from_another_machine(home: ClusterHome, cluster: str, tmp_path: Path) -> None:
    options = ("--kv-memory", "64MiB", "--max-num-seqs", "32", "--disk-cache", str(tmp_path / "cache"))
    with served_process(tmp_path, "--replicas", "ray:2", *options) as server:
        both_ready(server)
        for number in range(MOST_TRIES):  # on a busy machine one may be late, or not seem worth it
            prefix = [5 + (number + index * index) % 900 for index in range(1900)]
            server.complete({"prompt": prefix, "max_tokens": 1})
            told = answers(server, prefix)
            wait_until(lambda: metric(server, "quire_requests_running") == 0)
            assert answers(server, prefix) == told
            if metric(server, "quire_prefix_fetched_blocks_total"):
                break
        assert metric(server, "quire_prefix_fetched_bytes_total") > 0
        wait_until(lambda: not list((tmp_path / "cache").glob("incoming-*")))
