"""A model that does not fit: one line says which narrower settings do, as a command, and that command is taken."""

from __future__ import annotations

import re
import shlex

import pytest

from quire import cli
from quire.compute import backend
from quire.core.config import EngineConfig
from quire.core.errors import DoesNotFitError
from quire.engine.factory import plan_engine

MIB = 1 << 20


def advice(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The command that an error recommends; empty where it names none."""
    assert cli.main(shlex.split(line)[1:]) == cli.MISUSED
    (error,) = capsys.readouterr().err.splitlines()
    found = re.search(r"This fits: (quire .*)$", error)
    return found[1] if found else ""


@pytest.mark.parametrize(
    ("line", "fits"),
    [
        ("quire plan llama-3.1-8b --hardware zen5-2-cores --memory 13400MiB --max-model-len 16384", " --kv-dtype int8"),
        ("quire plan llama-3.1-8b --hardware zen5-2-cores --memory 9GiB", " --weights int8"),
        ("quire plan llama-3.1-8b --hardware zen5-2-cores --memory 6GiB --weights auto", " --weights int4"),
    ],
)
def test_a_plan_names_the_type_that_fits(line: str, fits: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = advice(line, capsys)
    assert found.endswith(fits)
    assert found.count("--weights") <= 1
    assert cli.main([*shlex.split(found)[1:], "--max-num-seqs", "8"]) == cli.DONE


def test_the_command_of_a_plan_for_this_machine_fits_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "guide"]) == cli.DONE
    (line,) = re.findall(r"quire serve guide .*", capsys.readouterr().out)
    settings = dict(zip(*[iter(shlex.split(line)[3:])] * 2, strict=True))
    config = EngineConfig(
        model="guide", kv_memory=settings["--kv-memory"], max_num_seqs=int(settings["--max-num-seqs"])
    )
    needs = plan_engine(config).report.plan
    assert needs.total_bytes < 0.75 * (backend.free_memory() or 0)  # others find room


def test_a_type_that_is_too_large_even_so_is_not_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    assert advice("quire plan llama-3.1-8b --hardware zen5-2-cores --memory 2GiB", capsys) == ""


def test_less_context_and_less_memory_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    line = "quire generate guide -p Hi --max-tokens 1 --kv-memory 1MiB --max-model-len=2048"
    found = advice(line, capsys)
    assert re.fullmatch(r"quire generate guide -p Hi --max-tokens 1 --kv-memory 1MiB --max-model-len \d+", found)
    assert cli.main(shlex.split(found)[1:]) == cli.DONE
    capsys.readouterr()
    assert re.search(r" --kv-memory \d+MiB$", advice("quire serve guide --kv-memory 100TiB", capsys))


@pytest.mark.parametrize(("free", "flags"), [(9 * MIB, "--weights int8"), (MIB, "")])
def test_weights_larger_than_this_machine(free: int, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "free_memory", lambda: free)
    with pytest.raises(DoesNotFitError) as refused:
        plan_engine(EngineConfig(model="guide", max_num_batched_tokens=64, max_num_seqs=4, dtype="float32"))
    assert refused.value.flags == flags
