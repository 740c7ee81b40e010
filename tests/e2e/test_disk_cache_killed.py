"""A server with a disk cache is killed under load, again and again: what it answers after is the same."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from support.live_lines import LiveLines
from support.served_process import served_process

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "seven", "birds", "over", "the", "river")
PREFIX = " ".join(random.Random(3).choices(WORDS, k=200))
NUM_TAILS = 6


def fields(tail: int, **more: Any) -> dict[str, Any]:
    """Return a call with the shared prefix and a tail of its own."""
    return {"model": "guide", "prompt": f"{PREFIX} {tail}", "max_tokens": 12, "temperature": 0.7, "seed": 5} | more


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The texts of an engine without a disk."""
    sampling = SamplingParams(max_tokens=12, temperature=0.7, seed=5)
    with LLM("guide", kv_memory="8MiB", num_threads=1) as llm:
        outputs = llm.generate([f"{PREFIX} {tail}" for tail in range(NUM_TAILS)], sampling, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def kill_under_load(tmp_path: Path, expected: list[str], num_kills: int) -> None:
    """Kill a server that loads and stores, and hold the next one to the same texts."""
    arguments = ("--kv-memory", "8MiB", "--disk-cache", str(tmp_path / "cache"), "--disk-cache-size", "2MiB")
    arguments += ("--disk-write", "always")
    from_disk = 0
    for number in range(num_kills + 1):
        rng = random.Random(number)
        with served_process(tmp_path, *arguments) as server:
            for tail in range(NUM_TAILS):
                answer = server.complete(fields(tail))
                assert answer["choices"][0]["text"] == expected[tail]
                from_disk += answer["usage"]["prompt_tokens_details"].get("by_tier", {}).get("disk", 0)
            calls = [fields(rng.randrange(10_000), max_tokens=200) for _ in range(8)]
            threads = [threading.Thread(target=server.try_to_complete, args=(call,)) for call in calls]
            for thread in threads:
                thread.start()
            time.sleep(rng.random() * 0.3)
            server.kill()
            for thread in threads:
                thread.join()
    assert from_disk, "nothing came from the disk"


def test_killed_under_load_it_answers_the_same_after(tmp_path: Path, expected: list[str]) -> None:
    kill_under_load(tmp_path, expected, 1)


@pytest.mark.long
def test_killed_under_load_a_hundred_times(tmp_path: Path, expected: list[str]) -> None:
    kill_under_load(tmp_path, expected, 100)


def test_the_first_answer_after_a_kill_reports_what_came_from_disk(tmp_path: Path, expected: list[str]) -> None:
    arguments = ("--kv-memory", "8MiB", "--disk-cache", str(tmp_path / "cache"), "--disk-cache-size", "8MiB")
    with served_process(tmp_path, *arguments) as server:
        for tail in range(3):
            server.complete(fields(tail))
        server.wait_stored(13)  # of 16 tokens each
        server.kill()
    with served_process(tmp_path, *arguments) as server, LiveLines(server.port) as live:
        live.until(lambda _: True)
        answer = server.complete(fields(0, max_tokens=1600, ignore_eos=True))  # for longer than a frame
        picture = live.until(lambda found: found.tokens_from_disk > 0)
        totals = picture.last["totals"]
    usage = answer["usage"]["prompt_tokens_details"]
    assert picture.tokens_from_disk == totals["disk_tokens"] == usage["by_tier"]["disk"]
    assert 0 < totals["disk_blocks"] <= totals["disk_slots"]
    assert answer["choices"][0]["text"].startswith(expected[0])
    assert usage["by_tier"]["disk"] == usage["cached_tokens"] > 200


def test_only_tenants_that_want_it_are_kept_and_each_finds_its_own(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(
        "- {name: ada, key: ada-key, persist: true}\n- {name: eve, key: eve-key, persist: true}\n"
        "- {name: bob, key: bob-key}\n"
    )
    arguments = ("--kv-memory", "8MiB", "--disk-cache", str(tmp_path / "cache"), "--disk-cache-size", "8MiB")
    arguments += ("--api-keys-file", str(tmp_path / "keys.yaml"), "--disk-write", "always")
    with served_process(tmp_path, *arguments) as server:
        for key in ("ada-key", "bob-key"):
            server.complete(fields(0), key)
    with served_process(tmp_path, *arguments) as server:
        cached = {
            key: server.complete(fields(1), key)["usage"]["prompt_tokens_details"]["cached_tokens"]
            for key in ("eve-key", "bob-key", "ada-key")
        }
    assert cached["ada-key"] > 200
    assert cached["eve-key"] == cached["bob-key"] == 0
