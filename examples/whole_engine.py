"""A complete engine in one file, from quire's own parts: read it from top to bottom to see how serving works.

Two planes exchange two values. The control plane, which is the scheduler and the KV memory manager, decides which
tokens to compute next and which blocks they use. It passes a `StepPlan` to the compute plane, a worker with a decoder,
here the reference decoder in numpy. The worker returns a `StepResult` with the new tokens. `EngineCore` runs this loop.
"""

from quire import KVCacheManager, MemoryConfig, Request, RequestLimits, SamplingParams, Scheduler, SchedulerConfig
from quire.compute.backend import WorkerParts
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.reference.decoder import ReferenceDecoder
from quire.compute.sampling.reference import ReferenceSampler
from quire.compute.weights.decoder_weights import DecoderWeights
from quire.compute.worker.cache_engine import CacheEngine
from quire.compute.worker.worker import Worker
from quire.engine.text.tokenizer import Tokenizer
from quire.guide import GUIDE_FOLDER

BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS_PER_STEP, MAX_LENGTH = 8, 64, 12, 128

# The model: its shape as data, its weights, and its tokenizer.
model = read_model(ModelFolder(GUIDE_FOLDER))
weights = DecoderWeights.load(model.spec, model.source.tensors())
tokenizer = Tokenizer.open(model.source, vocab_size=model.spec.vocab_size)
end_of_text = frozenset(model.eos_token_ids)

# The compute plane. `CacheEngine` owns the keys and values: arrays of NUM_BLOCKS blocks for each layer.
kv_spec = model.spec.kv_cache_spec(BLOCK_SIZE)
cache = CacheEngine(kv_spec, num_blocks=NUM_BLOCKS)
worker = Worker(WorkerParts(ReferenceDecoder(model.spec, weights), cache, ReferenceSampler(), end_of_text))
worker.start()

# The control plane. `KVCacheManager` knows which request holds which block; it never sees a key or a value.
memory = KVCacheManager(kv_spec, MemoryConfig(num_blocks=NUM_BLOCKS))
config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=MAX_TOKENS_PER_STEP, max_model_len=MAX_LENGTH)
limits = RequestLimits(
    vocab_size=model.spec.vocab_size,
    max_model_len=MAX_LENGTH,
    max_sequence_tokens=NUM_BLOCKS * BLOCK_SIZE,
    max_num_seqs=config.max_num_seqs,
    eos_token_ids=tuple(end_of_text),
)
scheduler = Scheduler(config, memory, limits)


def add(name: str, question: str) -> Request:
    chat = [{"role": "user", "content": question}]
    request = Request(name, tokenizer.encode_chat(chat), SamplingParams(max_tokens=16, temperature=0))
    scheduler.add(request)
    return request


def step() -> bool:
    """Plan a step, compute it, and apply its result; return False if nothing is left to do."""
    plan = scheduler.schedule()  # takes blocks; running requests first, then admission
    if plan is None:
        return False
    running = {request.row: request.request_id for request in scheduler.running}
    shares = [f"{running[row]} {count}" for row, count in zip(plan.rows, plan.counts, strict=True)]
    print(f"step {plan.step_id:2}: tokens of", ", ".join(shares), f"({memory.ledger().used_blocks} blocks)")
    worker.submit(plan)  # keys and values into their slots, paged attention, logits, sampling
    scheduler.update(worker.collect())  # appends the tokens, publishes full blocks, ends requests, frees blocks
    return True


requests = [add("a", "What is a block table?"), add("b", "What is preemption?")]
for _ in range(4):
    step()  # the prompts are computed in chunks, and b decodes as soon as its own is complete
requests.append(add("c", "What is a block table?"))  # joins the batch, and finds a's first blocks in the prefix cache
while step():
    pass
for each in requests:
    print(f"{each.request_id}: {each.num_cached_tokens} tokens cached; {tokenizer.decode(each.output_token_ids)}")

assert requests[2].num_cached_tokens > 0
assert memory.ledger().used_blocks == 0
worker.shutdown()
