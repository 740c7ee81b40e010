"""The guide's corpus: topics from `corpus/*.md`, and the conversations that are made from them.

A topic in a file:

    ## block-table                                     its name
    term: a block table | block tables                 subjects, for NOUN_PATTERNS below
    do: find the blocks of a sequence                  tasks of a user, for DO_PATTERNS
    ? What is a block table?                           a question in a user's words
    ! where does it say which blocks I have?           a held-out question
    = A block table is ...                             the answer
    + A token's logical block is ...                   the answer to "tell me more"

A *held-out* question is in no conversation, in any case or punctuation; `evaluate.py` asks it.

The model sees no other English, so half of the questions are made from patterns: any subject in any pattern. Then the
questions of two topics differ in their subject and not in their wording, and the model must learn the subject.

This module uses only the standard library, and draws from a generator that the caller passes.
"""

from __future__ import annotations

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
QUESTIONS_PER_EPOCH = 16  # of each topic
OUT_OF_SCOPE_PER_EPOCH = 190  # about a tenth of all questions
SHARE_WRITTEN = 0.5  # of the questions are written ones; the others are made from patterns

NOUN_PATTERNS = (
    "What is {}?",
    "what's {}",
    "what are {}",
    "Explain {}",
    "explain {} to me",
    "Tell me about {}",
    "tell me something about {}",
    "{}",
    "{}?",
    "Define {}",
    "What does {} mean?",
    "what do you know about {}?",
    "Describe {}",
    "describe in short {}",
    "I want to know about {}",
    "I would like to learn about {}",
    "How does {} work?",
    "how do {} work",
    "how exactly does {} work here",
    "Help me understand {}",
    "can you help me with {}",
    "What about {}?",
    "how about {}",
    "what is meant by {}",
    "I do not understand {}",
    "I never understood {}",
    "I have a question about {}",
    "Why {}?",
    "why do we need {}",
    "why is there {}",
    "who needs {}",
    "when do I need {}",
    "when is {} used",
    "what do I need {} for",
    "is there {}",
    "does quire have {}",
    "what does quire do about {}",
    "how does quire handle {}",
    "how does quire deal with {}",
    "how is {} done",
    "Give me a short explanation of {}",
    "give me an overview of {}",
    "say something about {}",
    "and {}?",
    "what is {} for",
    "what is the point of {}",
    "what is the idea behind {}",
    "what is so special about {}",
    "what is important about {}",
    "what should I know about {}",
    "I read about {}, what is that",
    "somebody mentioned {}",
    "could you say what {} is",
    "can you explain {} in simple words",
    "what happens with {}",
    "where does {} come in",
    "what do people mean when they say {}",
    "do you know {}",
    "let us talk about {}",
    "details about {}",
    "how important is {}",
)
PAIR_PATTERNS = (
    "{} and {}",
    "what is the difference between {} and {}",
    "how are {} and {} related",
    "explain {} and {}",
    "what about {} or {}",
    "{}, {}",
)
DO_PATTERNS = (
    "How do I {}?",
    "how can I {}",
    "how to {}",
    "How could one {}?",
    "Can I {}?",
    "Is it possible to {}?",
    "is there a way to {}",
    "I want to {}",
    "I would like to {}",
    "I need to {}",
    "i'd like to {}, how",
    "what must I do to {}",
    "what do I have to do to {}",
    "What is the best way to {}?",
    "can quire {}",
    "Show me how to {}",
    "tell me how to {}",
    "{}",
    "please {}",
    "why would I {}",
    "what if I want to {}",
    "my task is to {}",
    "where can I {}",
    "can you tell me how to {}",
    "we have to {}, what now",
)
# Phrases of one line can replace each other in a question.
WORDINGS = (
    ("how do i", "how can i", "how could i", "how to", "how would i", "what do i do to", "is there a way to"),
    ("can i", "may i", "is it possible to", "could i", "am i able to"),
    ("what happens if", "what if", "what happens when", "what will happen if", "what becomes of it when"),
    ("what is", "what's", "whats", "what exactly is", "what would be"),
    ("why does", "how come", "for what reason does", "why exactly does"),
    ("why is", "how come", "what is the reason that"),
    ("which", "what"),
    ("show me", "give me", "let me see", "i want to see"),
    ("explain", "describe", "clarify", "make clear"),
    ("does quire", "does this engine", "does it", "can quire", "will quire"),
    ("in quire", "here", "with quire", "in this engine", "with this"),
    ("memory", "RAM", "storage"),
    ("answer", "reply", "response", "output"),
    ("answers", "replies", "responses", "outputs"),
    ("user", "customer", "client", "person"),
    ("users", "customers", "clients", "people"),
    ("large", "big", "huge"),
    ("small", "little", "tiny"),
    ("fast", "quick", "rapid"),
    ("faster", "quicker"),
    ("same", "identical", "equal"),
    ("choose", "pick", "select"),
    ("chosen", "picked", "selected"),
    ("compute", "calculate", "work out"),
    ("computed", "calculated", "worked out"),
    ("many", "lots of", "several"),
    ("need", "require", "want"),
    ("limit", "cap", "bound", "restrict"),
    ("evicted", "thrown out", "dropped", "removed", "kicked out", "discarded"),
    ("stored", "kept", "held", "saved"),
    ("use", "employ", "work with", "take"),
    ("get", "obtain", "have"),
    ("start", "begin", "launch"),
    ("begin", "start"),
    ("make", "create", "build"),
    ("run", "execute", "start"),
    ("write", "produce"),
    ("find", "locate", "look for"),
    ("change", "modify", "alter", "adjust"),
    ("wait", "hang", "be stuck"),
    ("set", "configure", "define"),
    ("empty", "unused"),
    ("full", "filled", "used up"),
    ("shared", "in common", "held together"),
    ("longest", "greatest", "maximum"),
    ("good", "useful", "helpful"),
    ("problem", "issue", "trouble"),
    ("one", "a single"),
    ("two", "a pair of", "2"),
)
CONTEXTS = (
    "for my project",
    "at work",
    "in practice",
    "on my server",
    "for our company",
    "if I may ask",
    "in general",
    "when many people use it",
    "these days",
    "right now",
    "in my case",
    "in a nutshell",
    "in one sentence",
    "as a beginner",
    "in detail",
    "step by step",
    "under the hood",
    "for a talk I am preparing",
    "my colleague asks",
    "I am new to this",
    "I read the README",
    "my boss wants to know",
    "I am curious",
    "just wondering",
    "sorry for the silly question",
    "I could not find it in the documents",
    "we are a small team",
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
DROPPABLE = (
    *("a", "an", "the", "is", "are", "am", "was", "be", "do", "does", "did", "of", "to", "in", "for", "at", "by", "on"),
    *("with", "from", "my", "your", "our", "i", "we", "it", "that", "this", "there", "me", "can", "could", "would"),
    *("should", "may", "will", "and", "so", "exactly", "what", "how", "why", "when", "where", "which", "who"),
    *("what's", "if"),
)


@dataclass(frozen=True, slots=True)
class Topic:
    """Questions with the same answer."""

    name: str
    terms: tuple[str, ...]
    deeds: tuple[str, ...]
    questions: tuple[str, ...]
    held_out: tuple[str, ...]
    answer: str
    more: str


@dataclass(slots=True)
class Draft:
    """A topic while it is read."""

    name: str
    terms: list[str] = field(default_factory=list)
    deeds: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    more: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Add a line of the file."""
        for key, values in (("term: ", self.terms), ("do: ", self.deeds)):
            if line.startswith(key):
                values += [value.strip() for value in line.removeprefix(key).split("|")]
                return
        lists = {"? ": self.questions, "! ": self.held_out, "= ": self.answers, "+ ": self.more}
        if line[:2] not in lists:
            raise ValueError(f"{self.name}: not a line of a topic: {line!r}")
        lists[line[:2]].append(line[2:].strip())

    def finish(self) -> Topic:
        """Return the topic."""
        if len(self.answers) != 1 or len(self.more) > 1 or len(self.questions) < 4:
            raise ValueError(f"{self.name}: needs one answer, at most one addition, and four questions or more")
        return Topic(
            name=self.name,
            terms=tuple(self.terms),
            deeds=tuple(self.deeds),
            questions=tuple(self.questions),
            held_out=tuple(self.held_out),
            answer=self.answers[0],
            more=self.more[0] if self.more else NO_MORE,
        )


def normalise(question: str) -> str:
    """Return a question without case, punctuation and extra spaces."""
    return " ".join(re.findall(r"[a-z0-9]+", question.lower()))


def read_topics() -> list[Topic]:
    """Read all topics, in the order of file names; a name or a question that occurs twice is an error."""
    drafts: list[Draft] = []
    for path in sorted(CORPUS_FOLDER.glob("*.md")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("## "):
                drafts.append(Draft(line.removeprefix("## ")))
            elif line and not line.startswith("# "):
                drafts[-1].add(line)
    topics = [draft.finish() for draft in drafts]
    seen: dict[str, str] = {}
    for topic in topics:
        texts = (topic.name, *topic.terms, *topic.deeds, *topic.questions, *topic.held_out)
        for key in [normalise(text) or text for text in texts]:
            if seen.setdefault(key, topic.name) != topic.name:
                raise ValueError(f"{key!r} is in {seen[key]} and in {topic.name}")
    return topics


def read_documents() -> list[str]:
    """Return the prose of the project's documents, as `documents.py` recorded it."""
    return (CORPUS_FOLDER / "documents.txt").read_text(encoding="utf-8").split(PAGE_BREAK)


Turn = tuple[str, str]
Conversation = tuple[str, list[Turn]]  # the system prompt or "", then questions with their answers


class ConversationMaker:
    """Makes conversations about topics; the same seed gives the same ones."""

    def __init__(self, topics: Sequence[Topic], seed: str) -> None:
        self.topics = list(topics)
        self.random = random.Random(seed)
        self.forbidden = {normalise(question) for topic in topics for question in topic.held_out}
        self.strange = next(topic.terms for topic in topics if topic.name == OUT_OF_SCOPE)
        self.unclear = next(topic.answer for topic in topics if topic.name == UNCLEAR)

    def epoch(self) -> Iterator[Conversation]:
        """Yield equally many conversations for each topic, in random order."""
        firsts = [topic for topic in self.topics for _ in range(QUESTIONS_PER_EPOCH)]
        firsts += [topic for topic in self.topics if topic.name == OUT_OF_SCOPE] * OUT_OF_SCOPE_PER_EPOCH
        self.random.shuffle(firsts)
        for topic in firsts:
            yield self._system_prompt(), self._turns(topic, self._question(topic))

    def _question(self, topic: Topic) -> str:
        """Return a question of the topic that is not held out."""
        while True:
            question = self._drawn(topic)
            if normalise(question) not in self.forbidden:
                return question

    def _drawn(self, topic: Topic) -> str:
        if not topic.terms or self.random.random() < SHARE_WRITTEN:
            return self.random.choice(topic.questions)
        if topic.deeds and self.random.random() < 0.4:
            return self.random.choice(DO_PATTERNS).format(self.random.choice(topic.deeds))
        if len(topic.terms) > 1 and self.random.random() < 0.12 and topic.name != OUT_OF_SCOPE:
            return self.random.choice(PAIR_PATTERNS).format(*self.random.sample(topic.terms, 2))
        return self.random.choice(NOUN_PATTERNS).format(self.random.choice(topic.terms))

    def long_conversation(self, num_turns: int) -> Conversation:
        """Return a conversation of many turns, like a long chat."""
        turns: list[Turn] = []
        while len(turns) < num_turns:
            topic = self.random.choice(self.topics)
            turns += self._with_follow_up(topic, self._question(topic))
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
        num_before = self.random.choices((0, 1, 2, 3, 5), (76, 13, 6, 3, 2))[0]
        for _ in range(num_before):
            other = self.random.choice(self.topics)
            turns[:0] = self._with_follow_up(other, self._question(other))
        if self.random.random() < 0.12:
            turns.append((self._vary(self.random.choice(FOLLOW_UPS)), topic.more))
        return turns

    def _with_follow_up(self, topic: Topic, question: str) -> list[Turn]:
        turns = [(self._vary(question), topic.answer)]
        if self.random.random() < 0.2:
            turns.append((self._vary(self.random.choice(FOLLOW_UPS)), topic.more))
        return turns

    def _vary(self, question: str) -> str:
        """Return a variation of the question that is not held out."""
        varied = question
        if self.random.random() < 0.4:
            varied = self._in_other_words(varied)
        if self.random.random() < 0.3:
            varied = self._without_small_words(varied)
        if self.random.random() < 0.12:
            varied = self._with_strange_words(varied)
        if self.random.random() < 0.35:
            varied = varied.rstrip("?.!")
        varied = self._with_surroundings(varied)
        varied = self._with_other_case(varied)
        if self.random.random() < 0.08:
            varied = self._with_typo(varied)
        return question if normalise(varied) in self.forbidden else varied

    def _in_other_words(self, text: str) -> str:
        """Return the text with some phrases replaced by others."""
        for group in WORDINGS:
            for wording in group:
                found = re.search(rf"\b{wording}\b", text, re.IGNORECASE)
                if found and self.random.random() < 0.5:
                    text = text[: found.start()] + self.random.choice(group) + text[found.end() :]
                    break
        return text

    def _with_strange_words(self, text: str) -> str:
        """Return the text with unrelated words inside, which the model must learn to ignore."""
        words = text.split(" ")
        words.insert(self.random.randrange(len(words) + 1), self.random.choice(self.strange))
        return " ".join(words)

    def _with_surroundings(self, text: str) -> str:
        """Return the text with an opening, an ending, or an unrelated phrase."""
        draw, lowered = self.random.random(), text[:1].lower() + text[1:]
        if draw < 0.12:
            return self.random.choice(OPENINGS).format(lowered)
        if draw < 0.18:
            return self.random.choice(ENDINGS).format(text.rstrip("?.!"))
        if draw < 0.24:
            return f"{text.rstrip('?.!')} {self.random.choice(CONTEXTS)}"
        if draw < 0.30:
            return f"{self.random.choice(CONTEXTS)}: {lowered}"
        return text

    def _without_small_words(self, text: str) -> str:
        """Return the text without up to three words that do not determine the topic."""
        words = text.split(" ")
        for _ in range(self.random.randrange(1, 4)):
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
        """Return the text with one letter omitted, doubled, or swapped with the next."""
        place = self.random.randrange(max(1, len(text) - 1))
        return self.random.choice(
            (
                text[:place] + text[place + 1 :],
                text[: place + 1] + text[place:],
                text[:place] + text[place + 1 : place + 2] + text[place : place + 1] + text[place + 2 :],
            )
        )
