"""How much does a prefix-aware router help? Simulate chats on three replicas, once for each router.

The scheduler and the memory manager are the real ones; only the model is simulated, with times from a roofline.
"""

from quire import MemoryConfig, SchedulerConfig
from quire.cli.model_shapes import find_shape
from quire.routing.router import ROUTERS, Router
from quire.simulate.cost.roofline import RooflineCost
from quire.simulate.hardware import find_hardware
from quire.simulate.replica import EngineSetup, PagedEngine
from quire.simulate.roofline import Numbers, Roofline
from quire.simulate.simulation import Simulation
from quire.simulate.workload.arrivals import Arrivals
from quire.simulate.workload.conversations import Conversations, Turns
from quire.simulate.workload.drawn import DrawnPrompts
from quire.simulate.workload.lengths import ALPACA

shape, card = find_shape("llama-3.1-8b"), find_hardware("nvidia-l4")
spec = shape.kv_cache_spec(16, "bfloat16")
cost = RooflineCost(Roofline(card, shape, Numbers()), bytes_per_block=spec.bytes_per_block)
setup = EngineSetup(spec, MemoryConfig(num_blocks=3000), SchedulerConfig(max_model_len=8192), cost)
prompts, turns = DrawnPrompts(ALPACA, longest=8192), Turns(num_turns=6, thinking_s=20.0)

hit_rates = {}
for name in ROUTERS:
    chats = Conversations(Arrivals(rate=0.5), prompts, turns, duration_s=80.0, seed=7)
    result = Simulation([PagedEngine(setup) for _ in range(3)], chats, router=Router(16, b"", name)).run()
    hit_rates[name] = result.hit_rate
    print(f"{name:<16} {result.num_requests} turns, {result.hit_rate:.0%} of their prompts from a cache")

assert hit_rates["least_work"] > max(hit_rates["round_robin"], hit_rates["least_loaded"])
