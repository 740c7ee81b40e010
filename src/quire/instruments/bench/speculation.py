"""`quire bench speculation`: the speed-up by guesses, and a check that the texts stay the same.

    edit    repeat a text with a small change: guesses from n-grams of the prompt
    json    a record with fixed keys, held to a schema: guesses from tokens that the grammar forces
    chat    an explanation, and
    free    a story: nothing repeats; for a draft model (`--speculation MODEL`)

`--questions FILE` uses the questions of a file instead of generated ones, for a pair of models that know one subject.

Two engines, one without guesses and one with guesses, answer the same requests in turn. No prompt is used twice, so no
earlier answer helps. Every pair of answers is compared token by token. The prefix cache is off, so that both engines
compute each request in full.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from quire.core.config import SPECULATIONS, EngineConfig
from quire.core.errors import ExecutionError, InvalidConfigError
from quire.core.grammar import Grammar
from quire.core.sampling_params import SamplingParams
from quire.engine.llm import LLM
from quire.instruments.bench.flags import add_choices, add_count, add_counts, add_size
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import ratios, summarize

WORKLOADS: Final = ("edit", "json", "chat", "free")
TEMPERATURES: Final = (0.0, 0.8)
MANY: Final = 32
LEAST_GAINS: Final = {"edit": 2.0, "json": 1.3, "chat": 0.98, "free": 0.98}
"""The least speed-up of one sequence; for `MANY` sequences the limit of free text applies to all workloads."""
LEAST_WITH_MODEL: Final = 1.6
"""The least speed-up of one sequence, a chat, with a draft model."""
FORESEEN: Final = (0.85, 1.15)
"""The allowed ratio of the gain that the budget predicts to the measured gain."""
QUESTIONS: Final = (
    "Explain what a {} is.",
    "Write a short text about a {} and a {}.",
    "What is the difference between a {} and a {}?",
    "Why is a {} useful?",
)

WORDS: Final = (
    "memory block table token prefix request server answer river garden winter letter music engine harbour window "
    "mountain teacher market bridge silver morning paper forest doctor island number castle summer village"
)
NAMES: Final = "Ada Grace Alan Edsger Barbara Donald Frances John Karen Leslie Margaret Niklaus Radia Tony"
PERSON: Final = {
    "type": "object",
    "properties": {
        "given_name": {"type": "string", "maxLength": 12},
        "family_name": {"type": "string", "maxLength": 12},
        "year_of_birth": {"type": "integer", "minimum": 1800, "maximum": 2020},
        "country_of_birth": {"type": "string", "maxLength": 12},
        "occupation": {"enum": ["writer", "painter", "engineer", "scientist"]},
    },
    "required": ["given_name", "family_name", "year_of_birth", "country_of_birth", "occupation"],
    "additionalProperties": False,
}

DESCRIPTION = "Measure the speed-up by guesses of the next tokens, and check that the texts stay the same."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    parser.add_argument("model", nargs="?", default="smollm2", metavar="MODEL", help="a chat model; default: smollm2")
    parser.add_argument("--speculation", default="auto", metavar="NAME", help="auto, or a draft model; default: auto")
    add_choices(parser, "workloads", WORKLOADS, WORKLOADS, "kinds of requests")
    parser.add_argument("--questions", metavar="FILE", help="questions for chat, one per line; default: generated")
    add_counts(parser, "sequences", (1, 4, 8, 16, MANY), "sequences at once")
    add_count(parser, "output-tokens", 96, "maximum tokens per answer")
    add_size(parser, "kv-memory", "1GiB", "KV memory of each of the two engines")
    add_count(parser, "repeat", 5, "repetitions of each kind")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""
    return run_benchmark(options, "Speculation", lambda tell: [measure_speculation(options, tell)])


def conversation(workload: str, rng: random.Random) -> list[dict[str, str]]:
    """Return a question of a workload, different at each call.

    >>> conversation("json", random.Random(0))[0]["content"]
    'Describe Frances the scientist, number 885440, as JSON.'
    """
    number, words, names = rng.randrange(1_000_000), WORDS.split(), NAMES.split()
    if workload == "edit":
        sentences = [f"The {rng.choice(words)} of the {rng.choice(words)} is {rng.choice(words)}." for _ in range(8)]
        text = f"Repeat this text word by word, and say nothing else:\n\n{number}. {' '.join(sentences)}"
    elif workload == "json":
        text = f"Describe {rng.choice(names)} the {rng.choice(['writer', 'scientist'])}, number {number}, as JSON."
    elif workload == "chat":
        text = f"{rng.choice(QUESTIONS).format(*rng.sample(words, 2))} Number {number}."
    else:
        text = f"Tell a story of {rng.choice(names)}, the {rng.choice(words)}, and {number} birds."
    return [{"role": "user", "content": text}]


@dataclass(frozen=True, slots=True)
class Turn:
    """The same requests without and with guesses: seconds, and the results of the steps with guesses."""

    off_s: float
    on_s: float
    num_tokens: int
    num_steps: int
    num_verified: int
    num_right: int
    foreseen_off_s: float
    foreseen_on_s: float
    taken_s: float
    """The part of `on_s` in steps whose time was predicted."""

    @property
    def foreseen_gain(self) -> float:
        """The predicted speed-up; steps without a prediction, such as those of prompts, count as measured.

        >>> Turn(2.0, 1.0, 9, 9, 9, 9, foreseen_off_s=1.5, foreseen_on_s=0.5, taken_s=0.5).foreseen_gain
        2.0
        """
        others_s = max(0.0, self.on_s - self.taken_s)
        return (others_s + self.foreseen_off_s) / (others_s + self.foreseen_on_s)


def measure_speculation(options: argparse.Namespace, tell: Tell) -> Section:
    """Measure all workloads; raises `ExecutionError` if a text differs."""
    config = EngineConfig(
        model=options.model,
        kv_memory=options.kv_memory,
        touch_kv_memory="start",
        enable_prefix_caching=False,
        max_model_len=1024,
    )
    rows, samples, goals = [], dict[str, object](), list[Goal]()
    questions = _questions(options)
    with LLM(config) as off, LLM(replace(config, speculation=options.speculation)) as on:
        for workload in options.workloads:
            for temperature in TEMPERATURES:
                for count in options.sequences:
                    tell(f"{workload}, temperature {temperature:g}, {count} at once")
                    rng = random.Random(f"{workload} {temperature} {count}")
                    sampling = SamplingParams(temperature=temperature, max_tokens=options.output_tokens)
                    if workload == "json":
                        sampling = replace(sampling, grammar=Grammar.json_schema(PERSON))
                    turns = list[Turn]()
                    for number in range(-1, options.repeat):  # the first run does not count
                        asked = [_next_question(questions, workload, rng) for _ in range(count)]
                        draws = [replace(sampling, seed=rng.randrange(1 << 30)) for _ in range(count)]
                        turns.append(_turn(off, on, asked, draws, guesses_first=number % 2 == 0))
                    turns = turns[1:]
                    gains = ratios([turn.off_s for turn in turns], [turn.on_s for turn in turns])
                    rows.append((workload, f"{temperature:g}", str(count), *_cells(turns, gains)))
                    samples[f"{workload} {temperature:g} {count}"] = [asdict(turn) for turn in turns]
                    goals += _goals(workload, temperature, count, options.speculation, turns)
    text = (
        f"{options.model}, answers of at most {options.output_tokens} tokens, without guesses and with "
        f"`--speculation {options.speculation}` in turn, median of {options.repeat} (min–max). All pairs of texts were "
        "equal, to the token."
    )
    numbers = ("tok/s without", "tok/s with", "gain", "foreseen", "tokens a step", "right")
    header = ("asked for", "temperature", "at once", *numbers)
    return Section("Guesses", text, header, rows, samples, goals)


def _goals(workload: str, temperature: float, count: int, speculation: str, turns: Sequence[Turn]) -> list[Goal]:
    """Return the goals of one kind of requests, for one sequence and for many."""
    if count not in (1, MANY):
        return []
    least = LEAST_GAINS[workload] if count == 1 else LEAST_GAINS["free"]
    if (workload, count) == ("chat", 1) and speculation not in SPECULATIONS:
        least = LEAST_WITH_MODEL
    gain = summarize(ratios([turn.off_s for turn in turns], [turn.on_s for turn in turns])).median
    share = summarize([turn.foreseen_gain for turn in turns]).median / gain
    name = f"{workload}, temperature {temperature:g}, {count} at once"
    return [
        Goal(f"{name}: speed with guesses", gain, least, at_least=True),
        Goal(f"{name}: foreseen gain of the measured", share, FORESEEN[0], at_least=True),
        Goal(f"{name}: foreseen gain of the measured, at most", share, FORESEEN[1], at_least=False),
    ]


def _cells(turns: Sequence[Turn], gains: Sequence[float]) -> tuple[str, ...]:
    verified = sum(turn.num_verified for turn in turns)
    return (
        cell(summarize([turn.num_tokens / turn.off_s for turn in turns])),
        cell(summarize([turn.num_tokens / turn.on_s for turn in turns])),
        cell(summarize(gains), "×"),
        cell(summarize([turn.foreseen_gain for turn in turns]), "×"),
        f"{sum(turn.num_tokens for turn in turns) / sum(turn.num_steps for turn in turns):.2f}",
        f"{sum(turn.num_right for turn in turns)} of {verified}",
    )


def _questions(options: argparse.Namespace) -> list[str]:
    """Return the questions of --questions in random order; empty without a file."""
    if options.questions is None:
        return []
    try:
        found = [line for line in Path(options.questions).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError("questions", options.questions, "a UTF-8 text file, one question per line") from error
    num_asked = len(TEMPERATURES) * (1 + options.repeat) * sum(options.sequences)
    if len(found) < num_asked:
        allowed = f"a file of {num_asked} questions or more, not {len(found)}: no question is used twice"
        raise InvalidConfigError("questions", options.questions, allowed)
    random.Random(0).shuffle(found)
    return found


def _next_question(questions: list[str], workload: str, rng: random.Random) -> list[dict[str, str]]:
    """Return a question of a workload; for chat, from `questions` if it is not empty. Mutates `questions`."""
    if workload == "chat" and questions:
        return [{"role": "user", "content": questions.pop()}]
    return conversation(workload, rng)


def _turn(
    off: LLM, on: LLM, asked: list[list[dict[str, str]]], draws: Sequence[SamplingParams], *, guesses_first: bool
) -> Turn:
    """Run the same requests on both engines."""
    times: dict[bool, float] = {}
    texts: dict[bool, list[list[int]]] = {}
    before, foreseen = on.stats(), replace(on.engine.scheduler.drafts.foreseen)
    for guesses in (guesses_first, not guesses_first):
        began_s = time.perf_counter()
        outputs = (on if guesses else off).chat(asked, draws, use_tqdm=False)
        times[guesses] = time.perf_counter() - began_s
        texts[guesses] = [output.outputs[0].token_ids for output in outputs]
    if texts[False] != texts[True]:
        raise ExecutionError(f"guesses have changed an answer to one of {[each[0]['content'] for each in asked]}")
    after, now = on.stats(), on.engine.scheduler.drafts.foreseen
    return Turn(
        off_s=times[False],
        on_s=times[True],
        num_tokens=sum(map(len, texts[True])),
        num_steps=after.steps_total - before.steps_total,
        num_verified=after.num_verified_guesses - before.num_verified_guesses,
        num_right=after.num_right_guesses - before.num_right_guesses,
        foreseen_off_s=(now.without_us - foreseen.without_us) / 1e6,
        foreseen_on_s=(now.with_us - foreseen.with_us) / 1e6,
        taken_s=(now.taken_us - foreseen.taken_us) / 1e6,
    )
