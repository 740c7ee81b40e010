"""Text in, text out: the built-in model answers, and the second call hits the prompt cache.

Pass a model's folder or name to ask another model: python examples/ask_the_guide.py Qwen/Qwen3-0.6B
"""

import sys

from quire import LLM, SamplingParams

SYSTEM = {"role": "system", "content": "You are the guide of quire. Answer briefly and exactly."}
QUESTIONS = ["What is a block table?", "What is prefix caching?"]

with LLM(sys.argv[1] if len(sys.argv) > 1 else "guide", kv_memory="16MiB") as llm:
    conversations = [[SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]
    sampling = SamplingParams(temperature=0, max_tokens=60)
    first = llm.chat(conversations, sampling)
    again = llm.chat(conversations, sampling)

assert [output.outputs for output in again] == [output.outputs for output in first]
assert all(output.num_cached_tokens >= len(output.prompt_token_ids) - 16 for output in again)  # every full block
for question, output in zip(QUESTIONS, first, strict=True):
    print(f"{question}\n  {output.outputs[0].text.strip()}")
print("the same answers again, their prompts from the cache")
