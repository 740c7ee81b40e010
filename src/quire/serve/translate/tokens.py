"""Requests of /tokenize and /detokenize: the texts or token ids to convert."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.errors import InvalidRequestError
from quire.core.validate import RequestLimits
from quire.engine.text.chat_template import ChatOptions
from quire.engine.text.prompts import Message
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.answer_form import AnswerForm
from quire.serve.config import ServerConfig
from quire.serve.errors import unsupported
from quire.serve.schemas.tokens import TokenizeRequest
from quire.serve.services import Services
from quire.serve.translate.conversation import chat_options, require_plain_messages, with_ending
from quire.serve.translate.tools import unanswered_form


def required_tokenizer(services: Services) -> Tokenizer:
    """Return the tokenizer; raises `ApiError` if the server has none."""
    tokenizer = services.model.tokenizer
    if tokenizer is None:
        raise unsupported("prompt", "this server has no tokenizer: it takes and returns token ids")
    return tokenizer


def text_to_encode(
    fields: TokenizeRequest, tokenizer: Tokenizer, config: ServerConfig
) -> str | tuple[Sequence[Message], ChatOptions, AnswerForm | None]:
    """Return the text to encode, or a conversation, its template options and its form. Does not mutate."""
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequestError("prompt", fields.prompt, "either a text or messages, not both")
    if fields.prompt is not None:
        return fields.prompt
    messages = fields.messages or []
    choice, form = unanswered_form(config, tokenizer, fields.tools)
    options = chat_options(tokenizer, fields.chat_template_kwargs, tools=choice.shown)
    options = with_ending(options, fields.add_generation_prompt, fields.continue_final_message)
    require_plain_messages(messages)
    return messages, options, form


def require_token_ids(token_ids: Sequence[int], limits: RequestLimits) -> None:
    """Raise for ids outside the vocabulary, and for more ids than the context holds. Does not mutate."""
    context = limits.max_model_len
    if len(token_ids) > context:
        raise InvalidRequestError("tokens", f"{len(token_ids)} token ids", f"at most {context}, the context length")
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequestError(f"tokens[{index}]", token_id, f"a token id from 0 to {limits.vocab_size - 1}")
