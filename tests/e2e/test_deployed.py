"""What is deployed runs as it is written: the image's command with a mounted model, and the unit of systemd."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import quire
from quire import cli
from quire.serve.config import ServerConfig
from quire.serve.server import END_S

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
UNIT = ROOT / "deploy" / "systemd" / "quire.service"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def image_environment(cache: Path, port: int) -> dict[str, str]:
    """The environment in the container, with paths of this machine in place of those of the image."""
    [words] = [line.split()[1:] for line in DOCKERFILE.splitlines() if line.startswith("ENV ")]
    found = dict(word.split("=", 1) for word in words)
    return found | {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": "/nonexistent",
        "HF_HOME": str(cache),
        "QUIRE_PORT": str(port),
        "QUIRE_ALLOWED_HOST": "localhost",
    }


def test_the_image_s_command_serves_a_mounted_model(tmp_path: Path) -> None:
    model, cache, port = tmp_path / "model", tmp_path / "cache", free_port()
    shutil.copytree(Path(quire.__file__).parent / "guide", model)
    for path in (*model.iterdir(), model):
        path.chmod(0o555 if path.is_dir() else 0o444)
    cache.mkdir()
    page = (ROOT / "docs" / "how-to" / "deploy.md").read_text(encoding="utf-8").replace("\\\n", " ")
    [words] = [line.split() for line in page.splitlines() if ":/model:ro" in line]
    command = words[words.index("quire") + 1 :]
    assert command == ["serve", "/model"]
    [entry] = [json.loads(line.partition(" ")[2]) for line in DOCKERFILE.splitlines() if line.startswith("ENTRYPOINT ")]
    [check] = [json.loads(line.partition("CMD ")[2]) for line in DOCKERFILE.splitlines() if "livez" in line]
    environment = image_environment(cache, port)
    with subprocess.Popen([*entry, "serve", str(model)], env=environment, cwd="/", stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            assert any(line.startswith(b"ready") for line in server.stdout)
            subprocess.run(check, env=environment, cwd="/", check=True, timeout=300)
            with urllib.request.urlopen(f"http://localhost:{port}/v1/models", timeout=300) as answer:
                assert [each["id"] for each in json.load(answer)["data"]] == ["model"]
        finally:
            server.send_signal(getattr(signal, DOCKERFILE.split("STOPSIGNAL ")[1].split()[0]))
    assert server.returncode == cli.DONE
    assert not list(cache.iterdir())


def unit() -> dict[str, list[str]]:
    """The settings of the unit's service, each with all its values."""
    reader = configparser.RawConfigParser(strict=True)
    reader.optionxform = str  # type: ignore[assignment,method-assign]
    reader.read(UNIT)
    return {name: value.split() for name, value in reader["Service"].items()}


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    service = unit()
    words = service["ExecStart"]
    assert words[:3] == ["/opt/quire/bin/quire", "serve", "--config"]
    assert float(service["TimeoutStopSec"][0]) > ServerConfig().drain_timeout_s + END_S
    assert service["RestartPreventExitStatus"] == [str(cli.MISUSED)]
    assert "/".join(("/var/cache", *service["CacheDirectory"])) in " ".join(service["Environment"])
    page = (ROOT / "docs" / "how-to" / "deploy.md").read_text(encoding="utf-8")
    for path in re.findall(r"/(?:etc|opt)/[\w./-]*quire[\w.]*", " ".join([*words, *service["EnvironmentFile"]])):
        assert path.removesuffix("/bin/quire") in page
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        here = tmp_path / UNIT.name
        here.write_text(UNIT.read_text().replace("/opt/quire/bin/quire", str(Path(sys.executable).parent / "quire")))
        done = subprocess.run([analyze, "verify", here], capture_output=True, text=True, timeout=300, check=False)
        assert (done.returncode, done.stderr) == (0, "")
