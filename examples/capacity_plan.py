"""How much faster are narrower number types? Plan one model on one card three times; this needs neither of them."""

from quire.cli.model_shapes import find_shape
from quire.simulate.capacity import Occupancy
from quire.simulate.estimate import Estimator
from quire.simulate.hardware import find_hardware
from quire.simulate.lengths import Length, RequestLengths
from quire.simulate.roofline import Numbers, Roofline

card, model = find_hardware("nvidia-l4"), find_shape("llama-3.1-8b")
lengths = RequestLengths.of_lengths(Length.parse("400/1500"), Length.parse("128±64"), longest=model.context_length)

print(f"{model.name} on {card.name}, {card.memory_bytes >> 30} GiB; prompts 400/1500, outputs 128±64")
print(f"{'weights':>10} {'KV':>9} {'requests at once':>17} {'tok/s at most':>14}")
rates = []
for numbers in (Numbers(), Numbers(weights="int8"), Numbers(weights="int8", kv_dtype="int8")):
    spec = model.kv_cache_spec(16, numbers.stored_kv_dtype)
    left = card.memory_bytes - model.weight_bytes(numbers.dtype, numbers.weights) - (256 << 20)  # for activations
    held = Occupancy.of(spec, lengths).in_pool(left // spec.bytes_per_block, model.context_length)
    busy = Estimator(Roofline(card, model, numbers), lengths).serving(int(held.average), budget=2048)
    rates.append(busy.tokens_per_s)
    weights = numbers.dtype if numbers.weights == "auto" else numbers.weights
    print(f"{weights:>10} {spec.dtype:>9} {held.average:>17.1f} {busy.tokens_per_s:>14,.0f}")

print(f"narrower types give up to {rates[-1] / rates[0]:.1f} times the tokens, on the same card")
assert rates == sorted(rates)
