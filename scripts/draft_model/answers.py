"""Write answers of SmolLM2 and their likeliest tokens, for `train.py` to learn from.

    .venv/bin/python scripts/draft_model/answers.py --out answers.jsonl --seconds 420

The questions are of the same kinds as in `quire bench speculation`, with other numbers, and of a few more kinds.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from quire import LLM, SamplingParams
from quire.instruments.bench.speculation import conversation

AT_ONCE = 96
NUM_LOGPROBS = 12


def question(rng: random.Random) -> list[dict[str, str]]:
    """Return a question: three of four ask for a story, like the workload `free`."""
    if rng.random() < 0.75:
        return conversation("free", rng)
    return conversation("edit" if rng.random() < 0.25 else "chat", rng)


def main() -> None:
    """Generate answers until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng, began_s = random.Random(options.seed), time.perf_counter()
    with LLM("smollm2", kv_memory="600MiB", max_num_seqs=48, max_model_len=1024) as llm, options.out.open("a") as file:
        while time.perf_counter() - began_s < options.seconds:
            asked = [question(rng) for _ in range(AT_ONCE)]
            draws = [
                SamplingParams(
                    temperature=rng.choice([0.0, 0.8, 1.0]),
                    seed=rng.randrange(1 << 30),
                    max_tokens=128,
                    logprobs=NUM_LOGPROBS,
                )
                for _ in asked
            ]
            for output in llm.chat(asked, draws, use_tqdm=False):
                answer = output.outputs[0]
                likeliest = [
                    [[token, round(each.logprob, 3)] for token, each in (entry or {}).items()]
                    for entry in answer.logprobs or ()
                ]
                line = {"prompt": output.prompt_token_ids, "answer": answer.token_ids, "likeliest": likeliest}
                file.write(json.dumps(line) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
