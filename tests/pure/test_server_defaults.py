"""What a server does where nobody has chosen: how it samples, and what it says of the memory that it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from quire import EngineConfig
from quire.core.clock import ManualClock
from quire.serve.config import ServerConfig
from quire.serve.greeting import kv_memory_hint
from quire.serve.loading.build import make_model_set
from quire.serve.schemas.sampling import ChoiceFields
from quire.serve.translate.sampling import sampling_of


def test_a_request_is_sampled_as_it_says_then_as_the_server_says() -> None:
    config = EngineConfig(model="guide", kv_memory="16MiB")
    models = make_model_set([config], ServerConfig(default_sampling="temperature=0.3, top-k=7"), ManualClock())
    defaults = models.first.model.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.3, 7, 1.0)
    asked = sampling_of(msgspec.convert({"temperature": 0.9, "top_p": 0.5}, ChoiceFields), defaults)
    assert (asked.temperature, asked.top_k, asked.top_p) == (0.9, 7, 0.5)


@pytest.mark.parametrize(
    ("settings", "num_bytes", "has_hint"),
    [
        ({}, 1 << 30, True),
        ({}, (1 << 30) - 1, False),
        ({"kv_memory": "2GiB"}, 2 << 30, False),
        ({"touch_kv_memory": "use"}, 2 << 30, False),
    ],
)
def test_much_memory_that_was_not_asked_for_has_a_note(settings: Any, num_bytes: int, has_hint: bool) -> None:
    plan = make_model_set([EngineConfig(model="guide")], ServerConfig(), ManualClock()).first.model.report.plan
    plan = replace(plan, bytes_per_block=num_bytes, num_blocks=1)
    hint = kv_memory_hint(EngineConfig(**settings).resolved(), plan)
    assert hint.startswith("\nnote        the 1.00 GiB of KV memory are claimed") if has_hint else hint == ""
