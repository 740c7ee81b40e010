"""The guide's corpus: topics read from `corpus/*.md`, and the conversations that are made of them.

A topic in a file:

    ## block-table                                     its name
    term: a block table | block tables                 what the patterns of questions below are filled with
    ? What is a block table?                           a question as somebody may ask it
    = A block table is ...                             the answer
    + A token's logical block is ...                   what "tell me more" brings

Of every topic some questions are *held out*: no conversation contains them, in any case or punctuation, and
`evaluate.py` asks them. Which ones is decided by a digest of the topic's name, so by nobody's eye.

Everything here is standard library, and drawn from the generator that is handed in.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CORPUS_FOLDER = Path(__file__).parent / "corpus"
PAGE_BREAK = "\n\f\n"
NO_MORE = "That is what I know about it. README.md, ARCHITECTURE.md and the pages under docs/ say more."
OUT_OF_SCOPE = "out-of-scope"
UNCLEAR = "unclear"
QUESTIONS_PER_HELD_OUT = 8

PATTERNS = (
    "What is {}?",
    "what's {}",
    "Explain {}",
    "explain {} to me",
    "Tell me about {}",
    "{}",
    "{}?",
    "Define {}",
    "What does {} mean?",
    "what do you know about {}?",
    "Describe {}",
    "I want to know about {}",
    "How does {} work?",
    "Help me understand {}",
    "What about {}?",
    "what is meant by {}",
    "I do not understand {}",
    "Why {}?",
    "Give me a short explanation of {}",
    "say something about {}",
    "and {}?",
    "what is {} for",
)
FOLLOW_UPS = (
    "Tell me more",
    "More, please",
    "go on",
    "Can you say more about that?",
    "more details",
    "Explain further",
    "And what else?",
    "could you elaborate?",
    "what else should I know about it",
    "Anything else?",
    "more",
    "continue",
)
SYSTEM_PROMPTS = (
    "You are the guide of quire. Answer briefly and exactly.",
    "You are a helpful assistant.",
    "You are a helpful assistant that knows quire.",
    "Answer in a few sentences.",
    "You are an expert for paged attention and LLM serving.",
    "Be brief.",
    "You are quire's built-in guide. Help the user to understand paged memory.",
    "You are an AI assistant. Be honest and precise.",
    "You answer questions about an inference engine.",
    "Please answer the questions of the user.",
    "You are a teacher. Explain things simply.",
    "You are a friendly assistant. Today is Monday.",
    "You help developers with their questions about software.",
)
OPENINGS = (
    "Please tell me: {}",
    "Can you tell me: {}",
    "hi, {}",
    "Hello! {}",
    "ok, {}",
    "quick question: {}",
    "I wonder: {}",
    "hey, {}",
    "and {}",
    "so {}",
    "Next question: {}",
    "please, {}",
    "One more thing: {}",
)
ENDINGS = ("{} please", "{}, please", "{} thanks", "{} in quire", "{} in short", "{} (briefly)", "{} exactly")
DROPPABLE = frozenset(
    ("a", "an", "the", "is", "are", "do", "does", "of", "to", "in", "for", "my", "i", "it", "that", "me", "can")
)


@dataclass(frozen=True, slots=True)
class Topic:
    """Questions that have one answer."""

    name: str
    terms: tuple[str, ...]
    questions: tuple[str, ...]
    held_out: tuple[str, ...]
    answer: str
    more: str


@dataclass(slots=True)
class Draft:
    """A topic while it is read."""

    name: str
    terms: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    more: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Take one line of the file."""
        if line.startswith("term: "):
            self.terms += [term.strip() for term in line.removeprefix("term: ").split("|")]
            return
        lists = {"? ": self.questions, "= ": self.answers, "+ ": self.more}
        if line[:2] not in lists:
            raise ValueError(f"{self.name}: not a line of a topic: {line!r}")
        lists[line[:2]].append(line[2:].strip())

    def finish(self) -> Topic:
        """Return the topic, with its held-out questions set apart."""
        if len(self.answers) != 1 or len(self.more) > 1 or len(self.questions) < 4:
            raise ValueError(f"{self.name}: needs one answer, at most one addition, and four questions or more")
        ranked = sorted(self.questions, key=self._digest)
        held_out = ranked[: max(1, len(ranked) // QUESTIONS_PER_HELD_OUT)]
        questions = [question for question in self.questions if question not in held_out]
        more = self.more[0] if self.more else NO_MORE
        return Topic(self.name, tuple(self.terms), tuple(questions), tuple(held_out), self.answers[0], more)

    def _digest(self, question: str) -> bytes:
        return hashlib.sha256(f"{self.name}/{question}".encode()).digest()


def normalise(question: str) -> str:
    """Return what is left of a question without case, punctuation and spacing."""
    return " ".join(re.findall(r"[a-z0-9]+", question.lower()))


def read_topics(folder: Path = CORPUS_FOLDER) -> list[Topic]:
    """Read all topics, in the order of file names; a name or a question that occurs twice is an error."""
    drafts: list[Draft] = []
    for path in sorted(folder.glob("*.md")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("## "):
                drafts.append(Draft(line.removeprefix("## ")))
            elif line and not line.startswith("# "):
                drafts[-1].add(line)
    topics = [draft.finish() for draft in drafts]
    seen: dict[str, str] = {}
    for topic in topics:
        for key in [topic.name, *(normalise(question) or question for question in topic.questions + topic.held_out)]:
            if seen.setdefault(key, topic.name) != topic.name:
                raise ValueError(f"{key!r} is in {seen[key]} and in {topic.name}")
    return topics


def read_documents(file: Path = CORPUS_FOLDER / "documents.txt") -> list[str]:
    """Return the prose of the project's documents, as `documents.py` took it down."""
    return file.read_text(encoding="utf-8").split(PAGE_BREAK)


Turn = tuple[str, str]
Conversation = tuple[str, list[Turn]]  # the system prompt or "", then questions with their answers


class ConversationMaker:
    """Makes conversations of topics; the same seed makes the same ones."""

    def __init__(self, topics: Sequence[Topic], seed: str) -> None:
        self.topics = list(topics)
        self.random = random.Random(seed)
        self.forbidden = {normalise(question) for topic in topics for question in topic.held_out}
        self.unclear = next(topic.answer for topic in topics if topic.name == UNCLEAR)

    def epoch(self) -> Iterator[Conversation]:
        """Yield one conversation or more for each question of each topic, in random order."""
        firsts = [(topic, question) for topic in self.topics for question in self._questions(topic)]
        self.random.shuffle(firsts)
        for topic, question in firsts:
            yield self._system_prompt(), self._turns(topic, question)

    def _questions(self, topic: Topic) -> list[str]:
        """Return the written questions of a topic and as many filled patterns, so that no topic has too few."""
        filled: list[str] = []
        if topic.terms:
            num_filled = max(5, len(topic.questions) // 2)
            for _ in range(num_filled):
                filled.append(self.random.choice(PATTERNS).format(self.random.choice(topic.terms)))
        return [question for question in (*topic.questions, *filled) if normalise(question) not in self.forbidden]

    def long_conversation(self, num_turns: int) -> Conversation:
        """Return one that goes on and on, as a chat may."""
        turns: list[Turn] = []
        while len(turns) < num_turns:
            topic = self.random.choice(self.topics)
            turns += self._with_follow_up(topic, self.random.choice(self._questions(topic)))
        return self._system_prompt(), turns

    def _system_prompt(self) -> str:
        draw = self.random.random()
        if draw < 0.45:
            return ""
        return SYSTEM_PROMPTS[0] if draw < 0.6 else self.random.choice(SYSTEM_PROMPTS)

    def _turns(self, topic: Topic, question: str) -> list[Turn]:
        if self.random.random() < 0.004:
            return [(self._vary(self.random.choice(FOLLOW_UPS)), self.unclear)]
        turns = [(self._vary(question), topic.answer)]
        num_before = self.random.choices((0, 1, 2, 3, 5), (65, 17, 9, 6, 3))[0]
        for _ in range(num_before):
            other = self.random.choice(self.topics)
            turns[:0] = self._with_follow_up(other, self.random.choice(self._questions(other)))
        if self.random.random() < 0.12:
            turns.append((self._vary(self.random.choice(FOLLOW_UPS)), topic.more))
        return turns

    def _with_follow_up(self, topic: Topic, question: str) -> list[Turn]:
        turns = [(self._vary(question), topic.answer)]
        if self.random.random() < 0.2:
            turns.append((self._vary(self.random.choice(FOLLOW_UPS)), topic.more))
        return turns

    def _vary(self, question: str) -> str:
        """Return the question as another person may type it, but never as a held-out one."""
        varied = question
        if self.random.random() < 0.2:
            varied = self._without_a_small_word(varied)
        if self.random.random() < 0.25:
            varied = varied.rstrip("?.!")
        if self.random.random() < 0.15:
            varied = self.random.choice(OPENINGS).format(varied[:1].lower() + varied[1:])
        elif self.random.random() < 0.08:
            varied = self.random.choice(ENDINGS).format(varied.rstrip("?.!"))
        varied = self._with_other_case(varied)
        if self.random.random() < 0.08:
            varied = self._with_typo(varied)
        return question if normalise(varied) in self.forbidden else varied

    def _without_a_small_word(self, text: str) -> str:
        words = text.split(" ")
        places = [place for place, word in enumerate(words) if word.lower() in DROPPABLE]
        if places and len(words) > 2:
            del words[self.random.choice(places)]
        return " ".join(words)

    def _with_other_case(self, text: str) -> str:
        draw = self.random.random()
        if draw < 0.3:
            return text.lower()
        if draw < 0.45:
            return text[:1].upper() + text[1:]
        return text.upper() if draw < 0.455 else text

    def _with_typo(self, text: str) -> str:
        """Return the text with one letter left out, doubled, or changed places with the next."""
        place = self.random.randrange(max(1, len(text) - 1))
        return self.random.choice(
            (
                text[:place] + text[place + 1 :],
                text[: place + 1] + text[place:],
                text[:place] + text[place + 1 : place + 2] + text[place : place + 1] + text[place + 2 :],
            )
        )
