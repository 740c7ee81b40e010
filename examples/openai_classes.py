"""OpenAI's library gets answers as classes from quire: complete, streamed, and through the Responses API.

pip install -r examples/requirements.txt
"""

import re
import subprocess
import sys
from typing import Literal

try:
    import openai
except ImportError:
    sys.exit("this example needs OpenAI's library: pip install -r examples/requirements.txt")
from pydantic import BaseModel, Field


class Part(BaseModel):
    kind: Literal["block", "table", "pool"]
    count: int = Field(ge=0, le=99)


class Answer(BaseModel):
    parts: list[Part] = Field(min_length=1, max_length=2)
    is_shared: bool


QUESTION = "What is a block table?"
ASKED = {"model": "guide", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}


def ask(client: openai.OpenAI) -> list[Answer | None]:
    whole = client.chat.completions.parse(response_format=Answer, **ASKED)
    print("whole:   ", whole.choices[0].message.parsed)

    with client.chat.completions.stream(response_format=Answer, **ASKED) as stream:
        pieces = sum(event.type == "content.delta" for event in stream)
        streamed = stream.get_final_completion()
    print("streamed:", streamed.choices[0].message.parsed, "in", pieces, "pieces")

    response = client.responses.parse(model="guide", input=QUESTION, temperature=0, text_format=Answer)
    print("response:", response.output_parsed)
    return [each.choices[0].message.parsed for each in (whole, streamed)] + [response.output_parsed]


command = [sys.executable, "-P", "-m", "quire", "serve", "guide", "--port", "0"]
with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
    try:
        address = next(found[1] for line in server.stdout if (found := re.search(r"listening on (\S+)", line)))
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=30) as client:
            answers = ask(client)  # asked before the model is loaded, the client tries again
    finally:
        server.terminate()
assert isinstance(answers[0], Answer)
assert answers[0] == answers[1] == answers[2]
