"""Short runs of schemathesis: calls made of our own OpenAPI document, right ones and wrong ones.

`make test-long` makes 8,000 calls that cover every field of every path, `make test-clients` tens of thousands.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.server import running_server

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method"
)
SOME_PATHS = ("/api/show", "/v1/models/{model_id}", "/health")


@pytest.mark.parametrize(
    ("phase", "paths"),
    [("fuzzing", ()), ("coverage", SOME_PATHS), pytest.param("coverage", (), marks=pytest.mark.long)],
)
def test_the_server_does_what_its_document_says(phase: str, paths: tuple[str, ...], tmp_path: Path) -> None:
    with running_server(settings={"max_model_len": 64}) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
        command += ["--exclude-path", "/live"]  # it never ends by itself
        command += [word for path in paths for word in ("--include-path", path)]
        options = ["--checks", CHECKS, "--max-examples", "2", "--phases", phase, "--seed", "1"]
        done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
