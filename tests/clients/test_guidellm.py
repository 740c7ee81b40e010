"""guidellm: a benchmark of servers that probes health and models, streams, and counts tokens by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_benchmark_runs_to_its_end(server: str, guide: str, tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    command = [
        *(str(Path(sys.executable).with_name("guidellm")), "run", "--backend", f"kind=openai_http,target={server}"),
        *("--profile", "kind=throughput,max_concurrency=8", "--constraint", "kind=max_requests,count=16"),
        *("--tokenizer", f"kind=huggingface_auto,model={guide}"),
        *("--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=16"),
        *("--output", f"kind=json,path={report_path}", "--disable-console"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-4_000:]
    report = json.loads(report_path.read_text(encoding="utf-8"))
    (benchmark,) = report["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == 16
    assert not benchmark["requests"]["errored"]
