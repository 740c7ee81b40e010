"""A number of engines that follows the load, on a cluster."""

from __future__ import annotations

import threading
from pathlib import Path

from support.ray_cluster import SETTINGS, ClusterHome, metric
from support.served_process import served_process
from support.waiting import wait_until


def test_an_engine_comes_on_the_cluster_while_requests_would_wait(
    home: ClusterHome, cluster: str, tmp_path: Path
) -> None:
    options = (*SETTINGS, "--num-threads", "1", "--no-enable-prefix-caching")
    with served_process(tmp_path, "--replicas", "ray:1-2", *options) as server:
        assert metric(server, "quire_replica_ready") == 1
        assert len(home.relays) == 1
        is_enough = threading.Event()

        def ask() -> None:
            while not is_enough.is_set():
                server.try_to_complete({"prompt": "A block table " * 400, "max_tokens": 100, "ignore_eos": True})

        clients = [threading.Thread(target=ask, daemon=True) for _ in range(48)]
        for client in clients:
            client.start()
        try:
            wait_until(lambda: metric(server, "quire_replica_ready") == 2)
        finally:
            is_enough.set()
        assert len(home.relays) == 2
        for client in clients:
            client.join(300)
