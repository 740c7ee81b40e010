"""Parallel sampling: four texts for one prompt, whose blocks they share.

The prompt is computed once. Its last block, half full, is shared too: a text copies it before writing into it. The
texts are the same as for four requests with these seeds, but they need less memory.
"""

from typing import Any

from quire import LLM, SamplingParams

PROMPT = "Paged memory cuts the keys and values of a text into blocks of one size. A block table says where they"
SEEDS = [10, 11, 12, 13]


def drawn(**settings: Any) -> SamplingParams:
    return SamplingParams(temperature=1.2, max_tokens=40, ignore_eos=True, **settings)


def write(llm: LLM, sampling: list[SamplingParams]) -> tuple[list[str], int]:
    """Continue the prompt; return the texts, and the peak number of blocks in use."""
    latest, most_used = {}, 0
    for output in llm.stream([PROMPT] * len(sampling), sampling):
        latest[int(output.request_id)] = output
        most_used = max(most_used, llm.engine.scheduler.memory.ledger().used_blocks)
    return [completion.text for _, output in sorted(latest.items()) for completion in output.outputs], most_used


with LLM("guide", kv_memory="8MiB", enable_prefix_caching=False) as llm:
    texts, together = write(llm, [drawn(n=len(SEEDS), seed=SEEDS[0])])
    same, apart = write(llm, [drawn(seed=seed) for seed in SEEDS])

print(PROMPT, "…")
for text in texts:
    print("  …", " ".join(text.split())[:70])
print(f"{apart} blocks for {len(SEEDS)} requests, {together} for one request with {len(SEEDS)} texts")
print("the texts are the same")

assert texts == same
assert len(set(texts)) == len(SEEDS)
assert together < apart
