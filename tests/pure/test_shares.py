"""What each of several engines gets of a machine, and which settings of them are refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire import EngineConfig, InvalidConfigError
from quire.core.clock import ManualClock
from quire.core.memory_needs import UNKNOWN_FREE_BYTES
from quire.engine.factory import plan_engine
from quire.engine.process.connection import EngineConnection
from quire.engine.process.messages import Configure
from quire.engine.replicas.settings import ReplicaSettings
from quire.engine.replicas.shares import environment_of, share_of
from quire.serve.config import ServerConfig
from quire.serve.loading.build import make_model_set

MIB = 1 << 20
REPLICAS = "an integer from 1 to 256 or a range such as 1-4, after ray: for a Ray cluster"


def test_engines_on_a_processor_share_what_one_would_have_taken() -> None:
    config = EngineConfig(
        model="guide", num_threads=5, kv_memory="12MiB", swap_space="6MiB", max_memory="600MiB", disk_cache_size="3GiB"
    )
    share = share_of(plan_engine(config), 3)
    assert (share.num_threads, share.kv_memory, share.swap_space) == (1, 4 * MIB, 2 * MIB)
    assert (share.max_memory, share.disk_cache_size) == (200 * MIB, 1024 * MIB)
    plans = [plan_engine(each).report.plan for each in (config, share)]
    assert plans[1].num_blocks == plans[0].num_blocks // 3


def test_without_limits_they_share_what_is_free() -> None:
    blueprint = plan_engine(EngineConfig(model="guide", num_threads=2))
    free = blueprint.report.plan.needs.free_bytes or UNKNOWN_FREE_BYTES
    share = share_of(blueprint, 2)
    assert (share.num_threads, share.max_memory, share.kv_memory) == (1, free // 2, None)
    assert share_of(blueprint, 4).num_threads == 1, "each computes"
    assert share_of(blueprint, 1) == blueprint.config


@pytest.mark.parametrize(
    ("visible", "index", "own"),
    [
        (None, 0, "0"),
        (None, 3, "3"),
        ("", 1, "1"),
        ("2,5", 0, "2"),
        ("2, 5", 1, "5"),
        ("2,5", 2, ""),
        ("GPU-a", 0, "GPU-a"),
    ],
)
def test_each_engine_on_gpus_sees_its_own(visible: str | None, index: int, own: str) -> None:
    environ = {"HOME": "/root"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    found = environment_of(EngineConfig(device="cuda"), index, environ)
    assert found == {"HOME": "/root", "CUDA_VISIBLE_DEVICES": own}
    assert environment_of(EngineConfig(), index, environ) == environ


def test_each_engine_of_ranks_sees_a_gpu_for_each_of_them() -> None:
    config = EngineConfig(device="cuda", tensor_parallel=2)
    found = [environment_of(config, index, {"CUDA_VISIBLE_DEVICES": "4,5,6,7,1"}) for index in range(3)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["4,5", "6,7", "1"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 0}, f"replicas is 0; allowed: {REPLICAS}"),
        ({"replicas": 257}, f"replicas is 257; allowed: {REPLICAS}"),
        ({"replicas": True}, f"replicas is True; allowed: {REPLICAS}"),
        ({"replicas": "ray:0"}, f"replicas is 'ray:0'; allowed: {REPLICAS}"),
        ({"replicas": "ray:x"}, f"replicas is 'ray:x'; allowed: {REPLICAS}"),
        ({"replicas": "ray:"}, f"replicas is 'ray:'; allowed: {REPLICAS}"),
        ({"replicas": "3-2"}, f"replicas is '3-2'; allowed: {REPLICAS}"),
        ({"replicas": "0-2"}, f"replicas is '0-2'; allowed: {REPLICAS}"),
        ({"replicas": "ray:1-"}, f"replicas is 'ray:1-'; allowed: {REPLICAS}"),
        ({"replicas": "ray:257"}, f"replicas is 'ray:257'; allowed: {REPLICAS}"),
        ({"continue_on": "maybe"}, "continue_on is 'maybe'; allowed: one of same, any, never"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        ServerConfig(**settings)
    assert str(caught.value) == message


def test_only_one_model_may_have_several_engines() -> None:
    configs = [EngineConfig(model="guide"), EngineConfig(model="another")]
    with pytest.raises(InvalidConfigError, match=r"^replicas is 2; allowed: 1 with several models$"):
        make_model_set(configs, ServerConfig(replicas=2), ManualClock(), num_named=2)


def test_a_share_that_is_too_small_is_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidConfigError, match="kv_memory"):
        make_model_set(
            [EngineConfig(model="guide", kv_memory="1MiB", max_model_len=500)], ServerConfig(replicas=9), ManualClock()
        )


def test_the_start_up_table_says_how_many_there_are() -> None:
    config = EngineConfig(model="guide", kv_memory="16MiB", num_threads=2)
    models = make_model_set([config], ServerConfig(replicas=2, max_queued_sequences=None), ManualClock())
    report = str(models.first.model.report)
    assert "replicas    2, each as follows" in report
    assert "1 thread\n" in report
    one = make_model_set([config], ServerConfig(), ManualClock())
    assert "replicas" not in str(one.first.model.report)
    several, single = (each.first.gate.limits.max_queued_sequences for each in (models, one))
    assert several == single, "none is ready yet"
    scaled = make_model_set([config], ServerConfig(replicas="1-2"), ManualClock())
    assert "replicas    1 to 2, by load, each as follows" in str(scaled.first.model.report)
    assert [each.first.model.report.num_replicas for each in (one, models, scaled)] == [1, 2, 2]


async def nowhere(configure: Configure) -> EngineConnection:
    raise NotImplementedError


def test_engines_on_a_cluster_are_said_to_be_there() -> None:
    assert ReplicaSettings(2, start=nowhere).text == "2 on a Ray cluster"
    assert ReplicaSettings(4, start=nowhere, least=2).text == "2 to 4 on a Ray cluster, by load"


def test_a_number_that_follows_the_load_has_two_bounds() -> None:
    for text, bounds in {"ray:2-16": (2, 16), "1-3": (1, 3), "ray:4": (4, 4), "2-2": (2, 2)}.items():
        config = ServerConfig(replicas=text)
        assert (config.least_replicas, config.num_replicas) == bounds
