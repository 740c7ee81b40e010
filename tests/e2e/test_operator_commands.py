"""What an operator can have done: the same at every door, and for operators only."""

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.engine.commands import OPERATOR_COMMANDS
from quire.engine.replicas.supervised import SupervisedLLM
from support.server import running_server

PROMPT = [5] * 40
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
KEYS = """
- {name: alice, key: alice}
- {name: owner, key: owner, operator: true}
"""


@pytest.mark.parametrize("door", [LLM, AsyncLLM, SupervisedLLM])
def test_each_is_a_method_of_every_model(door: type) -> None:
    for name in OPERATOR_COMMANDS:
        assert inspect.getdoc(getattr(door, name))


def test_a_cache_is_emptied_in_this_process() -> None:
    with LLM("guide", kv_memory="4MiB", num_threads=1) as llm:
        cached = []
        for turn in range(3):
            if turn == 2:
                llm.reset_prefix_cache()
            cached.append(llm.generate([PROMPT], ONE_TOKEN, use_tqdm=False)[0].num_cached_tokens)
    assert cached == [0, 32, 0]


def test_a_cache_is_emptied_between_two_steps() -> None:
    async def test() -> list[int]:
        async with AsyncLLM("guide", kv_memory="4MiB", num_threads=1) as llm:
            cached = []
            for turn in range(3):
                if turn == 2:
                    llm.reset_prefix_cache()
                *_, last = [output async for output in llm.generate(PROMPT, ONE_TOKEN)]
                cached.append(last.num_cached_tokens)
            return cached

    assert asyncio.run(test()) == [0, 32, 0]


def test_over_http_it_takes_an_operator(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    with running_server(settings={"kv_memory": "4MiB", "num_threads": 1}, api_keys_file=str(keys)) as server:

        def hits() -> int:
            body = {"prompt": PROMPT, "max_tokens": 1}
            before = server.llm.engine.stats().hit_tokens_total
            headers = {"Authorization": "Bearer alice", "Content-Type": "application/json"}
            assert server.ask("POST", "/v1/completions", json.dumps(body).encode(), headers).status == 200
            return server.llm.engine.stats().hit_tokens_total - before

        def reset(headers: dict[str, str], path: str = "/reset_prefix_cache") -> tuple[int, str]:
            answer = server.ask("POST", path, None, headers)
            return answer.status, answer.error["code"] if answer.status != 200 else ""

        assert [hits(), hits()] == [0, 32]
        assert reset({"Authorization": "Bearer alice"}) == (403, "operator_required")
        assert reset({}) == (401, "invalid_api_key")
        assert reset({"Authorization": "Bearer alice"}, "/restart_engines") == (403, "operator_required")
        assert reset({"Authorization": "Bearer owner"}, "/restart_engines") == (200, "")
        assert hits() == 32
        assert reset({"Authorization": "Bearer owner"}) == (200, "")
        assert hits() == 0
        assert server.ask("GET", "/reset_prefix_cache", None, {"Authorization": "Bearer owner"}).status == 405


def test_without_keys_everybody_is_an_operator_and_each_is_in_the_document() -> None:
    with running_server(settings={"kv_memory": "4MiB", "num_threads": 1}) as server:
        assert server.ask("POST", "/reset_prefix_cache", None, {}).status == 200
        assert server.ask("POST", "/reset_prefix_cache", None, {"Origin": "http://evil.example"}).status == 403
        document = json.loads(server.get("/openapi.json").body)
        assert {"/restart_engines", *(f"/{name}" for name in OPERATOR_COMMANDS)} <= document["paths"].keys()
