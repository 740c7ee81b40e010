"""The blocks that several continuations of one prompt hold, step by step: those that a brute-force oracle counts.

The oracle looks at the texts alone. Full blocks are shared by all whose text is the same up to the block's end; the
last, partial block is each sequence's own as soon as it writes into it. So a group of sequences needs as many blocks as
there are different beginnings among its texts, taken block by block.
"""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, Request, SamplingParams, Scheduler
from quire.core.step import StepPlan
from quire.guide import GUIDE_FOLDER

BLOCK = 16
QUESTION = "What is a block table, and what is copy-on-write? Say how the two go together when a text has a copy."


def blocks_needed(sequences: list[Request]) -> int:
    """Return how many blocks the texts of sequences need, each with room for its last known token."""
    beginnings: set[object] = set()
    for number, request in enumerate(sequences):
        tokens = request.tokens.tolist()
        for start in range(0, len(tokens), BLOCK):
            end = start + BLOCK
            own = number if end > len(tokens) else None  # a block that is not full is its own
            beginnings.add((own, tuple(tokens[:end])))
    return len(beginnings)


@pytest.mark.parametrize("prompt_length", [15, 16, 17, 40])
@pytest.mark.parametrize("num_sequences", [2, 4, 6])
@pytest.mark.parametrize("kind", ["samples", "beams"])
def test_blocks_held_are_those_that_the_texts_need(
    kind: str, num_sequences: int, prompt_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[tuple[int, int]] = []
    schedule = Scheduler.schedule

    def watched(scheduler: Scheduler) -> StepPlan | None:
        plan = schedule(scheduler)
        held.append((scheduler.memory.ledger().used_blocks, blocks_needed(scheduler.running)))
        return plan

    monkeypatch.setattr(Scheduler, "schedule", watched)
    settings: dict[str, Any] = {"beam_search": True, "temperature": 0.0} if kind == "beams" else {"temperature": 1.3}
    with LLM(GUIDE_FOLDER, kv_memory="8MiB", block_size=BLOCK, max_num_seqs=8) as llm:
        assert llm.tokenizer is not None
        prompt = llm.tokenizer.encode(f"{QUESTION} {QUESTION}")[:prompt_length]
        assert len(prompt) == prompt_length
        sampling = SamplingParams(n=num_sequences, seed=2, max_tokens=50, ignore_eos=True, **settings)
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        assert len(held) >= 50
        assert [found for found, _ in held] == [needed for _, needed in held]
        assert max(found for found, _ in held) < num_sequences * -(-(prompt_length + 50) // BLOCK)
