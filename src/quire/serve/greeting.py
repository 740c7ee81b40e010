"""The lines that a server prints when it is ready: where to look, and how to call it."""

from __future__ import annotations

import json
import shlex

QUESTION = "What is a block table?"


def greeting(address: str, model_name: str, *, has_dashboard: bool, has_keys: bool, has_chat: bool) -> str:
    r"""Return the dashboard's address, a line for a terminal, and a few for Python.

    `has_chat`: the model has a chat template; without one it continues texts.

    >>> print(greeting("http://localhost:8000", "guide", has_dashboard=True, has_keys=False, has_chat=False))
    dashboard   http://localhost:8000/
    terminal    curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' \
                  -d '{"model": "guide", "prompt": "What is a block table?"}'
    Python      from openai import OpenAI
                client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
                print(client.completions.create(model="guide", prompt="What is a block table?").choices[0].text)
    """
    asked = {"messages": [{"role": "user", "content": QUESTION}]} if has_chat else {"prompt": QUESTION}
    path, name, answer = (
        ("chat/completions", "chat.completions", "message.content") if has_chat else ("completions",) * 2 + ("text",)
    )
    key = ' -H "Authorization: Bearer $QUIRE_API_KEY"' if has_keys else ""
    fields = ", ".join(f"{field}={json.dumps(value)}" for field, value in {"model": model_name, **asked}.items())
    api_key = 'os.environ["QUIRE_API_KEY"]' if has_keys else '"none"'
    lines = {
        "terminal": [
            f"curl {address}/v1/{path} -H 'Content-Type: application/json'{key} \\",
            f"  -d {shlex.quote(json.dumps({'model': model_name, **asked}))}",
        ],
        "Python": [
            *(["import os"] if has_keys else []),
            "from openai import OpenAI",
            f'client = OpenAI(base_url="{address}/v1", api_key={api_key})',
            f"print(client.{name}.create({fields}).choices[0].{answer})",
        ],
    }
    if has_dashboard:
        lines = {"dashboard": [f"{address}/"], **lines}
    return "\n".join(
        f"{'' if index else label:<12}{line}" for label, each in lines.items() for index, line in enumerate(each)
    )
