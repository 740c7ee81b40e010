"""Ask the guide questions that are not in its training data, and count the right answers.

    .venv/bin/python scripts/guide/evaluate.py --model src/quire/guide

An answer is *exact* if it is the topic's answer, letter by letter, and *right* if it is nearly that: at least nine
tenths of the words agree, in order, and no other topic's answer is closer. Decoding is greedy, and the model must end
every answer. Four tables:

    held out    every held-out question, alone: the score in README.md
    system      the same questions after system prompts that are not in the training data
    turns       the same questions as the last turn of a conversation about two other topics
    fresh       questions.md, written after the corpus; the answer of any listed topic counts
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from corpus import Topic, read_topics

from quire import LLM, SamplingParams

QUESTIONS_FILE = Path(__file__).parent / "questions.md"
NEARLY = 0.9
MAX_NEW_TOKENS = 160
NUM_THREADS = 1  # the answers do not depend on it
UNSEEN_SYSTEM_PROMPTS = (
    "You are a careful engineer who explains software.",
    "Reply in plain English.",
    "You work for a company that runs language models. Be polite and short.",
)

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation that ends in a question, and the topics whose answer is right."""

    messages: Messages
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The guide's answer to a case."""

    case: Case
    text: str
    ended: bool
    topic: str
    likeness: float

    @property
    def is_right(self) -> bool:
        """Whether it is nearly the answer of an accepted topic."""
        return self.topic in self.case.topics and self.likeness >= NEARLY


class Asker:
    """Asks the model in a folder, with quire."""

    def __init__(self, folder: Path, topics: Sequence[Topic]) -> None:
        self.llm = LLM(str(folder), dtype="float32", kv_memory="128MiB", num_threads=NUM_THREADS)
        self.answers = {topic.name: topic.answer for topic in topics}

    def ask(self, cases: Sequence[Case]) -> list[Answer]:
        """Return the greedy answers."""
        sampling = SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS)
        outputs = self.llm.chat([case.messages for case in cases], sampling, use_tqdm=False)
        answers = []
        for case, output in zip(cases, outputs, strict=True):
            completion = output.outputs[0]
            ended = completion.finish_reason == "stop"
            answers.append(Answer(case, completion.text, ended, *self._nearest(completion.text)))
        return answers

    def _nearest(self, text: str) -> tuple[str, float]:
        words = text.split()
        exact = [(name, 1.0) for name, answer in self.answers.items() if answer == text]
        if exact:
            return exact[0]
        matcher = SequenceMatcher(autojunk=False)
        matcher.set_seq2(words)
        best = ("", 0.0)
        for name, answer in self.answers.items():
            matcher.set_seq1(answer.split())
            if matcher.real_quick_ratio() > best[1] and (likeness := matcher.ratio()) > best[1]:
                best = (name, likeness)
        return best


def one_question(question: str) -> Messages:
    """Return a conversation of one question."""
    return [{"role": "user", "content": question}]


def held_out_cases(topics: Sequence[Topic]) -> list[Case]:
    """Return every held-out question alone."""
    return [Case(one_question(question), (topic.name,)) for topic in topics for question in topic.held_out]


def system_cases(cases: Sequence[Case]) -> list[Case]:
    """Return the cases, with system prompts in rotation."""
    prompts = [{"role": "system", "content": prompt} for prompt in UNSEEN_SYSTEM_PROMPTS]
    return [Case([prompts[place % len(prompts)], *case.messages], case.topics) for place, case in enumerate(cases)]


def turn_cases(cases: Sequence[Case], topics: Sequence[Topic]) -> list[Case]:
    """Return the cases, each after two questions about other topics, with their answers."""
    chosen = random.Random(0)
    longer = []
    for case in cases:
        before: Messages = []
        for topic in chosen.sample(list(topics), 2):
            before += one_question(chosen.choice(topic.questions))
            before.append({"role": "assistant", "content": topic.answer})
        longer.append(Case([*before, *case.messages], case.topics))
    return longer


def fresh_cases(topics: Sequence[Topic]) -> list[Case]:
    """Return the questions of `questions.md`."""
    known = {topic.name for topic in topics}
    cases = []
    for line in QUESTIONS_FILE.read_text(encoding="utf-8").splitlines():
        names, colon, question = line.partition(": ")
        wanted = tuple(names.split(", "))
        if not colon:
            continue
        if not known.issuperset(wanted):
            raise ValueError(f"questions.md names a topic that does not exist: {line}")
        cases.append(Case(one_question(question), wanted))
    return cases


def report(name: str, answers: Sequence[Answer], *, show_wrong: bool) -> None:
    """Print one line of the table, and on request the wrong answers."""
    total = len(answers)
    right = sum(answer.is_right for answer in answers)
    exact = sum(answer.is_right and answer.likeness == 1 for answer in answers)
    ended = sum(answer.ended for answer in answers)
    shares = f"right {right / total:6.1%}   exact {exact / total:6.1%}   ended {ended / total:6.1%}"
    print(f"{name:9} {right:4} of {total:4}   {shares}", flush=True)
    for answer in answers:
        if show_wrong and not answer.is_right:
            question = answer.case.messages[-1]["content"]
            wanted, got = answer.case.topics[0], f"{answer.topic} {answer.likeness:.2f}"
            print(f"    {question!r} wanted {wanted}, got {got}: {answer.text!r}")


def main() -> None:
    """Ask all questions, and print the tables."""
    parser = argparse.ArgumentParser(description="Ask the guide questions that are not in its training data.")
    parser.add_argument("--model", type=Path, required=True, help="the model folder")
    parser.add_argument("--show-wrong", action="store_true", help="print every answer that is not right")
    parser.add_argument("--only", choices=("held out", "system", "turns", "fresh"), help="one table")
    options = parser.parse_args()

    topics = read_topics()
    asker = Asker(options.model, topics)
    alone = held_out_cases(topics)
    tables = {
        "held out": alone,
        "system": system_cases(alone),
        "turns": turn_cases(alone, topics),
        "fresh": fresh_cases(topics),
    }
    for name, cases in tables.items():
        if options.only in (None, name):
            report(name, asker.ask(cases), show_wrong=options.show_wrong)


if __name__ == "__main__":
    main()
