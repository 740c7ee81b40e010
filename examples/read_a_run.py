"""How did a run use its memory, and would a larger pool have helped? Log a run, analyse it, and try other settings."""

import tempfile
from pathlib import Path

from quire import LLM, SamplingParams
from quire.cli.report import make_report

with tempfile.TemporaryDirectory() as folder:
    log = Path(folder) / "run.steplog"
    with LLM("guide", kv_memory="640KiB", num_threads=1, max_num_seqs=4, step_log=log) as llm:
        prompts = [f"A block table says where the tokens of request {number} are." for number in range(8)]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=110, ignore_eos=True), use_tqdm=False)
    report = make_report(str(log), limit=8)  # without a limit, fewer than 100 requests give no advice

run = report.recorded
found = run.scheduler.memory.ledger().hit_tokens
print(f"{run.num_requests} requests, {found} tokens of their prompts hit the cache")
print(f"preempted: {run.scheduler.num_preemptions > 0}; {run.recomputed_tokens} tokens were computed again")
larger = [each for each in report.findings if each.setting.startswith("--kv-memory")]
for finding in larger:
    print(f"with {finding.setting} instead: {finding.goal} ({finding.verdict})")

assert run.num_requests == 8
assert any(finding.verdict != "no gain" and finding.goal.endswith("→ 0") for finding in larger)
