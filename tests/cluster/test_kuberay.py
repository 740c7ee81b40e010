"""What the manifest for KubeRay starts, with the operator's own command in place of the operator."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from support.ray_cluster import SETTINGS, ClusterHome, text
from support.served_process import served_process
from support.waiting import wait_until

MANIFEST = Path(__file__).resolve().parents[2] / "deploy/kubernetes/cluster.yaml"


@pytest.fixture
def pod_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterHome]:
    """A home of its own, with a token as the operator gives it."""
    folder = Path(tempfile.mkdtemp(prefix="qk-", dir="/tmp"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "HOME": str(folder),
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "7" * 64,
        "RAY_ADDRESS": f"127.0.0.1:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    found = ClusterHome(folder)
    try:
        yield found
    finally:
        found.end_all()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_head_without_engines_serves_with_those_of_its_workers(pod_home: ClusterHome, tmp_path: Path) -> None:
    address = os.environ["RAY_ADDRESS"]
    started = pod_home.run("cluster", "start", "--no-engines", "--host", "127.0.0.1", "--port", address.split(":")[1])
    assert started.returncode == 0, started.stdout
    [head] = pod_home.processes("raylet/raylet")
    status = pod_home.run("cluster", "status")
    assert "0 CPUs" in status.stdout

    [cluster] = [each for each in yaml.safe_load_all(MANIFEST.read_text()) if each["kind"] == "RayCluster"]
    [workers] = cluster["spec"]["workerGroupSpecs"]
    given = {**workers["rayStartParams"], "node-manager-port": "0", "address": address}
    options = [f"--{name}={value}" for name, value in given.items()]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--block"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as worker:
        wait_until(lambda: len(pod_home.processes("raylet/raylet")) == 2)
        with served_process(tmp_path, "--replicas", "ray:1", *SETTINGS, "--num-threads", "1") as server:
            assert text(server, 1)[2] > 0
            [relay] = pod_home.relays
            assert pod_home.parent(relay) != head
        worker.terminate()
