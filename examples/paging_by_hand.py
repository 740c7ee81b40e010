"""Paging by hand: write keys and values to slots, and find them again through the block table.

Two sequences grow in turns, so their blocks are interleaved in memory. Each reads its tokens back in order, through its
table. This program plays the engine: it updates the progress of requests, and a list is the device's memory.
"""

from quire import KVCacheManager, KVCacheSpec, MemoryConfig, Request

BLOCK_SIZE, NUM_BLOCKS = 4, 8
EMPTY = ".."

spec = KVCacheSpec.from_layers([None], block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=8, dtype="float32")
manager = KVCacheManager(spec, MemoryConfig(num_blocks=NUM_BLOCKS))
memory = [EMPTY] * (NUM_BLOCKS * BLOCK_SIZE)  # one place for each slot


def grow(request: Request, num_tokens: int) -> None:
    """Make room, write what the model would compute, and commit it."""
    start, end = request.num_computed, request.num_computed + num_tokens
    assert manager.allocate_slots(request, end), "no block left"
    table = manager.memories[request].tables[0]
    for position, slot in enumerate(table.slots(start, end), start):
        memory[slot] = f"{request.request_id}{position}"
    request.num_planned = request.num_computed = end
    manager.commit(request, end)


def read(request: Request) -> list[str]:
    """Gather a sequence in its own order, wherever its blocks are: this is what attention does."""
    table = manager.memories[request].tables[0]
    return [memory[slot] for slot in table.slots(0, request.num_computed)]


a, b = Request("a", range(10)), Request("b", range(20, 27))
for request, num_tokens in ((a, 3), (b, 4), (a, 4), (b, 3), (a, 3)):
    grow(request, num_tokens)

for block_id in range(NUM_BLOCKS):
    print(f"block {block_id}:", *memory[block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE])
for request in (a, b):
    print(f"table of {request.request_id}: {manager.block_tables(request)[0]} reads", *read(request))
ledger = manager.ledger()
print(f"{ledger.used_blocks} blocks used, {ledger.fragmented_slots} of their slots empty, {ledger.free_blocks} free")

assert read(a) == [f"a{position}" for position in range(10)]
assert read(b) == [f"b{position}" for position in range(7)]
assert manager.block_tables(a) == [[0, 2, 4]]
manager.check()
