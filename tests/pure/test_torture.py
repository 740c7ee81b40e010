"""The parts of `quire torture` that need no server: the table of cases, the figure, the checks of answers."""

from __future__ import annotations

import json

import pytest

from quire.core.errors import InvalidValueError
from quire.engine.commands import OPERATOR_COMMANDS
from quire.instruments.http.plain import Answer
from quire.instruments.torture.bad_tables import TABLES
from quire.instruments.torture.bundles import IMPORT
from quire.instruments.torture.case import Case, CaseResult
from quire.instruments.torture.failure import CaseFailedError, require
from quire.instruments.torture.refusals import bad, check_answer
from quire.instruments.torture.retries import should_retry
from quire.instruments.torture.runner import CASES, chosen, figure, run_case
from quire.instruments.torture.stage import Stage
from quire.serve.endpoints import ROUTES
from quire.serve.endpoints.llama_server import elsewhere
from quire.serve.endpoints.ollama import no_changes
from quire.serve.openapi import openapi_document


def test_every_case_of_the_list_is_there_once() -> None:
    numbers = [case.number for case in CASES]
    expected = [f"{part}{number}" for part, most in (("F", 21), ("I", 24), ("L", 9)) for number in range(1, most + 1)]
    expected += [*(f"I{number}" for number in (*range(25, 29), *range(30, 47))), "L10", "L11"]
    assert set(expected) <= set(numbers) and len(set(numbers)) == len(numbers)
    assert all(case.run is not None for case in CASES)


def test_every_post_that_reads_a_body_is_attacked() -> None:
    """I46 posts to the paths that the OpenAPI document lists with JSON. All others must be known not to read any."""
    document = json.loads(openapi_document())["paths"]
    posts = {path: each["post"] for path, each in document.items() if "post" in each}
    routes = [each for each in ROUTES if "POST" in (each.methods or ())]
    described = {each.endpoint for each in routes if each.path in posts}
    for route in routes:
        reads_none = route.endpoint in (elsewhere, no_changes)
        assert route.path in posts or route.endpoint in described or reads_none, route.path
    other = {
        path for path, post in posts.items() if "application/json" not in post.get("requestBody", {}).get("content", {})
    }
    reads_no_json = {"/ping", "/restart_engines", *(f"/{name}" for name in OPERATOR_COMMANDS)}
    assert other == {IMPORT, *reads_no_json}, "I44 and I45 attack /cache/import"


def num_of(part: str) -> int:
    return sum(case.number[0] == part for case in CASES)


def test_cases_are_chosen_by_number_or_part() -> None:
    assert [case.number for case in chosen(["i7", "F1"])] == ["F1", "I7"]
    assert len(chosen(["L"])) == num_of("L") and len(chosen([])) == len(CASES)
    with pytest.raises(InvalidValueError):
        chosen(["X1"])


def result(number: str, *, has_passed: bool, leaked: int = 0, changed: int = 0) -> CaseResult:
    return CaseResult(number, "a case", True, has_passed, "", 0.5, leaked, changed)


def test_the_figure_counts_what_did_not_run_as_not_passed() -> None:
    results = [result("F1", has_passed=True), result("I1", has_passed=False, leaked=2), result("L1", has_passed=True)]
    assert figure(results, is_quick=False) == (
        f"faults 1/{num_of('F')} · refused 0/{num_of('I')} · load 1/{num_of('L')} · blocks leaked 2 · "
        f"bystanders changed 0 (3 of {len(CASES)} cases ran)"
    )


def test_whatever_a_case_raises_is_its_failure() -> None:
    def broken(stage: Stage) -> str:
        raise KeyError("something")

    stage = Stage(seed=0, is_quick=True)
    found = run_case(stage, Case("F1", "a case", broken))
    assert not found.has_passed and "something" in found.remark
    assert "FAILED" in str(found)
    missing = run_case(stage, Case("F13", "a case", None))
    assert not missing.has_passed and "not built" in str(missing)
    stage.close()
    with pytest.raises(CaseFailedError, match="no"):
        require(False, "no")


def answer(status: int, **error: object) -> Answer:
    return Answer(status, {}, json.dumps({"error": error}).encode(), 0.01)


def test_a_refusal_must_have_its_status_its_form_and_its_field() -> None:
    probe = bad({"n": 0}, param="n", code="invalid_value")
    good = {"message": "n is 0", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    check_answer(probe, answer(400, **good))
    wrong = [
        answer(200, **good),
        answer(500, **good),
        answer(400, **{**good, "param": "top_p"}),
        answer(400, **{**good, "code": "other"}),
        answer(400, **{**good, "message": ""}),
        answer(400, message="n is 0"),
        Answer(400, {}, b"no JSON", 0.01),
    ]
    for each in wrong:
        with pytest.raises(CaseFailedError):
            check_answer(probe, each)


@pytest.mark.parametrize("number", sorted(TABLES))
def test_no_probe_stands_twice(number: str) -> None:
    probes = TABLES[number][1]()
    assert probes
    assert len({(probe.path, probe.body, tuple(probe.headers.items())) for probe in probes}) == len(probes)


def test_the_client_tries_again_as_that_of_openai_does() -> None:
    tried = {status: should_retry(Answer(status, {}, b"", 0.0)) for status in (400, 401, 404, 408, 409, 429, 500, 503)}
    assert [status for status, again in tried.items() if again] == [408, 409, 429, 500, 503]
    assert not should_retry(Answer(500, {"x-should-retry": "false"}, b"", 0.0))
