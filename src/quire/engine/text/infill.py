"""Fill in the middle: the model writes the text between a prefix and a suffix, as editors need it.

    "def f(", "):"   ──►   <|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>   ──►   "x"

Models of code were trained with such texts, each family with its own tokens. A model can fill in if it has such tokens:
no other part of its files shows it. The middle ends like any text, or where the model begins another file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from quire.engine.text.tokenizer import Tokenizer

MARKS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5 and 3, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder2, StableCode, Granite Code
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek  # noqa: RUF001 - their letters
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
)
"""The tokens before a prefix, before a suffix and before the middle, family by family."""

REPOSITORY: Final = ("<|repo_name|>", "<repo_name>", "<reponame>")
FILE: Final = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
PADDING: Final = ("<|fim_pad|>", "<fim_pad>")
NO_NAME: Final = "unnamed"
SNIPPET: Final = "\n\n--- snippet ---\n\n"


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file, or a part of one, that the model is shown before the text to fill in."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """The tokens of one model. `repository` and `file` begin a repository and a file; empty without such tokens."""

    prefix: str
    suffix: str
    middle: str
    repository: str
    file: str
    end_token_ids: tuple[int, ...]

    def prompt(self, prefix: str, suffix: str, others: Sequence[OtherFile] = ()) -> str:
        """Return the text that a model continues with the middle.

        >>> InfillFormat("<P>", "<S>", "<M>", "", "", ()).prompt("def f(", "):")
        '<P>def f(<S>):<M>'
        """
        before = "".join(
            f"{self.file}{each.name}\n{each.text}" if self.file else SNIPPET + each.text for each in others
        )
        if others and self.repository and self.file:
            before = f"{self.repository}{NO_NAME}\n{before}{self.file}{NO_NAME}\n"
        return f"{before}{self.prefix}{prefix}{self.suffix}{suffix}{self.middle}"


def infill_format(tokenizer: Tokenizer) -> InfillFormat | None:
    """Return the format of a model, or None if it cannot fill in."""
    marks = next((marks for marks in MARKS if all(_is_one_token(tokenizer, mark) for mark in marks)), None)
    if marks is None:
        return None
    repository, file = (
        next((name for name in names if _is_one_token(tokenizer, name)), "") for names in (REPOSITORY, FILE)
    )
    ends = (tokenizer.id_of(text) for text in (*marks, *REPOSITORY, *FILE, *PADDING))
    return InfillFormat(*marks, repository, file, tuple(sorted({end for end in ends if end is not None})))


def _is_one_token(tokenizer: Tokenizer, text: str) -> bool:
    """Return whether a text is encoded as a single token, the one with this name."""
    token_id = tokenizer.id_of(text)
    return token_id is not None and tokenizer.encode(text, add_special_tokens=False) == [token_id]
