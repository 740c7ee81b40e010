"""Tokenizes prompts that the engine's door cannot: ones to cut, with a tool format, or with a grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar, cast

from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import SamplingParams
from quire.core.validate import longest, longest_text
from quire.engine.images.parts import has_images
from quire.engine.text.chat_template import ChatOptions
from quire.engine.text.prompts import Encoded, Message, Prompt, encode_chat, with_special
from quire.engine.text.scores import AS_PAIR
from quire.engine.text.tokenizer import TEXT_BYTES_PER_TOKEN, Tokenizer
from quire.serve.answer_form import AnswerForm
from quire.serve.context import RequestContext
from quire.serve.run.request import GenerationRequest
from quire.serve.services import Services

LONG_TEXT: Final = 10_000
"""The texts of a body of this many bytes or more are encoded and decoded off the event loop."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ReadyPrompt:
    """A prompt in a form that the engine's door accepts, with its sampling parameters.

    `text` is the whole prompt as text; None for token ids, a conversation, or a prompt that was cut.
    """

    prompt: Prompt
    sampling: SamplingParams
    text: str | None = None


async def ready_prompt(
    services: Services, context: RequestContext, request: GenerationRequest, prompt: Prompt
) -> ReadyPrompt:
    """Return a prompt of an admitted call, encoded here if the door could not do what the call requests."""
    if request.chat is not None:
        return await _ready_conversation(services, context, request, cast(Sequence[Message], prompt))
    if not isinstance(prompt, str):
        return ReadyPrompt(truncated(cast(list[int], prompt), request, services), request.sampling)
    cut = request.truncation
    if cut is not None and cut.keeps_start:  # the beginning of a too long text is enough
        most_bytes = TEXT_BYTES_PER_TOKEN * services.model.limits.max_model_len
        prompt = prompt.encode()[:most_bytes].decode(errors="ignore")
    tokenizer, special = services.model.tokenizer, request.add_special_tokens
    if tokenizer is None or not prompt or (special and request.truncation is None):
        return ReadyPrompt(prompt, request.sampling, prompt)
    ids = await encoded(services, context, tokenizer, prompt, add_special_tokens=special)
    kept = truncated(ids, request, services)
    if len(kept) == len(ids):
        return ReadyPrompt(ids, request.sampling, prompt)
    if cut is not None and request.pooling is not None and special:
        plain = await encoded(services, context, tokenizer, prompt, add_special_tokens=False)
        kept = with_special(ids, plain, kept, keeps_start=cut.keeps_start)
    return ReadyPrompt(kept, request.sampling)


async def _ready_conversation(
    services: Services, context: RequestContext, request: GenerationRequest, messages: Sequence[Message]
) -> ReadyPrompt:
    """Return a conversation, with the grammar for its answers.

    The grammar depends on the end of the prompt, where the template may have opened the reasoning.
    """
    form, sampling = request.form, request.sampling
    if services.model.limits.one_step:  # the door refuses conversations that are no pair of texts to score
        cuts = request.chat == AS_PAIR and request.truncation is not None
        return ReadyPrompt(await _pair_ids(services, context, request, messages) if cuts else messages, sampling)
    is_plain = form is None or not (form.tools or form.adapt or sampling.grammar)
    if is_plain and request.truncation is None and not (request.cuts_output or has_images(messages)):
        return ReadyPrompt(messages, sampling)
    whole = await encoded_conversation(services, context, messages, request.chat or ChatOptions(), form)
    ids = truncated(whole.token_ids.tolist(), request, services)
    if whole.images and len(ids) < len(whole.token_ids):
        raise InvalidRequestError("messages", "a prompt with images", "a shorter prompt, because no image can be cut")
    if form is not None:
        sampling = replace(sampling, grammar=form.grammar(sampling.grammar, form.thinking(ids)))
    if request.cuts_output and len(ids) + (sampling.max_tokens or 0) > longest(services.model.limits):
        sampling = replace(sampling, max_tokens=None)  # as many as fit, which are fewer
    return ReadyPrompt(whole if whole.images else ids, sampling)


async def _pair_ids(
    services: Services, context: RequestContext, request: GenerationRequest, messages: Sequence[Message]
) -> list[int]:
    """Return the tokens of a pair of texts, cut so that the tokens around both texts stay."""
    tokenizer, most = services.model.tokenizer, _length(request, services)
    if tokenizer is None:
        raise InvalidRequestError("prompt", "a pair of texts", "token ids, because this server has no tokenizer")
    encode = partial(tokenizer.encode_pair, [str(message["content"]) for message in messages], most)
    return await off_loop_if_long(services, context, encode)


def truncated(token_ids: list[int], request: GenerationRequest, services: Services) -> list[int]:
    """Return a prompt cut to the requested length, at its start or its end. Does not mutate.

    Raises `InvalidRequestError` for a longer one if `truncation.refuses`.
    """
    cut = request.truncation
    if cut is None:
        return token_ids
    length = _length(request, services)
    if cut.refuses and len(token_ids) > length:
        raise InvalidRequestError("prompt", f"{len(token_ids):,} tokens", f"at most {length:,} (max_tokens)")
    return token_ids[:length] if cut.keeps_start else token_ids[-length:]


def _length(request: GenerationRequest, services: Services) -> int:
    """Return the tokens to which a request's prompts are cut."""
    limits = services.model.limits
    if request.truncation is not None and request.truncation.length is not None:
        return request.truncation.length
    if request.pooling is not None:
        return longest_text(limits)
    return max(1, limits.max_model_len - (request.sampling.max_tokens or 1))


async def encoded(
    services: Services, context: RequestContext, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool
) -> list[int]:
    """Return the tokens of a text; a long one is encoded off the event loop."""
    encode = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return await off_loop_if_long(services, context, encode)


async def encoded_conversation(
    services: Services,
    context: RequestContext,
    messages: Sequence[Message],
    options: ChatOptions,
    form: AnswerForm | None = None,
) -> Encoded:
    """Return the tokens of a conversation; a long one, or one with images, is encoded off the event loop."""
    tokenizer = services.model.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("messages", "a conversation", "token ids, because this server has no tokenizer")
    encode = partial(encode_chat, messages, tokenizer, options, None if form is None else form.adapt)
    if has_images(messages):
        prompt = await services.model.text_pool.run(context.tenant.name, encode)
        _hold(services, context, sum(len(image.pixels) for image in prompt.images))
        return prompt
    return await off_loop_if_long(services, context, encode)


def _hold(services: Services, context: RequestContext, num_bytes: int) -> None:
    """Count the pixels of a prompt's images until the request ends; raises if there is no room for them."""
    most = services.config.image_memory_bytes_per_key
    if num_bytes > most:
        allowed = f"images of at most {most:,} bytes (max_image_memory); send fewer"
        raise InvalidRequestError("messages", f"images that take {num_bytes:,} bytes", allowed)
    if context.images is None:
        context.images = services.images.open(context.tenant.name)
    context.images.take(num_bytes)


async def off_loop_if_long(services: Services, context: RequestContext, work: Callable[[], Result]) -> Result:
    """Return the result of `work` on a call's texts; for a long body, run it off the event loop, in turn."""
    if context.body.num_bytes < LONG_TEXT:
        return work()
    return await services.model.text_pool.run(context.tenant.name, work)
