"""The cluster itself: started, joined, refused, and a machine that is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.ray_cluster import SETTINGS, ClusterHome, both_ready, metric, text, texts
from support.served_process import served_process
from support.waiting import wait_until


def test_a_server_without_a_cluster_starts_one(home: ClusterHome, tmp_path: Path) -> None:
    os.environ["RAY_ADDRESS"] = "local"
    try:
        with served_process(tmp_path, "--replicas", "ray:2", *SETTINGS) as server:
            both_ready(server)
            assert text(server, 1)[2] > 0
    finally:
        del os.environ["RAY_ADDRESS"]


def test_status_lists_the_machines(home: ClusterHome, cluster: str) -> None:
    status = home.run("cluster", "status")
    assert status.returncode == 0
    assert re.fullmatch(r"\S+ +\d+ CPUs?(, \d+ GPUs?)?, [\d.]+ .iB\n", status.stdout), status.stdout


def serve(*arguments: str) -> list[str]:
    return ["serve", "guide", "--port", "0", "--replicas", *arguments]


@pytest.mark.parametrize("command", [serve("ray:2"), ["cluster", "status"]], ids=["serve", "status"])
def test_a_wrong_token_is_refused(home: ClusterHome, cluster: str, tmp_path: Path, command: list[str]) -> None:
    token = tmp_path / "token"
    token.write_text("0" * 64)
    token.chmod(0o600)
    refused = home.run(*command, RAY_ADDRESS=cluster, RAY_AUTH_TOKEN_PATH=str(token))
    assert refused.returncode == 1
    assert refused.stdout.count("\n") == 1
    assert f"no cluster at {cluster} accepts the token in {token}" in refused.stdout


def test_a_machine_with_a_wrong_token_cannot_join(home: ClusterHome, cluster: str, tmp_path: Path) -> None:
    refused = home.run("cluster", "join", cluster, RAY_AUTH_TOKEN="0" * 64)
    assert refused.returncode == 1
    assert refused.stdout.startswith("quire: error: ray start: ")
    assert "token is missing or incorrect" in refused.stdout


def test_a_second_cluster_at_one_port_is_refused(home: ClusterHome, cluster: str) -> None:
    refused = home.run("cluster", "start", "--port", cluster.partition(":")[2])
    assert refused.returncode == 1
    assert refused.stdout.startswith("quire: error: ray start: ") and "already running" in refused.stdout


def test_a_model_that_a_machine_does_not_have(home: ClusterHome, cluster: str, tmp_path: Path) -> None:
    """The server reads the model, and its path is gone when the engine wants it."""
    from quire.guide import GUIDE_FOLDER

    model = tmp_path / "model"
    model.symlink_to(GUIDE_FOLDER)
    command = [sys.executable, "-m", "quire", "serve", str(model), "--port", "0", "--replicas", "ray:1", *SETTINGS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()  # the start-up table: it was read here
        model.unlink()
        assert process.wait(timeout=300) == 1
        assert f"{model}" in process.stderr.read().splitlines()[-1]


def test_texts_go_on_when_a_machine_is_lost(home: ClusterHome, cluster: str, calm: list[Any], tmp_path: Path) -> None:
    """A second raylet is a machine to Ray."""
    before = set(home.processes("raylet/raylet"))
    joined = home.run("cluster", "join", cluster)
    assert (joined.returncode, joined.stdout) == (0, f"joined      {cluster}\n")
    (raylet,) = set(home.processes("raylet/raylet")) - before
    assert home.run("cluster", "status").stdout.count(" CPU") == 2

    with served_process(tmp_path, "--replicas", "ray:2", *SETTINGS) as server:
        both_ready(server)
        assert [home.parent(relay) for relay in home.relays].count(raylet) == 1
        lost = [relay for relay in home.relays if home.parent(relay) == raylet]

        def lose() -> None:
            os.kill(raylet, signal.SIGKILL)
            for relay in lost:
                os.kill(relay, signal.SIGKILL)  # as fast as a machine would

        assert texts(server, lose) == calm
        wait_until(lambda: metric(server, "quire_replica_restarts_total") == 1)
        both_ready(server)
        assert len(home.relays) == len(home.engines) == 2
