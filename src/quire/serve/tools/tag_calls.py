r"""Calls as tags: the arguments are not JSON, but one value after another, each with its name.

    <tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>    Qwen3-Coder
    <seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n</function>\n</seed:tool_call>  Seed-OSS
    <tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>                    GLM from 4.5 on

A text is written as it is, any other value as JSON; the schema of a parameter says which. Clients get JSON: the parser
writes the names, quotes texts as they arrive, and passes on other values when they are complete.

A grammar can hold a text only to a list of allowed texts. A strict tool with other rules for texts, or for all
arguments together, is refused; otherwise these rules are ignored, as those that no grammar can follow are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from quire.serve.tools.base import SPACE, AnswerParser, Arguments, Conversation, Mark, Message, Tool
from quire.serve.tools.json_calls import (
    CallShape,
    JsonCallParser,
    Reading,
    WrongCall,
    expect,
    is_json,
    letter_after_space,
    require,
    word_from,
)
from quire.serve.tools.rules import (
    NOTES,
    definition,
    free_text,
    literal,
    pattern,
    refused,
    repeated,
    text_before,
    value_schema,
)
from quire.serve.tools.template_format import TemplateFormat, with_all_fields

SEED_CALL: Final = "<seed:tool_call>"
MAX_KEY_LENGTH: Final = 256
KEY: Final = re.compile(r"[^<>\s](?:[^<>\n]*[^<>\s])?")
OF_ARGUMENTS: Final = NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
OF_TEXT: Final = NOTES | {"type", "enum", "const"}


@dataclass(frozen=True, slots=True)
class TagShape:
    """The text around names and values. Space is optional where `gap` is."""

    opener: str
    before_name: str
    after_name: str
    before_key: str
    after_key: str
    before_value: str
    after_value: str
    closers: tuple[str, ...]
    space: str
    """The rule for space between tags."""
    line: str = ""
    """What precedes and follows a value within its tags."""


class TagCallParser(JsonCallParser):
    """Reads calls of one shape. Mutable."""

    def __init__(self, shape: TagShape, tools: Sequence[Tool]) -> None:
        super().__init__(CallShape(shape.opener), tools)
        self._tags = shape
        self._tools = {tool.name: tool for tool in tools}

    def _calls(self) -> Reading:
        tags = self._tags
        letter = yield from letter_after_space()
        if tags.before_name:
            require(letter == tags.before_name[0])
            yield from expect(tags.before_name[1:])
            letter = yield
        name, letter = yield from word_from(letter)
        require(name in self._tools)
        if tags.after_name:
            require(letter == tags.after_name)
        if tags.after_name or letter in SPACE:
            letter = yield from letter_after_space()
        yield from self._parameters(self._tools[name], letter)
        for closer in tags.closers[1:]:
            require((yield from letter_after_space()) == closer[0])
            yield from expect(closer[1:])

    def _parameters(self, tool: Tool, letter: str) -> Reading:
        """Read all parameters and the tag after them, whose first letter has been read."""
        tags, begin = self._tags, "{"
        try:
            while (yield from _tag(letter, (tags.before_key, tags.closers[0]))) == tags.before_key:
                key = yield from self._key()
                if begin == "{":
                    self._begin_call(tool.name)
                self._pass_on(f"{begin}{json.dumps(key, ensure_ascii=False)}: ")
                yield from (
                    self._text(tags.line + tags.after_value, tags.line)
                    if is_text(tool, parameter(tool, key))
                    else self._json()
                )
                begin = ", "
                letter = yield from letter_after_space()
        except WrongCall:
            if begin != "{":
                self._events.append(Arguments("}"))
            raise
        if begin == "{":
            self._begin_call(tool.name)
        self._pass_on("{}" if begin == "{" else "}")
        self._held = ""

    def _key(self) -> Generator[None, str, str]:
        tags, key = self._tags, ""
        while not key.endswith(tags.after_key):
            require(len(key) < MAX_KEY_LENGTH)
            key += yield
        key = key.removesuffix(tags.after_key).strip(SPACE)
        require(bool(KEY.fullmatch(key)))
        if tags.before_value:
            require((yield from letter_after_space()) == tags.before_value[0])
            yield from expect(tags.before_value[1:])
        return key

    def _json(self) -> Reading:
        """Pass on a value that should be JSON; if it is not, as a JSON string."""
        end, text = self._tags.after_value, ""
        while not text.endswith(end):
            text += yield
            self._held = ""
        text = text.removesuffix(end).strip(SPACE)
        self._pass_on(text if is_json(text) else json.dumps(text, ensure_ascii=False))


@dataclass(frozen=True, slots=True)
class TagFormat(TemplateFormat):
    """A format whose calls are tags. Immutable."""

    shape: TagShape

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of a call."""
        tags = self.shape
        parts = (tags.opener, tags.closers[-1], tags.before_key, tags.after_key, tags.before_value, tags.after_value)
        return tuple(part for part in parts if re.fullmatch(r"</?[\w:]+>", part))

    def rules(self, tools: Sequence[Tool], most: int, mark: Mark) -> str:
        """Return the rules `calls`, `opened` and `free`; raises for a schema that no call can follow."""
        tags, rules = self.shape, list[str]()
        gap, line = tags.space, literal(tags.line) if tags.line else ""
        for index, tool in enumerate(tools):
            before = f"{literal(tags.before_name + tool.name + tags.after_name)} {gap}"
            rules.append(f"call_{index}: {gap} {before} arguments_{index}")
            rules += self._arguments(index, tool, mark)
        end = f"{line} {mark(tags.after_value)}"
        if mark(tags.after_value) == literal(tags.after_value):
            rules.append(f"text[lazy]: /(.|\\n)*{pattern(tags.line + tags.after_value)}/")
        else:
            rules += [f"text: VALUE? {end}", r"VALUE: /(.|\n)+/"]
        closers = f" {gap} ".join(mark(closer) for closer in tags.closers)
        rules += [f"end: {end}", f"group: ({' | '.join(f'call_{index}' for index in range(len(tools)))}) {closers}"]
        more = repeated(f"GAP {mark(tags.opener)} group", most)
        rules.append(f"calls: {mark(tags.opener)} group{more}")
        rules += [f"opened: {text_before(tags.opener, mark)} group{more}", free_text(tags.opener)]
        return "\n".join(rules)

    def _arguments(self, index: int, tool: Tool, mark: Mark) -> list[str]:
        tags, rules, parts = self.shape, list[str](), list[str]()
        line = literal(tags.line) if tags.line else ""
        for number, (key, is_required) in enumerate(keys_of(tool, KEY).items()):
            value, schema = f"arguments_{index}_{number}", parameter(tool, key)
            before = f"{mark(tags.before_key)} {literal(key)} {mark(tags.after_key)}"
            if tags.before_value:
                before += f" {tags.space} {mark(tags.before_value)}"
            parts.append(f"({before} {line} {value} {tags.space}){'' if is_required else '?'}")
            rules.append(f"{value}: {_value_rule(tool, schema, tags.line + tags.after_value)}")
        return [f"arguments_{index}: {' '.join(parts) or literal('')}", *rules]

    def parser(self, tools: Sequence[Tool]) -> AnswerParser:
        """Return a parser for calls of these functions."""
        return TagCallParser(self.shape, tools)


def is_text(tool: Tool, schema: Mapping[str, Any]) -> bool:
    """Return whether all values that a schema allows are texts. Does not mutate."""
    if "type" in schema:
        return schema["type"] in ("string", ["string"])
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)


def parameter(tool: Tool, key: str) -> Mapping[str, Any]:
    """Return the schema of a parameter, which may be a reference to a definition."""
    return definition(tool, tool.parameters.get("properties", {}).get(key, {}))


def keys_of(tool: Tool, form: re.Pattern[str]) -> Mapping[str, bool]:
    """Return the names of parameters, and whether each is required; raises if no call can follow the schema.

    `form`: that of all names that the calls can have.
    """
    schema, needed = tool.parameters, tool.parameters.get("required", [])
    properties = [key for key, value in schema.get("properties", {}).items() if value is not False]
    required = [key for key in needed if isinstance(key, str)] if isinstance(needed, list) else []
    keys = dict.fromkeys(properties, False) | dict.fromkeys(required, True)
    for key in keys:
        if not form.fullmatch(key) or len(key) > MAX_KEY_LENGTH // 2:
            raise refused(tool, f"names of parameters that this model's calls can have, not {key!r:.80}")
    others = sorted(schema.keys() - OF_ARGUMENTS)
    others += ["additionalProperties"] if schema.get("additionalProperties") else []
    if others and (tool.strict or not keys):
        raise refused(tool, f"a schema without {others[0]}, which the calls of this model cannot follow")
    return {key: keys[key] for key in (*properties, *required)}


def _value_rule(tool: Tool, schema: Mapping[str, Any], end: str) -> str:
    if not is_text(tool, schema):
        return f"{value_schema(tool, schema)} end"
    others = sorted(schema.keys() - OF_TEXT)
    if others and tool.strict:
        raise refused(tool, f"texts without {others[0]}, which the calls of this model cannot follow")
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    texts = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
    if any(end in text for text in texts):
        raise refused(tool, f"texts without {end!r}, which ends a text in the calls of this model")
    return f"({' | '.join(literal(text) for text in texts)}) end" if texts else "text"


def _tag(letter: str, tags: Sequence[str]) -> Generator[None, str, str]:
    """Return the one of the tags whose first letter has been read."""
    text = letter
    while text not in tags:
        require(any(tag.startswith(text) for tag in tags))
        text += yield
    return text


def _with_all_fields(messages: Sequence[Message], tools: Sequence[Message] | None) -> Conversation:
    return messages, with_all_fields(tools)


QWEN3_CODER: Final = TagFormat(
    "qwen3_coder",
    TagShape(
        "<tool_call>",
        "<function=",
        ">",
        "<parameter=",
        ">",
        "",
        "</parameter>",
        ("</function>", "</tool_call>"),
        space='"\\n"',
        line="\n",
    ),
    signs=("<function=", "<parameter="),
    adapt=_with_all_fields,
    others=(SEED_CALL,),
)
SEED: Final = TagFormat(
    "seed",
    replace(QWEN3_CODER.shape, opener=SEED_CALL, closers=("</function>", "</seed:tool_call>"), line=""),
    signs=(SEED_CALL, "<function=", "<parameter="),
    adapt=_with_all_fields,
)
GLM45: Final = TagFormat(
    "glm45",
    TagShape(
        "<tool_call>",
        "",
        "",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        ("</tool_call>",),
        space="GAP",
    ),
    signs=("<arg_key>", "<arg_value>"),
    adapt=_with_all_fields,
)
