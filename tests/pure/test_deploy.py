"""What is deployed: the files parse, and the board shows numbers that the server tells. No container is run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from quire.cli import _make_parser
from quire.cli.cluster import run_start
from quire.cli.options import environment_name
from quire.core.byte_sizes import parse_bytes
from quire.core.clock import ManualClock
from quire.core.config import EngineConfig
from quire.engine.records.stats import EngineStats
from quire.serve.config import ServerConfig
from quire.serve.frame import OPEN_PATHS
from quire.serve.gate import Gate
from quire.serve.gate_limits import GateLimits
from quire.serve.metrics import CallMetrics, Metrics
from quire.serve.model import ModelState
from quire.serve.prometheus import render
from quire.serve.server import END_S

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
    assert float(quire["stop_grace_period"].removesuffix("s")) > ServerConfig().drain_timeout_s + END_S
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


# ---- Kubernetes -----------------------------------------------------------------------------------------------------


def objects() -> dict[str, dict[str, Any]]:
    """All objects of the manifests, by kind and name."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))]
    found = [each for text in texts for each in yaml.safe_load_all(text)]
    return {f"{each['kind']} {each['metadata']['name']}": each for each in found}


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = objects()["StatefulSet quire"]["spec"]["template"]["spec"]
    return spec


VERSIONS = ("1.30", kubernetes_validate.latest_version())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", [name for name, each in objects().items() if each["apiVersion"] != "ray.io/v1"])
def test_the_manifests_are_what_the_api_of_kubernetes_takes(name: str, version: str) -> None:
    kubernetes_validate.validate(objects()[name], version, strict=True)


def test_a_misspelt_field_of_a_manifest_would_be_found() -> None:
    changed = objects()["StatefulSet quire"]
    changed["spec"]["template"]["spec"]["terminationGracePeriod"] = 75
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(changed, "1.30", strict=True)


def test_a_pod_runs_the_image_as_it_is_meant_to_run() -> None:
    [container] = pod()["containers"]
    image = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert container["image"] == read_yaml("compose.yaml")["services"]["quire"]["image"]
    assert container["args"][0] == "serve"
    assert f"USER {pod()['securityContext']['runAsUser']}:{pod()['securityContext']['runAsGroup']}" in image
    [port] = [port["containerPort"] for port in container["ports"]]
    assert f"QUIRE_PORT={port}" in image
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert f"VOLUME {mounts['cache']}" in image
    assert container["securityContext"]["readOnlyRootFilesystem"]
    paths = OPEN_PATHS
    assert container["livenessProbe"]["httpGet"]["path"] in paths - {"/readyz"}, (
        "a server that loads must not be killed"
    )
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert "/readyz" in paths


def test_the_settings_of_a_pod_are_settings_and_its_disk_cache_fits() -> None:
    [container] = pod()["containers"]
    known = {environment_name(name) for config in (EngineConfig, ServerConfig) for name in config.__dataclass_fields__}
    settings = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    assert set(settings) <= known
    services = {name.partition(" ")[2] for name in objects() if name.startswith("Service ")}
    assert "quire" in services and "quire" in settings["QUIRE_ALLOWED_HOST"].split(",")
    assert "QUIRE_PORT" in known and pod()["enableServiceLinks"] is False, "a service named quire would set QUIRE_PORT"
    [claim] = objects()["StatefulSet quire"]["spec"]["volumeClaimTemplates"]
    assert settings["QUIRE_DISK_CACHE"].startswith("/var/cache/quire/")
    room = parse_bytes(claim["spec"]["resources"]["requests"]["storage"] + "B", "storage")
    assert parse_bytes(settings["QUIRE_DISK_CACHE_SIZE"], "disk_cache_size") < room


def test_a_pod_has_time_to_end_its_requests() -> None:
    [container] = pod()["containers"]
    sleeps_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod()["terminationGracePeriodSeconds"] > sleeps_s + ServerConfig().drain_timeout_s + END_S


def test_pods_are_added_by_a_number_that_the_server_tells() -> None:
    scaler = objects()["HorizontalPodAutoscaler quire"]["spec"]
    target = scaler["scaleTargetRef"]
    assert f"{target['kind']} {target['name']}" in objects()
    assert objects()[f"{target['kind']} {target['name']}"]["apiVersion"] == target["apiVersion"]
    [metric] = [each["pods"]["metric"]["name"] for each in scaler["metrics"]]
    assert told()[metric] == "gauge"
    labels = objects()["StatefulSet quire"]["spec"]["template"]["metadata"]["labels"]
    for name in ("Service quire", "Service quire-pods"):
        assert objects()[name]["spec"]["selector"].items() <= labels.items()


# ---- a cluster of Ray -----------------------------------------------------------------------------------------------

# No package has the schema of a RayCluster. These are the fields of `ray.io/v1` that the manifest has, as the operator
# defines them (1.5 to 1.7); what is in the pods is checked against the schemas of the API.
STRING = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 1}
GROUP = {
    "rayStartParams": {"type": "object", "additionalProperties": STRING},
    "template": {"type": "object", "required": ["spec"], "properties": {"metadata": {}, "spec": {}}},
}
WORKERS = {**GROUP, "groupName": STRING, "replicas": COUNT, "minReplicas": COUNT, "maxReplicas": COUNT}


def fields(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


CLUSTER_SPEC = fields(
    {
        "rayVersion": STRING,
        "authOptions": fields({"mode": {"const": "token"}}, "mode"),
        "headGroupSpec": fields(GROUP, "template"),
        "workerGroupSpecs": {"type": "array", "items": fields(WORKERS, *WORKERS)},
    },
    "rayVersion",  # required by the operator, with a token
    "headGroupSpec",
)


def cluster() -> dict[str, Any]:
    spec: dict[str, Any] = objects()["RayCluster quire-cluster"]["spec"]
    return spec


def head() -> dict[str, Any]:
    """The container of the head."""
    [container] = cluster()["headGroupSpec"]["template"]["spec"]["containers"]
    return dict(container)


def test_a_cluster_has_the_fields_that_the_operator_knows() -> None:
    jsonschema.validate(cluster(), CLUSTER_SPEC)
    changed = cluster()
    changed["workerGroupSpecs"][0]["rayStartParams"]["num-cpus"] = 4
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed, CLUSTER_SPEC)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_pods_of_a_cluster_are_what_the_api_of_kubernetes_takes(version: str) -> None:
    for group in (cluster()["headGroupSpec"], *cluster()["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
        kubernetes_validate.validate(pod, version, strict=True)
        pod["spec"]["containers"][0]["volumeMount"] = []
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(pod, version, strict=True)


def test_the_head_of_a_cluster_runs_the_server_and_no_engine() -> None:
    annotations = cluster()["headGroupSpec"]["template"]["metadata"]["annotations"]
    assert annotations["ray.io/overwrite-container-cmd"] == "true", "or the operator would start Ray there as well"
    [script] = head()["args"]
    start, serve = (shlex.split(part) for part in script.split("&&"))
    arguments = _make_parser(start[1:]).parse_args(start[1:])
    assert arguments.run is run_start and arguments.no_engines
    assert serve[0] == "exec", "or the server would not be told to end"
    _make_parser(serve[2:]).parse_args(serve[2:])
    known = {environment_name(name) for config in (EngineConfig, ServerConfig) for name in config.__dataclass_fields__}
    assert {name for name in settings_of(head()) if name.startswith("QUIRE_")} <= known
    service = objects()["Service quire-cluster"]
    assert service["spec"]["selector"]["ray.io/cluster"] == objects()["RayCluster quire-cluster"]["metadata"]["name"]
    assert "quire-cluster" in settings_of(head())["QUIRE_ALLOWED_HOST"].split(",")


def test_each_worker_of_a_cluster_has_room_for_one_engine() -> None:
    settings = settings_of(head())
    config = ServerConfig(replicas=settings["QUIRE_REPLICAS"])
    [workers] = cluster()["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    assert config.is_on_cluster and config.num_replicas == workers["replicas"]
    assert workers["minReplicas"] == workers["replicas"] == workers["maxReplicas"]
    assert settings["QUIRE_NUM_THREADS"] == workers["rayStartParams"]["num-cpus"]
    assert container["resources"]["requests"]["cpu"] == settings["QUIRE_NUM_THREADS"]
    assert container["resources"]["limits"] == head()["resources"]["limits"], "the server plans in the head"
    assert container["image"] == head()["image"]
    [port] = [port["containerPort"] for port in container["ports"] if port["name"] == "node-manager"]
    assert workers["rayStartParams"]["node-manager-port"] == str(port)


def test_a_cluster_has_time_to_end_its_requests() -> None:
    spec = cluster()["headGroupSpec"]["template"]["spec"]
    sleeps_s = head()["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > sleeps_s + ServerConfig().drain_timeout_s + END_S


def settings_of(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}
