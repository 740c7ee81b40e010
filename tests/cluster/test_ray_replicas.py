"""A server whose engines are on a Ray cluster: each kind of process is killed or stopped, and no text changes."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.ray_cluster import SETTINGS, ClusterHome, both_ready, metric, texts
from support.served_process import ServedProcess, served_process
from support.waiting import wait_until


@pytest.fixture(scope="module")
def server(home: ClusterHome, cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    with served_process(tmp_path_factory.mktemp("server"), "--replicas", "ray:2", *SETTINGS) as server:
        yield server


def test_engines_are_on_the_cluster(home: ClusterHome, server: ServedProcess, calm: list[Any]) -> None:
    both_ready(server)
    assert server.engines == []  # the server has no engine among its children
    assert len(home.relays) == len(home.engines) == 2
    assert texts(server) == calm
    for engine in home.engines:
        names = {entry.split(b"=")[0] for entry in Path(f"/proc/{engine}/environ").read_bytes().split(b"\0")}
        assert not [name for name in names if name.startswith(b"RAY_")]  # the token is not for engines


@pytest.mark.parametrize("which", ["engines", "relays"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_texts_go_on_when_a_process_is_lost(
    home: ClusterHome, server: ServedProcess, calm: list[Any], which: str, how: signal.Signals
) -> None:
    both_ready(server)
    restarts, before = metric(server, "quire_replica_restarts_total"), {*home.relays, *home.engines}
    lost = getattr(home, which)[0]

    assert texts(server, lambda: os.kill(lost, how)) == calm
    wait_until(lambda: metric(server, "quire_replica_restarts_total") == restarts + 1)
    both_ready(server)
    assert metric(server, "quire_texts_continued_total") > 0
    wait_until(lambda: len(home.relays) == len(home.engines) == 2)  # of what was lost nothing is left
    assert len(before & {*home.relays, *home.engines}) == 2


def test_a_rolling_restart_ends_no_text(home: ClusterHome, server: ServedProcess, calm: list[Any]) -> None:
    both_ready(server)
    engines = home.engines

    def restart() -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}/restart_engines", method="POST")
        urllib.request.urlopen(request, timeout=300).close()

    assert texts(server, restart) == calm
    assert not set(engines) & set(home.engines)


def test_nothing_is_left_of_a_server_that_is_killed(home: ClusterHome, server: ServedProcess) -> None:
    both_ready(server)
    server.kill()
    wait_until(lambda: not home.relays and not home.engines)
