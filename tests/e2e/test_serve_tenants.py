"""Tenants over HTTP, with a model behind them: nobody profits from what another one has asked, nor learns of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire.core.config import EngineConfig
from support.server import RunningServer, running_server

PROMPT = "A block table maps the positions of a sequence to blocks of memory. " * 4


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(settings={"policy": "fair_share"}, api_key=("alice", "bob")) as running:
        yield running


def cached(server: RunningServer, key: str, **fields: Any) -> int:
    """How many tokens of the prompt came from the cache for a key."""
    with server.client(api_key=key) as client:
        answer = client.completions.create(model="guide", prompt=PROMPT, max_tokens=2, temperature=0, extra_body=fields)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def test_a_tenant_finds_its_own_blocks_only(server: RunningServer) -> None:
    assert cached(server, "alice") == 0
    found = cached(server, "alice")
    assert found > 32
    assert cached(server, "bob") == 0
    assert cached(server, "bob") == found


def test_a_salt_parts_the_requests_of_a_tenant(server: RunningServer) -> None:
    assert cached(server, "alice", cache_salt="a") == 0
    assert cached(server, "alice", cache_salt="a") > 32
    assert cached(server, "alice", cache_salt="b") == 0
    assert cached(server, "bob", cache_salt="a") == 0


def test_a_quota_bounds_what_a_tenant_leaves_behind() -> None:
    assert EngineConfig(max_cached_blocks_per_tenant=3).memory_config(9, 0, b"").max_cached_blocks_per_tenant == 3
    with running_server(settings={"max_cached_blocks_per_tenant": 2}, api_key=("alice", "bob")) as server:
        for key in ("alice", "bob"):
            assert cached(server, key) == 0
            assert cached(server, key) <= 2 * 16
        server.wait_until_idle()
        ledger = server.llm.engine.scheduler.memory.ledger()
        assert ledger.cached_blocks <= 4


def test_texts_without_a_seed_do_not_depend_on_what_others_ask() -> None:
    """Else a tenant that draws its text again, under the seeds of a counter, learns how often others have asked."""

    def drawn(num_between: int) -> list[str]:
        texts = []
        with running_server(api_key=("alice", "bob")) as server:
            for _ in range(2):
                for key in ("bob", *["alice"] * num_between):
                    with server.client(api_key=key) as client:
                        answer = client.completions.create(model="guide", prompt="A", max_tokens=12, temperature=1.5)
                    if key == "bob":
                        texts.append(answer.choices[0].text)
        return texts

    alone = drawn(0)
    assert alone == drawn(2)
    assert alone[0] != alone[1]
