"""The wire form of sampling parameters: a part of every plan in which a request takes a row."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, Literal, TypedDict

from quire.core.errors import StepLogError
from quire.core.grammar import GRAMMAR_KINDS, Grammar
from quire.core.sampling_params import SamplingParams
from quire.core.wire import WireReader, WireWriter

EARLY_STOPPING: Final[tuple[bool | Literal["never"], ...]] = (False, True, "never")
HAS_RULES: Final = 1  # the parts that most requests do not have, as bits
HAS_GRAMMAR: Final = 2


def write_sampling(writer: WireWriter, sampling: SamplingParams) -> None:
    """Write sampling parameters."""
    numbers = sampling.n, sampling.top_k, sampling.min_tokens
    switches = sampling.beam_search, sampling.ignore_eos
    texts = sampling.include_stop_str_in_output, sampling.skip_special_tokens
    writer.column(array("i", [*numbers, *switches, *texts]))
    for value in (sampling.best_of, sampling.seed, sampling.max_tokens, sampling.logprobs):
        writer.optional_integer(value)
    for number in (sampling.temperature, sampling.top_p, sampling.min_p):
        writer.number(number)
    writer.column(array("i", sampling.stop_token_ids))
    _write_texts(writer, sampling.stop)
    has_rules = any(getattr(sampling, name) != default for name, default in NO_RULES.items())
    writer.integer(has_rules * HAS_RULES + (sampling.grammar is not None) * HAS_GRAMMAR)
    if has_rules:
        _write_rules(writer, sampling)
    if sampling.grammar is not None:
        writer.integer(GRAMMAR_KINDS.index(sampling.grammar.kind))
        writer.text(sampling.grammar.text)
        writer.text(sampling.grammar.owner)
    if sampling.beam_search:
        _write_search(writer, sampling)


def read_sampling(reader: WireReader) -> SamplingParams:
    """Read sampling parameters."""
    n, top_k, min_tokens, beam_search, ignore_eos, include_stop_str_in_output, skip_special_tokens = reader.column(7)
    best_of, seed, max_tokens, logprobs = (reader.optional_integer() for _ in range(4))
    temperature, top_p, min_p = (reader.number() for _ in range(3))
    stop_token_ids, stop = tuple(reader.column()), _read_texts(reader)
    parts = reader.integer()
    if parts not in range(HAS_RULES + HAS_GRAMMAR + 1):
        raise StepLogError("sampling parameters with unknown parts")
    rules = _read_rules(reader) if parts & HAS_RULES else NO_RULES
    grammar = _read_grammar(reader) if parts & HAS_GRAMMAR else None
    search = _read_search(reader) if beam_search else NO_SEARCH
    return SamplingParams(
        n=n,
        best_of=best_of,
        beam_search=bool(beam_search),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        stop=stop,
        ignore_eos=bool(ignore_eos),
        include_stop_str_in_output=bool(include_stop_str_in_output),
        skip_special_tokens=bool(skip_special_tokens),
        logprobs=logprobs,
        grammar=grammar,
        **rules,
        **search,
    )


class _Search(TypedDict):
    length_penalty: float
    early_stopping: bool | Literal["never"]


NO_SEARCH: Final = _Search(length_penalty=1.0, early_stopping=False)


def _write_search(writer: WireWriter, sampling: SamplingParams) -> None:
    writer.number(sampling.length_penalty)
    writer.integer(EARLY_STOPPING.index(sampling.early_stopping))


def _read_search(reader: WireReader) -> _Search:
    length_penalty, early_stopping = reader.number(), reader.integer()
    if early_stopping not in range(len(EARLY_STOPPING)):
        raise StepLogError("a beam search with an unknown early_stopping")
    return _Search(length_penalty=length_penalty, early_stopping=EARLY_STOPPING[early_stopping])


def _read_grammar(reader: WireReader) -> Grammar:
    kind = reader.integer()
    if kind not in range(len(GRAMMAR_KINDS)):
        raise StepLogError("a grammar of an unknown kind")
    return Grammar(GRAMMAR_KINDS[kind], reader.text(), reader.text())


class _Rules(TypedDict):
    prompt_logprobs: int | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    bad_words: tuple[str, ...]
    bad_words_ids: tuple[tuple[int, ...], ...]
    allowed_token_ids: tuple[int, ...] | None


# Most requests have none of these: then they are not written.
NO_RULES: Final = _Rules(
    prompt_logprobs=None,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias=(),
    bad_words=(),
    bad_words_ids=(),
    allowed_token_ids=None,
)


def _write_texts(writer: WireWriter, texts: Sequence[str]) -> None:
    writer.integer(len(texts))
    for text in texts:
        writer.text(text)


def _read_texts(reader: WireReader) -> tuple[str, ...]:
    return tuple(reader.text() for _ in range(reader.integer()))


def _write_rules(writer: WireWriter, sampling: SamplingParams) -> None:
    writer.optional_integer(sampling.prompt_logprobs)
    for number in (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty):
        writer.number(number)
    writer.column(array("i", [token for token, _ in sampling.biases]))
    writer.numbers(array("d", [bias for _, bias in sampling.biases]))
    _write_texts(writer, sampling.bad_words)
    writer.integer(len(sampling.bad_words_ids))
    for word in sampling.bad_words_ids:
        writer.column(array("i", word))
    allowed = sampling.allowed_token_ids
    writer.integer(0 if allowed is None else 1)
    writer.column(array("i", allowed or ()))


def _read_rules(reader: WireReader) -> _Rules:
    prompt_logprobs = reader.optional_integer()
    repetition, presence, frequency = (reader.number() for _ in range(3))
    biased, biases = reader.column(), reader.numbers()
    if len(biased) != len(biases):
        raise StepLogError("the columns of a logit_bias differ in length")
    bad_words = _read_texts(reader)
    sequences = tuple(tuple(reader.column()) for _ in range(reader.integer()))
    is_limited, allowed = reader.integer(), tuple(reader.column())
    return _Rules(
        prompt_logprobs=prompt_logprobs,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(zip(biased, biases, strict=True)),
        bad_words=bad_words,
        bad_words_ids=sequences,
        allowed_token_ids=allowed if is_limited else None,
    )
