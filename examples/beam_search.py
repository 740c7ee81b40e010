"""Beam search, step by step, with the blocks that the beams hold.

Beams with a common beginning share its blocks. A beam without a continuation frees its blocks; a beam with several
continuations is forked, which takes no memory until they write. In the map, each letter is a beam that holds the block:

    block        0    1    2    3    4
    holders    ABC    A   BC    B    C       A differs from the others in the second block, B and C differ in the third
"""

from quire import LLM, Request, SamplingParams

QUESTION = [{"role": "user", "content": "What is a block table?"}]
SEARCH = SamplingParams(n=3, beam_search=True, temperature=0, max_tokens=60, length_penalty=0.8)

with LLM("guide", kv_memory="2MiB", enable_prefix_caching=False) as llm:
    (output,) = llm.chat([QUESTION], SEARCH, use_tqdm=False)
    engine, tokenizer = llm.engine, llm.tokenizer
    assert tokenizer is not None
    engine.add_request(Request("search", output.prompt_token_ids, SEARCH))
    memory, most_used, most_apart, num_steps = engine.scheduler.memory, 0, 0, 0
    while engine.step() is not None:
        num_steps += 1
        beams = sorted(engine.scheduler.running, key=lambda beam: beam.branch)
        tables = [memory.block_tables(beam)[0] for beam in beams]
        most_used = max(most_used, memory.ledger().used_blocks)
        most_apart = max(most_apart, sum(map(len, tables)))
        if num_steps % 12 != 3 or not beams:
            continue
        holders: dict[int, str] = {}
        for name, table in zip("ABC", tables, strict=True):
            for block in table:
                holders[block] = holders.get(block, "") + name
        print(f"step {num_steps}:", " ".join(f"{block}:{names}" for block, names in sorted(holders.items())))
        for name, beam in zip("ABC", beams, strict=True):
            print(f"   {name} …{tokenizer.decode(beam.output_token_ids)[-60:]!r}")

for found in output.outputs:
    print(f"{found.score:8.4f}  {found.text[:90]}…")
print(f"{most_used} blocks for the three beams; without sharing they would have taken {most_apart}")

scores = [found.score for found in output.outputs]
assert scores == sorted(scores, reverse=True)
assert most_used < most_apart
