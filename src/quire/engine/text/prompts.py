"""Prompts in the forms that callers can use, and options of a call that set sampling parameters.

    "a text"                              encoded by the tokenizer
    [15, 2, 8]                            token ids, used unchanged
    {"prompt_token_ids": [15, 2, 8]}      the same token ids
    {"prompt": "a text"}                  the same text
    [{"role": "user", "content": "Hi"}]   a conversation, rendered by the model's chat template

Several prompts are a list of these. Options of a call are fields of `SamplingParams`, or Hugging Face's names for them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Final, cast

from quire.core.errors import InvalidRequestError, QuireError, shortened
from quire.core.images import Image
from quire.core.request import token_array
from quire.core.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from quire.engine.images.parts import PART_KEYS, SentImage, is_image, take_images, without_images
from quire.engine.images.reader import ReadImage, placed, with_texts
from quire.engine.near_names import keyword_meant_by
from quire.engine.text.chat_template import ChatOptions, validate_messages, validate_tools
from quire.engine.text.tokenizer import TEXT_BYTES_PER_TOKEN, Tokenizer

Message = Mapping[str, object]

FORMS: Final = 'a text, a list of token ids, {"prompt_token_ids": […]}, {"prompt": …} or a list of messages'
CONVERSATIONS: Final = 'a list of messages such as {"role": "user", "content": "Hi"}, or a list of such lists'
CHARACTERS_PER_TOKEN: Final = 4
"""An estimate for ASCII text; in other text each character counts as a token."""

IMAGE_TOKENS: Final = 1_000
"""An estimate for an image, before its size is known: models have 100 to 4,000 tokens for one."""

SAMPLING_FIELDS: Final = frozenset(field.name for field in fields(SamplingParams))
HUGGING_FACE_NAMES: Final = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
}


@dataclass(frozen=True, slots=True)
class Encoded:
    """The token ids of a prompt, its text if it was given as one, and its images."""

    text: str | None
    token_ids: array[int]
    images: tuple[Image, ...] = ()


Prompt = str | Sequence[int] | Mapping[str, Any] | Sequence[Message] | Encoded
"""One prompt, in one of the forms above, or already as tokens."""

Prompts = Prompt | Sequence[Prompt]
Adapt = Callable[[list[dict[str, object]], list[dict[str, object]] | None], tuple[Any, Any]]
"""Changes the messages and tools of a conversation for a chat template."""


def split_prompts(prompts: Prompts) -> list[Prompt]:
    """Return the prompts as a list, also for a single one. Does not mutate.

    >>> split_prompts("one"), split_prompts([1, 2]), split_prompts(["one", [1, 2]])
    (['one'], [[1, 2]], ['one', [1, 2]])
    """
    if isinstance(prompts, str | Mapping | Encoded):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Sequence | array):
        raise InvalidRequestError("prompt", prompts, FORMS)
    if len(prompts) and (isinstance(prompts[0], int) or is_message(prompts[0])):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def split_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """Return the conversations as a list, also for a single one; raises `InvalidRequestError` for any other value.

    >>> split_conversations([{"role": "user", "content": "Hi"}])
    [[{'role': 'user', 'content': 'Hi'}]]
    >>> split_conversations("Hi")
    Traceback (most recent call last):
    ...
    quire.core.errors.InvalidRequestError: messages is 'Hi'; allowed: a list of messages such as ...
    """
    if isinstance(messages, list | tuple):
        conversations: list[Any] = [messages] if messages and is_message(messages[0]) else list(messages)
        if all(isinstance(each, list | tuple) and each and all(map(is_message, each)) for each in conversations):
            return conversations
    raise InvalidRequestError("messages", messages, CONVERSATIONS)


def chat_options(tools: Sequence[Message] | None, options: Mapping[str, Any]) -> tuple[ChatOptions, Mapping[str, Any]]:
    """Return how a conversation becomes a prompt, and the options that set sampling parameters. Does not mutate.

    >>> chat_options(None, {"add_generation_prompt": False, "temperature": 0})
    (ChatOptions(add_generation_prompt=False, tools=None, ...), {'temperature': 0})
    """
    others = dict(options)
    chat = ChatOptions(
        others.pop("add_generation_prompt", True),
        tools,
        others.pop("chat_template_kwargs", None),
        continue_final_message=others.pop("continue_final_message", False),
    )
    return chat, others


def is_message(value: object) -> bool:
    """Return whether a value looks like a message of a conversation."""
    return isinstance(value, Mapping) and "role" in value


def estimated_tokens(prompt: object, most: int, *, images: bool = True) -> int:
    """Return an estimate of a prompt's tokens, without encoding it; at most `most`, which also limits the time.

    An image counts as many tokens, whatever its size; `images`: there may be some. Does not mutate.

    >>> estimated_tokens("A block is a page.", 100), estimated_tokens([1, 2, 3], 100), estimated_tokens("a" * 999, 100)
    (5, 4, 100)
    """
    num_tokens, left = 0, [prompt]
    while left and num_tokens < most:
        each = left.pop()
        num_tokens += 1
        if isinstance(each, str):
            num_tokens += len(each) // CHARACTERS_PER_TOKEN if each.isascii() else len(each)
        elif images and isinstance(each, Mapping) and is_image(each) and each.keys() <= PART_KEYS:
            num_tokens += IMAGE_TOKENS
        elif isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, list | tuple | array):
            if len(each) and isinstance(each[0], int):
                num_tokens += len(each)
            else:
                left += each
    return min(num_tokens, most)


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None, chat: ChatOptions | None = None) -> Encoded:
    """Return the tokens of a prompt; raises `InvalidRequestError` if it is not a prompt. Does not mutate."""
    if isinstance(prompt, Encoded):
        return prompt
    if isinstance(prompt, Mapping):
        if set(prompt) == {"prompt_token_ids"}:
            return Encoded(None, token_array(prompt["prompt_token_ids"]))
        if set(prompt) != {"prompt"} or not isinstance(prompt["prompt"], str):
            raise InvalidRequestError("prompt", prompt, FORMS)
        prompt = prompt["prompt"]
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequestError("prompt", prompt, "a text of at least one character")
        tokenizer = _required(tokenizer, "a text")
        with _encoding("prompt"):
            return Encoded(prompt, token_array(tokenizer.encode(prompt)))
    if not isinstance(prompt, Sequence | array):
        raise InvalidRequestError("prompt", prompt, FORMS)
    if len(prompt) and isinstance(prompt[0], Mapping):
        return encode_chat(prompt, _required(tokenizer, "a conversation"), chat or ChatOptions())
    return Encoded(None, token_array(cast(Sequence[int], prompt)))


def encode_chat(
    messages: Sequence[Any], tokenizer: Tokenizer, chat: ChatOptions, adapt: Adapt | None = None
) -> Encoded:
    """Return the tokens and images of a conversation; raises `InvalidRequestError`. Does not mutate."""
    reader, sent = tokenizer.images, list[SentImage]()
    with _encoding("messages"):
        if reader is not None:
            messages, sent = take_images(messages)
        else:
            messages = without_images(messages)  # the template's check refuses them
        if adapt is not None:
            valid = validate_messages(messages, images=reader is not None)
            messages, tools = adapt(valid, validate_tools(chat.tools))
            chat = replace(chat, tools=tools)
        images = list[ReadImage]()

        def write(rendered: str) -> str:
            if reader is None or not sent:
                return rendered
            images.extend(reader.read(sent))
            return with_texts(rendered, reader.marker, images)

        ids = tokenizer.encode_chat(list(messages), chat, write)
        if reader is None or not images:
            return Encoded(None, token_array(ids))
        return Encoded(None, *placed(ids, reader.placeholder, images, tokenizer.id_of))


def with_options(sampling: SamplingParams, options: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters, overridden by options of a call. Does not mutate.

    >>> with_options(SamplingParams(), {"max_new_tokens": 8, "do_sample": False}).temperature
    0.0
    """
    changes: dict[str, Any] = {}
    for name, value in options.items():
        field = HUGGING_FACE_NAMES.get(name, name)
        if field == "do_sample" and isinstance(value, bool):
            if not value:
                changes["temperature"] = 0.0
        elif field in SAMPLING_FIELDS:
            changes[field] = value
        else:
            hint = keyword_meant_by(name, (*SAMPLING_FIELDS, *HUGGING_FACE_NAMES)) or "see quire.SamplingParams"
            sentence = f"{shortened(name)!r} is not a sampling parameter; {hint}"
            raise InvalidRequestError(name, value, "the name of a sampling parameter").saying(sentence)
    return replace(sampling, **changes) if changes else sampling


def with_special(ids: list[int], plain: list[int], kept: list[int], *, keeps_start: bool) -> list[int]:
    """Return `len(kept)` tokens of `ids`, including all special ones: a vector may be that of the last special token.

    `plain`: the tokens of the text alone.

    >>> with_special([2, 5, 6, 7, 3], [5, 6, 7], [2, 5, 6, 7], keeps_start=True)
    [2, 5, 6, 3]
    """
    num_special = len(ids) - len(plain)
    places = (count for count in range(num_special + 1) if ids[count : count + len(plain)] == plain)
    num_before, room = next(places, None), len(kept) - num_special
    if num_before is None or room < 1:
        return kept
    return ids[:num_before] + (plain[:room] if keeps_start else plain[-room:]) + ids[num_before + len(plain) :]


def cut_to(length: int, prompt: Prompt, tokenizer: Tokenizer | None) -> Prompt:
    """Return a prompt whose text lost its end if it has more tokens; only texts and token ids are cut. Pure."""
    if not isinstance(prompt, str) or tokenizer is None:
        is_ids = isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt)
        return cast(Sequence[int], prompt)[:length] if is_ids else prompt
    text = prompt.encode(errors="replace")[: TEXT_BYTES_PER_TOKEN * length].decode(errors="ignore")
    ids = tokenizer.encode(text)
    if len(ids) <= length:
        return text
    plain = tokenizer.encode(text, add_special_tokens=False)
    return with_special(ids, plain, ids[:length], keeps_start=True)


def with_bad_words(sampling: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return the sampling parameters with the tokens of their bad words. Does not mutate.

    Each word is encoded at the beginning of a text and after a space, because its tokens usually differ.
    """
    if tokenizer is None:
        allowed = "none, because this engine has no tokenizer; use bad_words_ids"
        raise InvalidRequestError("bad_words", sampling.bad_words, allowed)
    found = dict.fromkeys(sampling.bad_words_ids)
    for word in sampling.bad_words:
        bare = word.lstrip()
        if not bare:
            raise InvalidRequestError("bad_words", word, "a word that is not only white space")
        for text in (bare, " " + bare):
            with _encoding("bad_words"):
                sequence = tuple(tokenizer.encode(text, add_special_tokens=False, field="bad_words"))
            if not 1 <= len(sequence) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequestError("bad_words", word, f"words of 1 to {MAX_BAD_WORD_TOKENS} tokens")
            found[sequence] = None
    return replace(sampling, bad_words_ids=tuple(found))


def _required(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    if tokenizer is None:
        raise InvalidRequestError("prompt", what, "token ids, because this engine has no tokenizer")
    return tokenizer


@contextmanager
def _encoding(field: str) -> Iterator[None]:
    """Raise any other exception of a tokenizer as `InvalidRequestError`: only this prompt is at fault."""
    try:
        yield
    except QuireError:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise InvalidRequestError(field, found, "a text that the tokenizer can encode") from error
