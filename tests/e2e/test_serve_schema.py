"""A short run of schemathesis: calls made of our own OpenAPI document, right ones and wrong ones.

`make test-clients` makes tens of thousands of them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.server import running_server

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method"
)


def test_the_server_does_what_its_document_says(tmp_path: Path) -> None:
    with running_server(settings={"max_model_len": 64}) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
        command += ["--exclude-path", "/live"]  # it never ends by itself
        options = ["--checks", CHECKS, "--max-examples", "10", "--phases", "coverage,fuzzing", "--seed", "1"]
        done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
