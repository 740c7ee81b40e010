"""The tokens that end a text or that no text may have, and the makers' sampling defaults, as generation_config.json."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import numpy as np

from quire.compute.gguf.header import GgufHeader
from quire.compute.gguf.vocabulary import CONTROL, NO_TOKEN, vocabulary
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.generation import penalty_of

ENDS: Final = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "<|endoftext|>"),
    *("<|end_of_text|>", "<EOT>", "[EOT]", "[EOS]", "<eos>", "</s>"),
)
"""Control tokens that end a text in every vocabulary that has them, but see `MESSAGE_ENDS`."""

MESSAGE_ENDS: Final = (("<|return|>", "<|call|>", "<|endoftext|>"), ("<|flush|>", "<|calls|>", "<|endoftext|>"))
"""Those of gpt-oss, and of Solar Open, with whose first one `<|end|>` only ends a message, such as the reasoning."""

GEMMA4_ENDS: Final = ("<turn|>", "<|tool_response>")
"""Those of Gemma 4, whatever their type: after a call a model writes the second, which files declare user-defined."""

SUPPRESSED: Final = "tokenizer.ggml.suppress_tokens"
END_IDS: Final = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))

SAMPLING: Final = MappingProxyType({"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"})
"""A setting of generation_config.json → its name after `general.sampling.` in a file."""


def generation_config_of(header: GgufHeader) -> dict[str, object]:
    """Return generation_config.json for a file. Does not mutate."""
    file = ConfigFile(str(header.path), dict(header.settings))
    ends, forbidden = _ends(file), file.fields.get(SUPPRESSED)
    found: dict[str, object] = {"eos_token_id": ends} if ends else {}
    if forbidden is not None:
        found["suppress_tokens"] = forbidden
    return found | _sampling(file)


def _ends(file: ConfigFile) -> list[int]:
    tokens, kinds = vocabulary(file)
    ends = {
        file.size(name, low=0, high=len(tokens) - 1)
        for name in END_IDS
        if file.fields.get(name) not in (None, NO_TOKEN)
    }
    texts = next((ends for ends in MESSAGE_ENDS if ends[0] in tokens), ENDS)
    ends |= {place for place, text in enumerate(tokens) if kinds[place] == CONTROL and text in texts}
    if all(end in tokens for end in GEMMA4_ENDS):
        ends |= {tokens.index(end) for end in GEMMA4_ENDS}
    return sorted(ends)


def _sampling(file: ConfigFile) -> dict[str, object]:
    found = {ours: _setting(file, theirs) for ours, theirs in SAMPLING.items()}
    found |= penalty_of(_setting(file, "penalty_repeat"), _setting(file, "penalty_last_n"))
    return {name: value for name, value in found.items() if value is not None}


def _setting(file: ConfigFile, name: str) -> object:
    """Return a sampling default, None if the file lacks it; of a 32-bit number the decimal that was meant, as 0.95."""
    value = file.fields.get(f"general.sampling.{name}")
    return float(str(np.float32(value))) if isinstance(value, float) else value
