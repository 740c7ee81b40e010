"""Commands: each does one thing to a scheduler, and nothing is read that is not one of them."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from quire.core.errors import StepLogError
from quire.core.request import CacheScope, Request
from quire.core.sampling_params import SamplingParams
from quire.engine.commands import (
    OPERATOR_COMMANDS,
    Abort,
    Add,
    AnyCommand,
    Clear,
    Command,
    Fail,
    OperatorVerbs,
    Stop,
    Watch,
    carry_out,
    command_bytes,
    read_command,
)


class Noted:
    """A scheduler, and its memory, that note what is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.memory = self

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, *given))


@pytest.mark.parametrize(
    ("command", "call"),
    [
        (Abort("r"), ("abort", "r")),
        (Fail("r", "why"), ("fail", "r", "why")),
        (Stop("r", 3), ("stop", "r", 3)),
        (Stop("r"), ("stop", "r", 0)),
        (Clear(), ("reset",)),
    ],
)
def test_each_command_is_one_call(command: Command, call: tuple[Any, ...]) -> None:
    scheduler = Noted()
    carry_out(command, scheduler)  # type: ignore[arg-type]
    assert scheduler.calls == [call]


def test_what_is_no_decision_is_not_for_a_scheduler() -> None:
    scheduler = Noted()
    with pytest.raises(StepLogError, match=r"^Watch is not a scheduler command$"):
        carry_out(Watch(1.0), scheduler)  # type: ignore[arg-type]
    assert scheduler.calls == []


def test_a_request_is_added_with_the_output_that_it_has() -> None:
    request = Request(
        "r", [5, 6, 7], SamplingParams(seed=3), scope=CacheScope("t", "s", ("k",)), priority=-2, arrival_s=1.5
    )
    request.tokens.extend([8, 9])
    command = Add.of(request)
    scope, output = CacheScope("t", "s", ("k",)), array("i", [8, 9])
    assert command == Add(
        "r", array("i", [5, 6, 7]), SamplingParams(seed=3), scope, -2, 1.5, None, output_token_ids=output
    )
    scheduler = Noted()
    carry_out(command, scheduler)  # type: ignore[arg-type]
    ((name, added),) = scheduler.calls
    assert name == "add"
    assert (added.request_id, added.num_prompt_tokens, added.sampling) == ("r", 3, SamplingParams(seed=3))
    assert added.tokens == array("i", [5, 6, 7, 8, 9])
    assert (added.scope, added.priority, added.arrival_s) == (CacheScope("t", "s", ("k",)), -2, 1.5)
    added.tokens.append(1)
    assert (len(command.prompt_token_ids), len(command.output_token_ids)) == (3, 2), (
        "each request that is made of it has tokens of its own"
    )
    assert Add("r", array("i", [1]), SamplingParams()).to_request().arrival_s == 0.0


def test_a_prompt_crosses_as_columns_of_32_bits() -> None:
    name, request_id, tokens, *_ = msgspec.msgpack.decode(
        command_bytes(Add("r", array("i", [1, -2]), SamplingParams()))
    )
    assert (name, request_id, tokens) == ("Add", "r", array("i", [1, -2]).tobytes())


@pytest.mark.parametrize(
    "values",
    [
        ["Request", "r"],
        ["Abort"],
        ["Abort", 5],
        ["Abort", "r", "more"],
        ["Stop", "r", "1"],
        ["Clear", 1],
        ["Watch", "soon"],
        [["Abort"], "r"],
        [None],
        [],
        ["Add", "r", [1, 2], {}],
        ["Add", "r", b"\x01\x00\x00", {}, {}, 0, 0.0],
        ["Add", "r", b"\x01\x00\x00\x00", {}, {}, 0, 0.0, None, b"\x01\x00\x00"],
        ["Command"],
        ["__class__", "r"],
    ],
)
def test_what_is_no_command_is_refused(values: list[Any]) -> None:
    with pytest.raises(StepLogError, match=r"^a command cannot be read: "):
        read_command(msgspec.msgpack.encode(values))
    for body in (b"", b"\xc1", msgspec.msgpack.encode({"Abort": "r"}), msgspec.msgpack.encode(5)):
        with pytest.raises(StepLogError, match=r"^a command cannot be read: "):
            read_command(body)


@pytest.mark.parametrize("command", [Watch(None), Watch(0.5), Clear(), Fail("é", "\U0001f600"), Stop("r", 1 << 40)])
def test_what_is_written_is_read_back(command: AnyCommand) -> None:
    assert read_command(command_bytes(command)) == command


def test_what_operators_may_do_is_what_every_model_offers() -> None:
    sent: list[AnyCommand] = []

    class Model(OperatorVerbs):
        def send(self, command: AnyCommand) -> None:
            sent.append(command)

    for name in OPERATOR_COMMANDS:
        getattr(Model(), name)()
    assert sent == list(OPERATOR_COMMANDS.values()) == [Clear()]
