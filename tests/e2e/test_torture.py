"""`quire torture` with a few quick cases; and that a case fails where the server does not cope."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import cli
from quire.instruments.torture import refusals
from quire.instruments.torture.case import Case
from quire.instruments.torture.failure import CaseFailedError
from quire.instruments.torture.faults import not_finite
from quire.instruments.torture.refusals import bad, refuse_all
from quire.instruments.torture.runner import run_case
from quire.instruments.torture.stage import ServerSpec, Stage, wait_until


def test_a_few_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "torture.json"
    names = ("F1", "F10", "F8", "I7", "I24", "I44", "I46", "L10")
    status = cli.main(["torture", "--quick", "--only", *names, "--json", str(path)])
    printed = capsys.readouterr().out
    found = {case["number"]: case for case in json.loads(path.read_text(encoding="utf-8"))["cases"]}
    assert [number for number, case in found.items() if not case["has_passed"]] == [], printed
    assert status == 0
    assert "faults 3/" in printed and "· refused 4/" in printed and "· load 1/" in printed
    assert "· blocks leaked 0 · bystanders changed 0 (quick; 8 of " in printed


def test_cases_fail_where_the_server_does_not_cope(monkeypatch: pytest.MonkeyPatch) -> None:
    with Stage(seed=0, is_quick=True) as stage:
        # A fault that is not there is no fault survived.
        monkeypatch.setattr(ServerSpec, "of", classmethod(lambda cls, *_, **__: cls()))
        found = run_case(stage, Case("F2", "", not_finite))
        assert not found.has_passed and "got 200" in found.remark
        monkeypatch.undo()
        with stage.serving() as server, pytest.raises(CaseFailedError, match="got 200"):
            refuse_all(server, [bad({"n": 1}, param="n")])
        # A server that is slow to refuse.
        monkeypatch.setattr(refusals, "MAX_ANSWER_S", 0.0)
        with stage.serving() as server, pytest.raises(CaseFailedError, match="refused only after"):
            refuse_all(server, [bad({"n": 0}, param="n")])
        monkeypatch.undo()
        # A bystander whose tokens are others than before.
        stage._expected[0][0] = stage._expected[0][0]._replace(token_ids=(1, 2, 3))
        found = run_case(stage, Case("F4", "", _wait_for_bystanders))
        assert not found.has_passed and found.num_changed > 0


def _wait_for_bystanders(stage: Stage) -> str:
    with stage.serving() as server:
        assert server.bystanders is not None
        counts = server.bystanders.counts
        wait_until(lambda: bool(counts.changed), "changed", 30.0)
    return ""
