"""GenerationRequest: a call in the engine's terms. `translate` makes it, the gate admits it, and `run` runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.core.errors import InvalidRequestError
from quire.core.pooling import Pooling
from quire.core.sampling_params import SamplingParams
from quire.engine.text.chat_template import ChatOptions
from quire.engine.text.prompts import Prompt, estimated_tokens
from quire.serve.answer_form import AnswerForm


@dataclass(frozen=True, slots=True)
class Truncation:
    """How many tokens of a prompt to keep, from its start or its end. `length` None: as many as fit.

    `refuses`: a longer prompt is refused, not cut.
    """

    length: int | None
    keeps_start: bool
    refuses: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One call's request to the engine.

    `names` are the client's names for fields of the engine. `form` is the answers' form; None: plain text. With
    `prompts_only`, generated texts are not shown and their tokens are not counted. `stream_usage`: whether a stream
    reports usage at its end, and whether in every chunk. With `pooling`, each prompt becomes a vector. With
    `cuts_output`, `max_tokens` may be more than the context has left, where the text then ends; otherwise such a call
    is refused. `sent_grammar`: the client's text of a grammar, which `sampling` has in another form.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    names: Mapping[str, str]
    chat: ChatOptions | None = None
    form: AnswerForm | None = None
    truncation: Truncation | None = None
    add_special_tokens: bool = True
    cache_salt: str | None = None
    priority: int | None = None
    prompts_only: bool = False
    stream_usage: tuple[bool, bool] = (False, False)
    pooling: Pooling | None = None
    cuts_output: bool = False
    sent_grammar: str = ""

    @property
    def num_sequences(self) -> int:
        """The number of sequences, for the gate; the engine refuses an invalid number later."""
        return max(1, len(self.prompts) * self.sampling.num_sequences)

    def num_tokens(self, longest: int) -> int:
        """Return an estimate of the prompts' tokens, for the gate, at most `longest` for each. Does not mutate."""
        chat = self.chat
        shared = 0 if chat is None else 1 + estimated_tokens(chat.tools, longest, images=False)
        return sum(min(longest, estimated_tokens(each, longest) + shared) for each in self.prompts)


class RefusedPrompt(Exception):
    """The engine refuses a prompt or its parameters. `prompt_index`: which of several prompts.

    The error names the engine's field; `translate` replaces it with the client's name.
    """

    def __init__(self, error: InvalidRequestError, prompt_index: int | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.prompt_index = prompt_index
