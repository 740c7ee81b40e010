"""A model calls a function: the call follows the schema, the program runs it, and the model gets the result.

pip install -r examples/requirements.txt
"""

import json
import re
import subprocess
import sys

try:
    import openai
except ImportError:
    sys.exit("this example needs OpenAI's library: pip install -r examples/requirements.txt")

DEGREES = {"Oslo": -3, "Paris": 11, "Rome": 19}
TEMPERATURE = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": "How warm it is in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": list(DEGREES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def ask(client: openai.OpenAI) -> list[str]:
    messages = [{"role": "user", "content": "How warm is it?"}]
    wanted = {"model": "guide", "temperature": 0, "tools": [TEMPERATURE], "parallel_tool_calls": False}
    answer = client.chat.completions.create(messages=messages, tool_choice="required", **wanted).choices[0].message
    messages.append(answer)
    cities = []
    for call in answer.tool_calls:
        city = json.loads(call.function.arguments)["city"]  # a small model guesses, but it cannot write anything else
        print(f"{call.function.name}({city})")
        cities.append(city)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{DEGREES[city]} degrees"})
    last = client.chat.completions.create(messages=messages, tool_choice="none", **wanted)
    print(last.choices[0].message.content)
    return cities


command = [sys.executable, "-P", "-m", "quire", "serve", "guide", "--port", "0"]
with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
    try:
        address = next(found[1] for line in server.stdout if (found := re.search(r"listening on (\S+)", line)))
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=30) as client:
            cities = ask(client)
    finally:
        server.terminate()
assert cities
assert set(cities) <= DEGREES.keys()
