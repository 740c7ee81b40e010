"""schemathesis: cases made from the server's own OpenAPI document; none may fail it, none may get another answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")


def test_no_case_breaks_the_server(short_server: str, tmp_path: Path) -> None:
    examples = os.environ.get("QUIRE_SCHEMATHESIS_EXAMPLES", "100")
    command = [
        *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{short_server}/openapi.json"),
        *("--checks", ",".join(CHECKS)),
        *("--max-examples", examples, "--generation-database", "none", "--no-color"),
        *("--request-timeout", "60", "--seed", "7"),
        *("--exclude-path", "/live"),  # it never ends by itself
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
