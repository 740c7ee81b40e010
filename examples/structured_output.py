"""Structured output: three records that follow a schema, sampled at a high temperature from a model that knows no JSON.

Only tokens that can still lead to a valid text are sampled, so the output always parses.
"""

import json

from quire import LLM, Grammar, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "state": {"enum": ["used", "cached", "free"]},
        "holders": {"type": "integer", "minimum": 0, "maximum": 8},
        "note": {"type": "string", "maxLength": 30},
    },
    "required": ["state", "holders", "note"],
    "additionalProperties": False,
}

held = SamplingParams(temperature=1.5, seed=3, n=3, max_tokens=80, grammar=Grammar.json_schema(SCHEMA))
with LLM("guide", kv_memory="8MiB") as llm:
    (output,) = llm.generate("A block is", held)
    answer = llm.generate("Is a block of memory shared?", temperature=0, grammar=Grammar.choice(["yes", "no"]))
    try:
        llm.generate("A block is", grammar=Grammar.json_schema({"$ref": "file:///etc/passwd"}))
    except ValueError as error:
        refusal = str(error)

records = [json.loads(completion.text) for completion in output.outputs]
for record in records:
    print(record)
print(f"shared? {answer[0].outputs[0].text}")
print("refused:", refusal.split(": ", 3)[-1])

assert all(list(record) == ["state", "holders", "note"] for record in records)
assert all(record["state"] in ("used", "cached", "free") and 0 <= record["holders"] <= 8 for record in records)
assert answer[0].outputs[0].text in ("yes", "no")
assert "does not fetch" in refusal
