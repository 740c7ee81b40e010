"""Example calls of a server, for a terminal and for Python, and the lines that a server prints when it is ready.

The dashboard shows the same calls, which are defined only here.
"""

from __future__ import annotations

import json
import shlex
from typing import Final

from quire.core.byte_sizes import format_bytes
from quire.core.config import ResolvedConfig
from quire.engine.memory_plan import MemoryPlan

GIB: Final = 1 << 30
QUESTION: Final = "What is a block table?"

CHAT: Final = ("chat/completions", "chat.completions", "messages", "choices[0].message.content")
TEXT: Final = ("completions", "completions", "prompt", "choices[0].text")
VECTORS: Final = ("embeddings", "embeddings", "input", "data[0].embedding[:4]")
"""A use of a model: the path, its name in OpenAI's library, the field of the request, and that of the answer."""


def use_of(config: ResolvedConfig, *, has_chat: bool) -> tuple[str, str, str, str]:
    """Return the use of a model to show an example of; `has_chat`: it has a chat template."""
    return VECTORS if config.one_step else CHAT if has_chat else TEXT


def example_calls(
    address: str, model_name: str, *, has_keys: bool, use: tuple[str, str, str, str]
) -> dict[str, list[str]]:
    """Return the lines of an example call for the terminal and for Python.

    >>> for line in example_calls("http://localhost:8000", "guide", has_keys=True, use=CHAT)["Python"]:
    ...     print(line)
    import os
    from openai import OpenAI
    client = OpenAI(base_url="http://localhost:8000/v1", api_key=os.environ["QUIRE_API_KEY"])
    messages = [{"role": "user", "content": "What is a block table?"}]
    print(client.chat.completions.create(model="guide", messages=messages).choices[0].message.content)
    """
    path, name, field, answer = use
    value: object = [{"role": "user", "content": QUESTION}] if use == CHAT else QUESTION
    key = ' -H "Authorization: Bearer $QUIRE_API_KEY"' if has_keys else ""
    api_key = 'os.environ["QUIRE_API_KEY"]' if has_keys else '"none"'
    model = json.dumps(model_name)
    return {
        "terminal": [
            f"curl {address}/v1/{path}{key} \\",
            f"  -d {shlex.quote(json.dumps({'model': model_name, field: value}))}",
        ],
        "Python": [
            *(["import os"] if has_keys else []),
            "from openai import OpenAI",
            f'client = OpenAI(base_url="{address}/v1", api_key={api_key})',
            f"{field} = {json.dumps(value)}",
            f"print(client.{name}.create(model={model}, {field}={field}).{answer})",
        ],
    }


def kv_memory_hint(config: ResolvedConfig, plan: MemoryPlan) -> str:
    """Return a line that says how to take less memory on a CPU; empty if it is little, or chosen by the user."""
    size = plan.num_blocks * plan.bytes_per_block
    is_chosen = config.kv_memory is not None or config.touch_kv_memory == "use"
    if is_chosen or size < GIB or plan.needs.host_bytes is not None:
        return ""
    less = "--kv-memory 1GiB for less, --touch-kv-memory use to claim it as it fills"
    return f"\n{'note':<12}the {format_bytes(size)} of KV memory are claimed soon after the start; {less}"


def greeting(
    address: str, model_name: str, *, has_dashboard: bool, has_keys: bool, use: tuple[str, str, str, str]
) -> str:
    r"""Return the dashboard's address, example calls for a terminal and Python, and how to stop the server.

    >>> print(greeting("http://localhost:8000", "guide", has_dashboard=True, has_keys=False, use=TEXT))
    dashboard   http://localhost:8000/
    terminal    curl http://localhost:8000/v1/completions \
                  -d '{"model": "guide", "prompt": "What is a block table?"}'
    Python      from openai import OpenAI
                client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
                prompt = "What is a block table?"
                print(client.completions.create(model="guide", prompt=prompt).choices[0].text)
    stop        Ctrl-C, or SIGTERM: running requests finish first; press twice to stop at once
    """
    lines = example_calls(address, model_name, has_keys=has_keys, use=use)
    if has_dashboard:
        lines = {"dashboard": [f"{address}/"], **lines}
    lines["stop"] = ["Ctrl-C, or SIGTERM: running requests finish first; press twice to stop at once"]
    return "\n".join(
        f"{'' if index else label:<12}{line}" for label, each in lines.items() for index, line in enumerate(each)
    )
