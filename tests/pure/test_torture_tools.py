"""The tools of `quire torture` must themselves be right: what they break is broken, and what has changed is noticed."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from quire.compute.models.source import ModelFolder
from quire.core.config import MemoryConfig
from quire.core.errors import CheckpointError
from quire.engine.factory import create_reference_engine
from quire.instruments.http.plain import Answer
from quire.instruments.torture import bystanders
from quire.instruments.torture.bystanders import NUM_BYSTANDERS, Bystanders, bystander_body, outcome_of
from quire.instruments.torture.process_faults import DAMAGES
from support.tiny_checkpoint import write_tiny_qwen3

# What names each fault: the folder is refused for that, and not for another fault that was put in by mistake.
NAMED = {
    "half of the weights": "is incomplete",
    "no weights": "has no model.safetensors",
    "empty weights": "needs at least 8.",
    "a header of 2^60 bytes": "1152921504606846976",
    "a header that is no JSON": "not JSON",
    "tensors that overlap": "an overlap: begins at byte 0",
    "a tensor of another type": "I32",
    "a tensor too few": "missing: ",
    "a config that is no JSON": "not JSON",
    "a config of another shape": "wrong shape: ",
    "an unknown family": "NoSuchModel",
    "a missing shard": "missing.safetensors",
}


def load(folder: Path) -> None:
    """Make an engine of a model folder, which reads all of it."""
    create_reference_engine(ModelFolder(folder), memory=MemoryConfig(num_blocks=4)).close()


@pytest.mark.parametrize("name", DAMAGES)
def test_a_folder_is_broken_in_the_way_that_its_name_says(name: str, tmp_path: Path) -> None:
    folder = write_tiny_qwen3(tmp_path / "model")
    load(folder)
    DAMAGES[name](folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert NAMED[name] in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- bystanders -----------------------------------------------------------------------------------------------------


def body_of(index: int) -> dict[str, Any]:
    """An answer to a bystander, drawn from its number."""
    rng = random.Random(index)
    return {
        "choices": [
            {
                "token_ids": [rng.randrange(100) for _ in range(4)],
                "text": f"text {index}",
                "logprobs": {"token_logprobs": [-rng.random() for _ in range(4)]},
                "finish_reason": "length",
            }
            for _ in range(bystander_body(index)["n"])
        ]
    }


def answer(body: object, status: int = 200) -> Answer:
    return Answer(status, {}, json.dumps(body).encode(), 0.0)


EXPECTED = [outcome_of(answer(body_of(index))) for index in range(NUM_BYSTANDERS)]


def asked(monkeypatch: pytest.MonkeyPatch, reply: Callable[[int], Answer]) -> Bystanders:
    """Send each bystander once, to a server that answers as `reply` says."""
    watching = Bystanders("http://h", "m", EXPECTED, {"Authorization": "Bearer key"})
    indices = {json.dumps(bystander_body(index)): index for index in range(NUM_BYSTANDERS)}

    def ask(url: str, body: dict[str, Any], *, headers: dict[str, str], timeout_s: float) -> Answer:
        assert (url, headers) == ("http://h/v1/completions", {"Authorization": "Bearer key"})
        assert body.pop("model") == "m"
        return reply(indices[json.dumps(body)])

    monkeypatch.setattr(bystanders, "ask", ask)
    monkeypatch.setattr(bystanders, "PAUSE_S", 0.0)
    for index in range(NUM_BYSTANDERS):
        watching._ask(index)
    return watching


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a token": lambda choice: choice["token_ids"].__setitem__(-1, -1),
    "a text": lambda choice: choice.update(text="other"),
    "the last bit of a number": lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(
        0, choice["logprobs"]["token_logprobs"][0] * (1 + 2**-52)
    ),
    "the end": lambda choice: choice.update(finish_reason="stop"),
    "a token more": lambda choice: choice["token_ids"].append(1),
}


def test_each_bystander_is_asked_for_something_of_its_own() -> None:
    bodies = [json.dumps(bystander_body(index)) for index in range(NUM_BYSTANDERS)]
    assert len(set(bodies)) == NUM_BYSTANDERS
    kinds = {(body["temperature"], body["n"]) for body in map(bystander_body, range(NUM_BYSTANDERS))}
    assert kinds == {(0.0, 1), (0.9, 1), (0.9, 2), (0.0, 2)}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changes_in_an_answer_is_noticed_in_that_answer_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reply(index: int) -> Answer:
        body = deepcopy(body_of(index))
        if index == 5:
            CHANGES[name](body["choices"][-1])
        return answer(body)

    counts = asked(monkeypatch, reply).counts
    assert (counts.num_same, counts.changed, counts.lost) == (
        NUM_BYSTANDERS - 1,
        ["bystander 5 got other tokens"],
        [],
    )


def test_a_text_too_few_is_a_change() -> None:
    body = body_of(1)
    assert len(body["choices"]) == 2
    assert outcome_of(answer({"choices": body["choices"][:1]})) != EXPECTED[1]


def test_who_is_turned_away_is_no_loss_and_who_is_failed_or_not_understood_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(index: int) -> Answer:
        match index:
            case 0 | 1:
                return answer({"error": {"message": "busy"}}, 429 if index else 503)
            case 2:
                return answer({"error": {"message": "the engine has stopped"}}, 500)
            case 3:
                raise ConnectionResetError("gone")
            case 4:
                return answer({"choices": [{"text": "a"}]})
        return answer(body_of(index))

    counts = asked(monkeypatch, reply).counts
    assert (counts.num_same, counts.num_turned_away, counts.changed) == (NUM_BYSTANDERS - 5, 2, [])
    assert counts.lost == ["500: the engine has stopped", "ConnectionResetError: gone", "KeyError: 'token_ids'"]


def test_they_ask_in_turn_until_they_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    enough = threading.Event()
    watching = Bystanders("http://h", "m", EXPECTED)

    def note(index: int) -> None:
        seen.append(index)
        if len(seen) >= 3 * NUM_BYSTANDERS:
            enough.set()

    monkeypatch.setattr(watching, "_ask", note)
    watching.start()
    assert enough.wait(300)
    watching.stop()
    num_seen = len(seen)
    counts = [seen.count(index) for index in range(NUM_BYSTANDERS)]
    assert (sum(counts), max(counts) - min(counts) <= 1) == (num_seen, True), "each in its turn"
    assert len(seen) == num_seen, "nobody asks after they have stopped"
