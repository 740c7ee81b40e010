"""/tokenize, /detokenize, and the list of models."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.context import RequestContext
from quire.serve.endpoints.line import answer_loaded, require_ready
from quire.serve.loading.model_set import ModelSet, names_for
from quire.serve.render.answer import json_answer
from quire.serve.run.prompts import encoded, encoded_conversation, off_loop_if_long
from quire.serve.schemas.tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
)
from quire.serve.services import Services
from quire.serve.tenants import Tenant
from quire.serve.translate.tokens import require_token_ids, required_tokenizer, text_to_encode


async def tokenize(request: Request) -> Response:
    """Answer with the token ids of a text or of a conversation."""
    return await answer_loaded(request, TokenizeRequest, _tokenized)


async def _tokenized(fields: TokenizeRequest, services: Services, context: RequestContext) -> Response:
    tokenizer = required_tokenizer(services)
    given, special = text_to_encode(fields, tokenizer, services.config), fields.add_special_tokens is not False
    if isinstance(given, str):
        token_ids = await encoded(services, context, tokenizer, given, add_special_tokens=special)
    else:
        token_ids = (await encoded_conversation(services, context, *given)).token_ids.tolist()
    max_model_len = services.model.limits.max_model_len

    def answer() -> Response:
        texts = [tokenizer.token_text(each) for each in token_ids] if fields.return_token_strs else None
        return json_answer(TokenizeAnswer(len(token_ids), max_model_len, token_ids, texts))

    return await off_loop_if_long(services, context, answer)


async def detokenize(request: Request) -> Response:
    """Answer with the text of token ids, including special tokens."""
    return await answer_loaded(request, DetokenizeRequest, _detokenized)


async def _detokenized(fields: DetokenizeRequest, services: Services, context: RequestContext) -> Response:
    tokenizer = required_tokenizer(services)
    require_token_ids(fields.tokens, services.model.limits)
    decode = partial(tokenizer.decode, fields.tokens, skip_special_tokens=False)
    return json_answer(DetokenizeAnswer(await off_loop_if_long(services, context, decode)))


async def models(request: Request) -> Response:
    """Answer with all models, under each of their names."""
    served, tenant = require_ready(request).models, request.state.context.tenant
    return json_answer(
        ModelList("list", [_card(each, name, tenant) for each in served for name in names_for(each, tenant)])
    )


async def model(request: Request) -> Response:
    """Answer with the card of one name; with all models if the path ends with its slash."""
    served: ModelSet = request.app.state.models
    name = request.path_params["model_id"]
    if not name:
        return await models(request)
    tenant = request.state.context.tenant
    services = served.find(name, tenant)
    require_ready(request)
    return json_answer(_card(services, name, tenant))


def _card(services: Services, name: str, tenant: Tenant) -> ModelCard:
    base = services.name if tenant.may_call(services.name) else None
    return ModelCard(
        id=name,
        object="model",
        created=services.created_s,
        owned_by="quire",
        root=base or name,
        parent=None if ModelSet.adapter_of(services, name) is None else base,
        max_model_len=services.model.limits.max_model_len,
        state=services.model.state.value,
    )
