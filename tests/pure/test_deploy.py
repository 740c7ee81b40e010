"""What is deployed: the files parse, and the board shows numbers that the server tells. No container is run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cli.options import environment_name
from quire.core.clock import ManualClock
from quire.core.config import EngineConfig
from quire.engine.records.stats import EngineStats
from quire.serve.config import ServerConfig
from quire.serve.gate import Gate, GateLimits
from quire.serve.metrics import CallMetrics, Metrics
from quire.serve.model import ModelState
from quire.serve.prometheus import render

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ROOT = DEPLOY.parent
METRIC = re.compile(r"\b(?:quire|process)_[a-z0-9_]+")


def read_yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/quire.json").read_text(encoding="utf-8"))
    return found


def told() -> dict[str, str]:
    """The kind of each metric that the server tells."""
    gate = Gate(ManualClock(), GateLimits(4, 4), lambda: ModelState.READY)
    families = Metrics().families(gate, ModelState.READY, EngineStats(), "guide")
    text = render([*CallMetrics().families(), *families]).decode()
    return dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE "))


def expressions() -> list[str]:
    return [target["expr"] for panel in board()["panels"] for target in panel["targets"]]


def test_the_board_shows_only_what_the_server_tells() -> None:
    kinds = told()
    names = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(names) > 15
    unknown = [name for name in names if name not in kinds and kinds.get(name.removesuffix("_bucket")) != "histogram"]
    assert not unknown


@pytest.mark.parametrize("expression", expressions())
def test_what_only_grows_is_shown_as_a_rate(expression: str) -> None:
    kinds = told()
    for name in METRIC.findall(expression):
        grows = kinds.get(name) == "counter" or name.endswith("_bucket")
        assert grows == (f"rate({name}[" in expression), name
    assert expression.count("(") == expression.count(")")


def test_panels_have_places_of_their_own() -> None:
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    assert all(panel["title"] and panel["description"] for panel in panels)
    assert {name for panel in panels for name in re.findall(r"\$\{(\w+)\}", panel["datasource"]["uid"])} == {
        variable["name"] for variable in board()["templating"]["list"]
    }


def test_the_services_name_files_that_exist_and_settings_that_there_are() -> None:
    services = read_yaml("compose.yaml")["services"]
    assert set(services) == {"quire", "prometheus", "grafana"}
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), source
    quire = services["quire"]
    assert (DEPLOY / quire["build"]["context"] / quire["build"]["dockerfile"]).is_file()
    assert quire["read_only"] and quire["cap_drop"] == ["ALL"]
    assert float(quire["stop_grace_period"].removesuffix("s")) > ServerConfig().drain_timeout_s
    known = {environment_name(name) for config in (EngineConfig, ServerConfig) for name in config.__dataclass_fields__}
    assert {entry.split("=")[0] for entry in quire["environment"]} <= known
    port = quire["ports"][0].rpartition(":")[2]
    [job] = read_yaml("prometheus/prometheus.yaml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"quire:{port}"]}]
    assert "QUIRE_ALLOWED_HOST=quire" in quire["environment"]  # or Prometheus would be refused


def test_grafana_is_given_the_source_and_the_board() -> None:
    [source] = read_yaml("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090"
    [provider] = read_yaml("grafana/provisioning/dashboards/quire.yaml")["providers"]
    mounts = dict(volume.split(":")[1::-1] for volume in read_yaml("compose.yaml")["services"]["grafana"]["volumes"])
    assert (DEPLOY / mounts[provider["options"]["path"]] / "quire.json").is_file()


def test_the_image_is_built_from_files_that_are_there_and_runs_as_nobody() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for words in lines:
        if words[0] == "COPY" and not words[1].startswith("--from"):
            for name in words[1:-1]:
                assert (ROOT / name).exists() and f"!{name}" in ignored, name
    instructions = [words[0] for words in lines]
    assert instructions.count("FROM") == 2
    assert instructions.index("USER") < instructions.index("ENTRYPOINT")
    [user] = [words[1] for words in lines if words[0] == "USER"]
    assert int(user.split(":")[0]) > 0
    [check] = [line for line in text.splitlines() if "CMD" in line and "livez" in line]
    command = json.loads(check.partition("CMD ")[2])
    compile(command[2], "healthcheck", "exec")
    assert json.loads(next(line for line in text.splitlines() if line.startswith("CMD ")).removeprefix("CMD ")) == [
        "serve"
    ]
