"""Fields that requests may have but the server ignores, and fields that it refuses by name.

Clients send fields that this server does not support. A field that cannot change the output is ignored: `IGNORED` is
the complete list. A field that would change the output is refused: a client that requests JSON must not get prose.
`REFUSED` has the fields that clients are known to send, with reasons; any other unknown field is refused as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

IGNORED: Final = frozenset(
    {
        # for a service's bookkeeping: user, price, retention
        "client_metadata",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
        # hints that may speed up or split an answer, but do not change it
        "cache_prompt",
        "prediction",
        "stream_interval",
        # about tools, on endpoints without tools, and a bound that no model sees
        "max_tool_calls",
        "parallel_tool_calls",
        # about a style that models here do not offer, and about how slow tokenizers decode
        "spaces_between_special_tokens",
        "verbosity",
    }
)
"""Fields that are accepted and change nothing."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field is refused, and its neutral values, which count as absent."""

    why: str
    nothing: tuple[Any, ...] = ()


_TEXT_ONLY: Final = "this server supports text only"
_OLD_GRAMMAR: Final = "use structured_outputs, or response_format"
_NO_STATE: Final = "this server does not store conversations"

REFUSED: Final[Mapping[str, Refusal]] = MappingProxyType(
    {
        "add_special_tokens": Refusal("the chat template writes the special tokens of a conversation", (False,)),
        "audio": Refusal(_TEXT_ONLY),
        "background": Refusal("this server does not store answers", (False,)),
        "best_of": Refusal("only one text is generated"),
        "chat_template": Refusal("the chat template comes from the model, never from a client"),
        "context": Refusal("send the conversation to /api/chat; its beginning is still in the cache", ([],)),
        "context_management": Refusal(_NO_STATE, ([],)),
        "continue_final_message": Refusal("only a chat can continue its last message", (False,)),
        "conversation": Refusal(_NO_STATE),
        "documents": Refusal("put documents into the messages", ([],)),
        "echo": Refusal("only plain completions can be echoed", (False,)),
        "function_call": Refusal("use tools instead", ("none", "auto")),
        "functions": Refusal("use tools instead", ([],)),
        "guided_choice": Refusal(_OLD_GRAMMAR),
        "guided_grammar": Refusal(_OLD_GRAMMAR),
        "guided_json": Refusal(_OLD_GRAMMAR),
        "guided_regex": Refusal(_OLD_GRAMMAR),
        "images": Refusal("images belong to a message, for a model that reads them", ([],)),
        "kv_transfer_params": Refusal("keys and values are never transferred", ({},)),
        "logits_processors": Refusal("this server runs no code from clients", ([],)),
        "logprob_token_ids": Refusal("only the likeliest tokens have log-probabilities", ([],)),
        "mm_processor_kwargs": Refusal("images are prepared as the model's files say", ({},)),
        "moderation": Refusal("this server does not moderate"),
        "modalities": Refusal(_TEXT_ONLY, (["text"],)),
        "n": Refusal("only one text is generated", (1,)),
        "previous_response_id": Refusal(_NO_STATE),
        "prompt_embeds": Refusal("prompts are texts or token ids"),
        "reasoning_effort": Refusal("a plain completion has no chat template", ("none",)),
        "repetition_detection": Refusal("use repetition_penalty, frequency_penalty or stop"),
        "shift": Refusal("a text ends at the end of the context", (False,)),
        "structured_outputs": Refusal("only text.format can constrain the output here"),
        "suffix": Refusal("only /v1/completions, /api/generate and /infill write text before a suffix", ("",)),
        "template": Refusal("the chat template comes from the model, never from a client", ("",)),
        "thinking_token_budget": Refusal("use max_tokens"),
        "truncate": Refusal("this server never truncates a conversation", (False,)),
        "use_beam_search": Refusal("only one text is generated", (False,)),
        "web_search_options": Refusal("this server does not search the web"),
    }
)
"""Fields that every endpoint without its own definition refuses, with the reason."""
