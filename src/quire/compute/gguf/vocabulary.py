"""The vocabulary of a GGUF file, and the tokens that end a text or that no text may have, as generation_config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from quire.compute.gguf.header import GgufHeader
from quire.compute.models.config_file import ConfigFile

ENDS: Final = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "<|endoftext|>"),
    *("<|end_of_text|>", "<EOT>", "[EOT]", "[EOS]", "<eos>", "</s>"),
)
"""Control tokens that end a text in every vocabulary that has them, but see `MESSAGE_ENDS`."""

MESSAGE_ENDS: Final = (("<|return|>", "<|call|>", "<|endoftext|>"), ("<|flush|>", "<|calls|>", "<|endoftext|>"))
"""Those of gpt-oss, and of Solar Open, with whose first one `<|end|>` only ends a message, such as the reasoning."""

GEMMA4_ENDS: Final = ("<turn|>", "<|tool_response>")
"""Those of Gemma 4, whatever their type: after a call a model writes the second, which files declare user-defined."""

CONTROL: Final = 3  # of tokenizer.ggml.token_type
NO_TOKEN: Final = (1 << 32) - 1
"""-1 as files have it for a token that a vocabulary lacks, such as the one for padding."""

SUPPRESSED: Final = "tokenizer.ggml.suppress_tokens"
END_IDS: Final = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def generation_config_of(header: GgufHeader) -> dict[str, object]:
    """Return generation_config.json for a file: the tokens that end a text, or may not be in one. Does not mutate."""
    file = ConfigFile(str(header.path), dict(header.settings))
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
    found: dict[str, object] = {"eos_token_id": sorted(ends)} if ends else {}
    forbidden = file.fields.get(SUPPRESSED)
    return found if forbidden is None else {**found, "suppress_tokens": forbidden}


def vocabulary(file: ConfigFile) -> tuple[Sequence[str], Sequence[Any]]:
    """Return the tokens of a file by id, and the type of each."""
    tokens = file.texts("tokenizer.ggml.tokens")
    kinds = file.fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise file.error("tokenizer.ggml.token_type", f"a list of {len(tokens)} types, one for each token")
    return tokens, kinds


def scores_of(file: ConfigFile, count: int) -> Sequence[float]:
    """Return the scores of `count` tokens."""
    scores = file.fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != count or not {int, float}.issuperset(map(type, scores)):
        raise file.error("tokenizer.ggml.scores", f"a list of {count} numbers, one for each token")
    return scores
