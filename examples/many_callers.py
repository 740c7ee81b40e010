"""Many concurrent callers: each has its own stream; one leaves early, and its memory is freed at once."""

import asyncio

from quire import AsyncLLM, SamplingParams


async def ask(llm: AsyncLLM, number: int, max_tokens: int, patience: int) -> bool:
    """Read an answer as it arrives; return whether it was read to its end."""
    sampling = SamplingParams(temperature=0.8, seed=number, max_tokens=max_tokens, ignore_eos=True)
    async for output in llm.generate([{"role": "user", "content": f"Tell me {number} things."}], sampling):
        if output.finished or len(output.outputs[0].token_ids) >= patience:
            break
    return output.finished


async def main() -> tuple[list[bool], int]:
    """Return which callers read their full answer, and how many blocks are in use afterwards."""
    async with AsyncLLM("guide", kv_memory="16MiB", max_num_seqs=4) as llm:
        patient = [ask(llm, number, max_tokens=24, patience=24) for number in range(7)]
        done = await asyncio.gather(*patient, ask(llm, 7, max_tokens=1000, patience=3))
        while llm.engine.scheduler.requests:  # the abandoned request ends within a step
            await asyncio.sleep(0.001)
        return done, llm.engine.scheduler.memory.ledger().used_blocks


done, used_blocks = asyncio.run(main())
assert done == [True] * 7 + [False]
assert used_blocks == 0
print(f"{sum(done)} callers read everything, 1 left early, {used_blocks} blocks in use")
