"""A chat with a shared system prompt: three people talk to one assistant, each in a separate conversation.

The first request computes the system prompt; the others hit it in the cache. From the second turn on, the conversation
so far is in the cache too, and only the new message is computed.
"""

from quire import LLM, SamplingParams

SYSTEM = {"role": "system", "content": "You are the guide of quire. You answer questions about paged memory, briefly."}
QUESTIONS = {
    "Ada": ["What is a block table?", "What is copy-on-write?"],
    "Bob": ["What is prefix caching?", "What is preemption?"],
    "Cy": ["What does the scheduler do?", "What is continuous batching?"],
}

conversations = {name: [SYSTEM] for name in QUESTIONS}
with LLM("guide", kv_memory="8MiB") as llm:
    for turn in range(2):
        for name, questions in QUESTIONS.items():
            said = conversations[name]
            said.append({"role": "user", "content": questions[turn]})
            (output,) = llm.chat([said], SamplingParams(temperature=0, max_tokens=80), use_tqdm=False)
            said.append({"role": "assistant", "content": output.outputs[0].text})
            num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
            print(f"{name}: {questions[turn]}   ({num_prompt} tokens, {num_cached} of them from the cache)")
            print(f"    {output.outputs[0].text}")
            assert num_cached > 0 or (turn, name) == (0, "Ada")
    hit_rate = llm.engine.scheduler.memory.ledger().hit_rate

print(f"of all prompt tokens, {hit_rate:.0%} came from the cache")
assert hit_rate > 0.5
