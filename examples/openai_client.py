"""OpenAI's library calls quire: a stream, several texts at once, and an error that the library understands.

pip install -r examples/requirements.txt
"""

import re
import subprocess
import sys

try:
    import openai
except ImportError:
    sys.exit("this example needs OpenAI's library: pip install -r examples/requirements.txt")

QUESTION = [{"role": "user", "content": "What is a block table?"}]


def ask(client: openai.OpenAI) -> int:
    for chunk in client.chat.completions.create(model="guide", messages=QUESTION, temperature=0, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    several = client.completions.create(model="guide", prompt="A block is", n=3, seed=1, max_tokens=8)
    print(len(several.choices), "texts,", several.usage.completion_tokens, "tokens")
    try:
        client.chat.completions.create(model="guide", messages=QUESTION, temperature=-1)
    except openai.BadRequestError as error:
        print(error.body["message"])

    again = client.chat.completions.create(model="guide", messages=QUESTION, temperature=0)
    num_cached = again.usage.prompt_tokens_details.cached_tokens
    print(f"{num_cached} of {again.usage.prompt_tokens} tokens of the prompt came from the cache")
    return num_cached


command = [sys.executable, "-P", "-m", "quire", "serve", "guide", "--port", "0"]
with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
    try:
        address = next(found[1] for line in server.stdout if (found := re.search(r"listening on (\S+)", line)))
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=30) as client:
            num_cached = ask(client)  # asked before the model is loaded, the client tries again
    finally:
        server.terminate()
assert num_cached == 16
assert server.returncode == 0
