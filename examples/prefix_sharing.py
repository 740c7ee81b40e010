"""Prefix sharing: many requests with the same system prompt compute and store it once.

The same requests run twice: with sharing, and each with its own cache salt, so that no request can hit another's
blocks. The answers are equal to the token; the work is not.
"""

import quire
from quire.core.clock import ManualClock
from quire.simulate.executor import SimExecutor

NUM_REQUESTS, SYSTEM_PROMPT = 32, range(48)  # 48 tokens are three blocks of 16


def serve(salts: list[str]) -> tuple[list[quire.Request], quire.KVCacheManager, int]:
    """Run all requests concurrently; return them, the memory, and the peak number of blocks in use."""
    spec = quire.KVCacheSpec.from_layers([None] * 28, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    memory = quire.KVCacheManager(spec, quire.MemoryConfig(num_blocks=256))
    limits = quire.RequestLimits(vocab_size=1000, max_model_len=256, max_sequence_tokens=4096, max_num_seqs=64)
    clock = ManualClock()
    engine = quire.EngineCore(
        quire.Scheduler(quire.SchedulerConfig(max_num_seqs=64), memory, limits), SimExecutor(1000, clock), clock
    )
    requests = []
    for number, salt in enumerate(salts):
        prompt = [*SYSTEM_PROMPT, 100 + number, 7, 8, 9]
        requests.append(
            quire.Request(str(number), prompt, quire.SamplingParams(max_tokens=8), scope=quire.CacheScope(salt=salt))
        )
        engine.add_request(requests[-1])
    most_used = 0
    while engine.step() is not None:
        most_used = max(most_used, memory.ledger().used_blocks)
    return requests, memory, most_used


shared, memory, shared_blocks = serve([""] * NUM_REQUESTS)
alone, _, alone_blocks = serve([f"salt {number}" for number in range(NUM_REQUESTS)])
ledger = memory.ledger()
print(f"{NUM_REQUESTS} requests, each beginning with the same {len(SYSTEM_PROMPT)} tokens")
print(f"without sharing: {alone_blocks} blocks at most, {ledger.queried_tokens} prompt tokens computed")
print(
    f"with sharing:    {shared_blocks} blocks at most, {ledger.queried_tokens - ledger.hit_tokens} prompt tokens "
    f"computed, {ledger.hit_tokens} taken from the cache ({ledger.hit_rate:.0%})"
)
print("the answers are the same, to the token")

assert [request.output_token_ids for request in shared] == [request.output_token_ids for request in alone]
assert ledger.hit_tokens == (NUM_REQUESTS - 1) * len(SYSTEM_PROMPT)
assert alone_blocks - shared_blocks == (NUM_REQUESTS - 1) * len(SYSTEM_PROMPT) // 16
