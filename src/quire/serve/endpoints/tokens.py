"""/tokenize, /detokenize, and which models there are."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidRequestError
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.endpoints.call import Call, answer_call, encoded, json_answer
from quire.serve.endpoints.conversation import Conversation, chat_options, conversation_ids
from quire.serve.errors import model_not_found, unsupported
from quire.serve.schemas.tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
)
from quire.serve.services import Services


async def tokenize(request: Request) -> Response:
    """Answer with the token ids of a text or of a conversation."""
    return await answer_call(request, TokenizeRequest, _tokenized, generates=False)


async def _tokenized(call: Call[TokenizeRequest]) -> Response:
    tokenizer = _tokenizer(call.services)
    token_ids = await _token_ids(call, tokenizer)
    max_model_len, with_texts = call.services.model.limits.max_model_len, call.fields.return_token_strs

    def answer() -> Response:
        texts = [tokenizer.token_text(each) for each in token_ids] if with_texts else None
        return json_answer(TokenizeAnswer(len(token_ids), max_model_len, token_ids, texts))

    return await call.beside(answer)


async def detokenize(request: Request) -> Response:
    """Answer with the text of token ids, special ones too."""
    return await answer_call(request, DetokenizeRequest, _detokenized, generates=False)


async def _detokenized(call: Call[DetokenizeRequest]) -> Response:
    tokenizer, ids = _tokenizer(call.services), call.fields.tokens
    vocab_size, context = call.services.model.limits.vocab_size, call.services.model.limits.max_model_len
    if len(ids) > context:
        raise InvalidRequestError("tokens", f"{len(ids)} token ids", f"at most {context}, the context length")
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(f"tokens[{index}]", token_id, f"a token id from 0 to {vocab_size - 1}")
    text = await call.beside(lambda: tokenizer.decode(ids, skip_special_tokens=False))
    return json_answer(DetokenizeAnswer(text))


async def models(request: Request) -> Response:
    """Answer with the names of the model, under any of which it can be called."""
    services: Services = request.app.state.services
    services.gate.require_ready()
    return json_answer(ModelList("list", [_card(services, name) for name in services.model_names]))


async def model(request: Request) -> Response:
    """Answer with what there is to know of one name."""
    services: Services = request.app.state.services
    name = request.path_params["model_id"]
    if name not in services.model_names:
        raise model_not_found(name)
    services.gate.require_ready()
    return json_answer(_card(services, name))


def _card(services: Services, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=services.created_s,
        owned_by="quire",
        root=services.model_names[0],
        parent=None,
        max_model_len=services.model.limits.max_model_len,
    )


def _tokenizer(services: Services) -> Tokenizer:
    tokenizer = services.model.tokenizer
    if tokenizer is None:
        raise unsupported("prompt", "this server has no tokenizer: it takes and returns token ids")
    return tokenizer


async def _token_ids(call: Call[TokenizeRequest], tokenizer: Tokenizer) -> list[int]:
    fields = call.fields
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequestError("prompt", fields.prompt, "either a text or messages, not both")
    if fields.prompt is not None:
        return await encoded(call, tokenizer, fields.prompt, add_special_tokens=fields.add_special_tokens is not False)
    options = chat_options(
        tokenizer,
        fields.chat_template_kwargs,
        tools=fields.tools,
        add_generation_prompt=fields.add_generation_prompt,
    )
    return await conversation_ids(call, Conversation(fields.messages or [], options))
