"""Write the held-out questions with their answers, as a workload for `quire bench quality`.

    .venv/bin/python scripts/guide/held_out.py
    .venv/bin/python scripts/guide/held_out.py --questions FILE    only the questions, for `quire bench speculation`

Each line is a conversation in the guide's own template and tokenizer. The questions are not in the training data; the
answers are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from corpus import read_topics

from quire.compute.models.source import ModelFolder
from quire.engine.text.tokenizer import Tokenizer
from quire.guide import GUIDE_FOLDER

WORKLOAD = Path(__file__).parents[2] / "benchmarks" / "workload_guide_held_out.jsonl"


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, metavar="FILE", help="write only the questions, one per line")
    options = parser.parse_args()
    if options.questions is not None:
        questions = [question for topic in read_topics() for question in topic.held_out]
        options.questions.write_text("".join(f"{question}\n" for question in questions), encoding="utf-8")
        print(f"{len(questions)} questions")
        return
    vocab_size = json.loads((GUIDE_FOLDER / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    tokenizer = Tokenizer.open(ModelFolder(GUIDE_FOLDER), vocab_size=vocab_size)
    lines = []
    for topic in read_topics():
        for question in topic.held_out:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": topic.answer}]
            prompt = tokenizer.encode_chat(turns, add_generation_prompt=False)
            lines.append(json.dumps({"id": len(lines), "prompt_token_ids": prompt, "max_tokens": 1, "n": 1}) + "\n")
    WORKLOAD.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} conversations")


if __name__ == "__main__":
    main()
