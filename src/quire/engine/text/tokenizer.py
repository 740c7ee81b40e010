r"""Turns text into token ids and back, with the files of a model.

`tokenizers` (Rust) does the work, on tokenizer.json; `transformers` is not needed. This module adds what a server needs
in addition:

**Special tokens in a client's text.** The text of a chat message never becomes a control token; see `control_text`.

**Ids that the model lacks.** Gemma 3 1B comes with a tokenizer that has one token more than the model, for images. Such
a token is allowed if nothing uses it: no setting names it and no chat template writes it. A plain prompt that contains
it is refused like any id out of range; in a conversation it is ordinary text, like every special token of a client.

**Python's lock.** `Tokenizer.encode` holds it while it works, a second for a megabyte, in which a server would answer
no client; `encode_batch_fast` does not hold it, and is twice as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

from quire.core.errors import CheckpointError, InvalidRequestError, RequestTooLargeError
from quire.core.model_files import ModelFiles
from quire.core.pooling import PAIR_TEMPLATE
from quire.engine.text.chat_template import (
    ANSWERED,
    ChatOptions,
    ChatTemplate,
    plain_object,
    require_unicode,
    validate_messages,
    validate_tools,
)
from quire.engine.text.client_text import from_client
from quire.engine.text.content_form import ContentForm, form_of, in_form
from quire.engine.text.control_text import ControlText, ids_of
from quire.engine.text.final_message import random_mark, up_to, with_end
from quire.engine.text.library_panics import panics_as_errors
from quire.engine.text.token_bytes import TokenBytes
from quire.engine.text.tokenizer_files import read_library, read_settings, read_templates, token_text_of

if TYPE_CHECKING:
    import tokenizers

    from quire.engine.images.reader import ImageReader

MAX_TEXT_BYTES: Final = 8 << 20
TEXT_BYTES_PER_TOKEN: Final = 16
"""Maximum bytes of text per token of the context. A longer text is refused before it is encoded, which takes 190 bytes
of memory for each of its bytes.

Ordinary texts have 3 to 6. A vocabulary can have tokens of 128 bytes, but these are runs of spaces and rules: a text
that fills a context with them is refused, because allowing it would need eight times the memory for every text.
"""
USUAL_CHARACTERS_PER_TOKEN: Final = 4

DEFAULT: Final = "default"
NAMED_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


def _ids_end(library: tokenizers.Tokenizer) -> int:
    """Return one more than the highest id. A table of all tokens takes much longer than asking for each id."""
    count = library.get_vocab_size(with_added_tokens=True)
    if None not in map(library.id_to_token, range(count)):
        return count  # as many tokens as ids, so no id is higher
    return max(library.get_vocab(with_added_tokens=True).values()) + 1


def _make_special(library: tokenizers.Tokenizer, tokens: Sequence[str], where: str) -> None:
    """Mark tokens of the vocabulary as special; raises `CheckpointError` if one is missing. Mutates the library."""
    for token in tokens:
        if library.token_to_id(token) is None:
            raise CheckpointError(where, f"a tokenizer without {token}", "the token that stands for images")
    library.add_special_tokens(list(tokens))


def _cut_longer(ids: Sequence[list[int]], room: int) -> list[list[int]]:
    """Return two lists that together have at most `room` tokens: the longer one loses its end, or both do.

    >>> _cut_longer([[1, 2], [3, 4, 5, 6]], 5), _cut_longer([[1, 2, 3], [4, 5, 6]], 5)
    ([[1, 2], [3, 4, 5]], [[1, 2], [4, 5, 6]])
    """
    shorter = min(*map(len, ids), room // 2)
    lengths = [shorter, room - shorter]
    if len(ids[0]) > len(ids[1]):
        lengths.reverse()
    return [each[:length] for each, length in zip(ids, lengths, strict=True)]


class Tokenizer:
    """The tokenizer of a model, with its chat templates. Immutable except for caches; threads can share it."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, ChatTemplate] | None = None,
        add_bos_token: bool = False,
        max_tokens: int | None = None,
        images: ImageReader | None = None,
    ) -> None:
        """Wrap a tokenizer of the library; `templates` are by name, and "default" is for any conversation.

        A text that cannot fit into `max_tokens` is refused without encoding it. `images`: for a model that reads them.
        """
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._templates = dict(templates or {})
        self.images = images
        added = library.get_added_tokens_decoder()
        self.vocab_size: int = _ids_end(library)
        """One more than the highest id; a model can have more ids."""
        self.special_token_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        named = named_tokens or {}
        self.bos_token_id = library.token_to_id(named.get("bos_token", ""))
        self.eos_token_id = library.token_to_id(named.get("eos_token", ""))
        self.bytes_of_tokens = TokenBytes.of(library)
        self._first_id = self.bos_token_id if add_bos_token else None
        self._max_tokens = max_tokens
        self._max_bytes = min(MAX_TEXT_BYTES, TEXT_BYTES_PER_TOKEN * (max_tokens or MAX_TEXT_BYTES))
        self._control = ControlText(library)
        self._forms: dict[ChatTemplate, ContentForm] = {}  # of those that were used

    @classmethod
    def open(
        cls,
        files: ModelFiles,
        *,
        vocab_size: int,
        max_tokens: int | None = None,
        now: Callable[[], datetime] = datetime.now,
        images: ImageReader | None = None,
    ) -> Tokenizer:
        """Read the tokenizer of a model; `vocab_size` is the model's, `now` the clock of its chat template.

        `max_tokens` is the model's context length: a text that cannot fit into it is refused without encoding it.
        `images`: for a model that reads them; its tokens become special, so that no client can write them. Raises
        `CheckpointError` if a file is missing or broken, or if ids that the model lacks are in use.
        """
        settings = read_settings(files)
        named = {name: text for name in NAMED_TOKENS if (text := token_text_of(settings.get(name)))}
        library = read_library(files, settings)
        added = {token.content for token in library.get_added_tokens_decoder().values()}
        library.add_special_tokens(
            [text for text in named.values() if text not in added and library.token_to_id(text) is not None]
        )
        if images is not None:
            _make_special(library, images.tokens, files.name)
            placeholder_id = library.token_to_id(images.placeholder)
            if images.placeholder_id not in (None, placeholder_id):
                allowed = f"{images.placeholder_id}, the token of images in the model's settings"
                raise CheckpointError(f"{files.name}: {images.placeholder}", placeholder_id, allowed)
        templates = {
            name: ChatTemplate(source, named, where=f"{files.name}: chat template {name!r}", now=now)
            for name, source in read_templates(files, settings).items()
        }
        add_bos_token = settings.get("add_bos_token") is True
        tokenizer = cls(
            library,
            named_tokens=named,
            templates=templates,
            add_bos_token=add_bos_token,
            max_tokens=max_tokens,
            images=images,
        )
        if tokenizer.vocab_size > vocab_size and tokenizer._uses_beyond(vocab_size, named.values()):
            found = f"a tokenizer of {tokenizer.vocab_size} ids"
            raise CheckpointError(files.name, found, f"at most the {vocab_size} ids of the model's vocabulary")
        return tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether the model takes conversations."""
        return DEFAULT in self._templates

    @property
    def pair_template(self) -> str:
        """The text of the template for a query and a document; empty if the model does not have one."""
        return self._templates[PAIR_TEMPLATE].source if PAIR_TEMPLATE in self._templates else ""

    @property
    def template_variables(self) -> frozenset[str]:
        """Variables that a client can set for the chat templates, in addition to messages and tools."""
        return frozenset[str]().union(*(template.variables for template in self._templates.values()))

    def template_source(self, *, with_tools: bool = False) -> str:
        """Return the text of the chat template of a conversation; "" if the model has none. Does not mutate."""
        return self._template(with_tools=with_tools).source if self.has_chat_template else ""

    @property
    def uses_tools(self) -> bool:
        """Whether the chat template of a conversation with tools looks at them."""
        return self.has_chat_template and self._template(with_tools=True).uses_tools

    def id_of(self, token: str) -> int | None:
        """Return the id of the token with exactly this text; None if it does not exist. Does not mutate."""
        return self._library.token_to_id(token)

    def warm_up(self) -> None:
        """Make the copy that the first special token in a client's text would need: 1.5 s for 150,000 tokens."""
        self._control.renamed()

    def has(self, token_id: int) -> bool:
        """Return whether an id is one of the tokenizer's."""
        return 0 <= token_id < self.vocab_size and self._library.id_to_token(token_id) is not None

    def encode(self, text: str, *, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        """Return the ids of a text, which can contain special tokens; `field` names it in errors.

        `add_special_tokens` adds the tokens that the model expects around every text, such as one at its beginning.
        Does not mutate.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(field, text, "a string")
        self._require_short(text, field)
        require_unicode(text, field)
        ids = ids_of(self._library, text, add_special_tokens)
        if add_special_tokens and self._first_id is not None and ids[:1] != [self._first_id]:
            ids.insert(0, self._first_id)
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        options: ChatOptions = ANSWERED,
        write: Callable[[str], str] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation, rendered by the model's chat template. Does not mutate.

        Only the template can write special tokens; in messages, tools and variables they are ordinary text. With
        `continue_final_message` the ids end with the text of the last message, the beginning of the model's answer.
        `write`: changes the rendered text, whose characters have owners.
        """
        if options.template == PAIR_TEMPLATE and PAIR_TEMPLATE not in self._templates:
            return self.encode_pair([str(message["content"]) for message in validate_messages(messages)])
        text = self._rendered(messages, options)
        text = text if write is None else write(text)
        self._require_short(text, "messages")
        require_unicode(text, "messages")
        return self._control.encode(text)

    def _rendered(self, messages: Sequence[Mapping[str, object]], options: ChatOptions) -> str:
        """Return the text of a conversation, with a marker for each image."""
        conversation = validate_messages(messages, images=self.images is not None)
        plain_tools = validate_tools(options.tools)
        variables = plain_object(options.variables or {}, "template_variables")
        template = self._template(with_tools=plain_tools is not None, name=options.template)
        end = random_mark() if options.continue_final_message else ""
        if end:
            conversation = with_end(conversation, end)
        marker = "" if self.images is None else self.images.marker
        if template not in self._forms:
            self._forms[template] = form_of(template, marker)
        conversation = in_form(conversation, self._forms[template], marker)
        text = template.render(
            [from_client(message) | {"role": message["role"]} for message in conversation],  # the role is from a list
            tools=from_client(plain_tools),
            add_generation_prompt=options.add_generation_prompt and not end,
            variables={name: from_client(value) for name, value in variables.items()},
        )
        return up_to(text, end) if end else text

    def encode_pair(self, texts: Sequence[str], max_tokens: int | None = None) -> list[int]:
        """Return the ids of two texts, joined as the tokenizer does it; special tokens in them are ordinary text.

        With `max_tokens`, the longer text loses its end, or both do, as in `transformers`; the tokens around them stay.
        """
        with panics_as_errors():
            example = self._library.encode("a", "a")
        places = [2 if place is None else place for place in example.sequence_ids]
        if set(places) != {0, 1, 2}:
            raise InvalidRequestError("prompt", "a pair of texts", "one text: this tokenizer does not join two")
        if max_tokens is not None:
            texts = [text.encode(errors="replace")[: self._max_bytes].decode(errors="ignore") for text in texts]
        first, second = places.index(0), places.index(1)
        ends = len(places) - places[::-1].index(0), len(places) - places[::-1].index(1)
        for text in texts:
            self._require_short(text, "prompt")
            require_unicode(text, "prompt")
        ids = [self._control.encode(from_client(text)) for text in texts]
        around = example.ids[:first], example.ids[ends[0] : second], example.ids[ends[1] :]
        if max_tokens is not None:
            ids = _cut_longer(ids, max(2, max_tokens - sum(map(len, around))))
        return [*around[0], *ids[0], *around[1], *ids[1], *around[2]][:max_tokens]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids that the tokenizer does not have are skipped. Does not mutate."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        shown = [token_id for token_id in token_ids if token_id not in skipped and self.has(token_id)]
        token_bytes = self.bytes_of_tokens
        if token_bytes is None:
            return self._text_of(shown)
        data = b"".join([*map(token_bytes.first, shown[:1]), *map(token_bytes.__getitem__, shown[1:])])
        return token_bytes.trim(data.decode("utf-8", "replace"))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token within a text, including a leading space; also those of a special token."""
        if not self.has(token_id):
            return b""
        if self.bytes_of_tokens is None:
            return self._text_of([token_id]).encode()
        return self.bytes_of_tokens[token_id]

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, for log-probabilities; an incomplete character is U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _text_of(self, token_ids: list[int]) -> str:
        with panics_as_errors():
            return self._library.decode(token_ids, skip_special_tokens=False)

    def _require_short(self, text: str, field: str) -> None:
        """Raise `RequestTooLargeError` for a text that is too long for any tokens."""
        if len(text) <= self._max_bytes and (
            text.isascii() or len(text.encode("utf-8", "surrogatepass")) <= self._max_bytes
        ):
            return
        raise self._too_long(text, field)

    def _too_long(self, text: str, field: str) -> RequestTooLargeError:
        allowed = f"at most {self._max_bytes} bytes of text"
        if self._max_tokens is not None:
            allowed += f", because this model's maximum context length is {self._max_tokens} tokens; shorten the text"
        error = RequestTooLargeError(field, f"a text of {len(text)} characters", allowed)
        about = len(text) // USUAL_CHARACTERS_PER_TOKEN
        if self._max_tokens is not None and about > self._max_tokens:
            error.numbers_first = f"about {about} tokens > {self._max_tokens} maximum; {error}"
        return error

    def _uses_beyond(self, vocab_size: int, named: Collection[str]) -> bool:
        """Return whether ids from `vocab_size` on are in use: in the model's vocabulary, a setting or a template."""
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        beyond = {text for text, token_id in vocabulary.items() if token_id >= vocab_size}
        added = {token.content for token in self._library.get_added_tokens_decoder().values()}
        sources = [template.source for template in self._templates.values()]
        return not beyond <= added or any(text in named or any(text in s for s in sources) for text in beyond)

    def _template(self, *, with_tools: bool, name: str = "") -> ChatTemplate:
        if name in self._templates:
            return self._templates[name]
        if not self.has_chat_template:
            raise InvalidRequestError("messages", "a conversation", "a plain prompt: this model has no chat template")
        return self._templates.get("tool_use" if with_tools else DEFAULT, self._templates[DEFAULT])
