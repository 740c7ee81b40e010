"""Tool formats: how models write tool calls. A format is chosen by name, or recognised by the chat template."""

from __future__ import annotations

from typing import Final

from quire.core.errors import InvalidConfigError
from quire.serve.tools.base import ToolFormat
from quire.serve.tools.command import COMMAND
from quire.serve.tools.gemma4 import GEMMA4
from quire.serve.tools.granite import GRANITE
from quire.serve.tools.harmony import HARMONY
from quire.serve.tools.hermes import HERMES
from quire.serve.tools.lfm2 import LFM2
from quire.serve.tools.llama3 import LLAMA3
from quire.serve.tools.mistral import MISTRAL, MISTRAL_ARGS
from quire.serve.tools.phi4 import PHI4
from quire.serve.tools.tag_calls import GLM45, QWEN3_CODER, SEED

__all__ = ["AUTO", "NONE", "TOOL_FORMATS", "ToolFormat", "create_tool_format"]

AUTO: Final = "auto"
NONE: Final = "none"
TOOL_FORMATS: Final[tuple[ToolFormat, ...]] = (
    *(HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, PHI4),
    *(HARMONY, QWEN3_CODER, SEED, GLM45, GRANITE, COMMAND, GEMMA4, LFM2),
)


def create_tool_format(name: str, template: str) -> ToolFormat | None:
    """Return the format of a name; for "auto", the format of the chat template, or None if it has none.

    >>> create_tool_format("mistral", "").name, create_tool_format("none", "<tool_call> arguments")
    ('mistral', None)
    >>> create_tool_format("auto", "… <tool_call> … arguments …").name, create_tool_format("auto", "{{ messages }}")
    ('hermes', None)
    """
    names = (AUTO, NONE, *(each.name for each in TOOL_FORMATS))
    if name not in names:
        raise InvalidConfigError("tool_format", name, ", ".join(names))
    return next((each for each in TOOL_FORMATS if (each.is_of(template) if name == AUTO else each.name == name)), None)
