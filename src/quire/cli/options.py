"""Options: the settings of a config, read from three sources by one schema.

    flag  >  environment  >  file  >  default       --block-size 32     QUIRE_BLOCK_SIZE=32     block_size: 32

Names, kinds, defaults and help are read from the fields, so a setting that is added there is an option everywhere. The
file is YAML, named by --config or QUIRE_CONFIG; its keys are the names of settings, with _ or -. It may hold the
settings of all commands: each takes its own. A name that no command knows is an error.

Texts of flags and of the environment are read here; the config decides whether a value is allowed, from every source.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_type_hints

from quire.core.errors import InvalidConfigError

PREFIX: Final = "QUIRE_"
FILE_VARIABLE: Final = "QUIRE_CONFIG"
OTHER_VARIABLES: Final = (FILE_VARIABLE, "QUIRE_ISA", "QUIRE_FAILPOINTS")
NEAR: Final = 0.85
"""The similarity above which an environment variable counts as misspelt; other programs may use the prefix too."""

DEFAULT: Final = "default"
FLAG: Final = "flag"
MASK: Final = "********"
TRUTHS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
COUNT: Final = re.compile(r"\s*([-+]?\d+|\d+\.\d+(?=[kKmM]))([kKmM]?)\s*", re.ASCII)
COUNT_UNITS: Final = {"": 1, "k": 1000, "K": 1024, "m": 1_000_000, "M": 1 << 20}

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class Option:
    """A setting as an option; `hint` is the type of its values."""

    name: str
    hint: Any
    default: Any
    help: str
    secret: bool
    metavar: str = ""

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The name of the environment variable."""
        return environment_name(self.name)

    @property
    def is_optional(self) -> bool:
        """Whether the value can be None."""
        return type(None) in get_args(self.hint)

    @property
    def is_several(self) -> bool:
        """Whether the option takes any number of values."""
        return bool(self.hint == tuple[str, ...])

    @property
    def is_size(self) -> bool:
        """Whether the value is a number of bytes."""
        return self.hint in (int | str, int | str | None)

    def read(self, text: str) -> Any:
        """Parse a text; raises a ValueError that names what is allowed. Commas separate several values.

        An empty text stays empty, so that the config refuses it: an empty variable must not open a server.
        """
        if self.is_several:
            return tuple(part.strip() for part in text.split(","))
        if self.is_optional and text.lower() == "none":
            return None
        if self.hint is bool:
            return _read_truth(text)
        if self.hint in (int, int | None):
            return read_count(text)
        if self.hint in (float, float | None):
            return _read_number(text)
        return text

    def take(self, value: object) -> Any:
        """Return the value of an entry in a file; a text can express a value of another type.

        Raises ValueError if both the entry and the default are empty: the line was left empty by mistake.
        """
        if value in (None, []) and not self.default:
            raise ValueError("a value; delete the line to use the default")
        if self.is_several and isinstance(value, list):
            return tuple(value)
        if self.is_several and isinstance(value, str):
            return (value,)
        if isinstance(value, str):
            return self.read(value)
        return self.default if value is None and not self.is_optional else value

    def show(self, value: object) -> Any:
        """Return a value for display, with secrets masked."""
        if not self.secret or not value:
            return list(value) if isinstance(value, tuple) else value
        return [MASK] * len(value) if isinstance(value, tuple) else MASK


@dataclass(frozen=True, slots=True)
class Setting:
    """A value, and where it comes from: flag, environment NAME, file PATH, or default."""

    option: Option
    value: Any
    origin: str


Settings = Mapping[str, Setting]


def options_of(kind: type) -> dict[str, Option]:
    """Return the options of a config, by name."""
    hints = get_type_hints(kind)
    return {
        field.name: Option(field.name, hints[field.name], field.default, **field.metadata) for field in fields(kind)
    }


def environment_name(setting: str) -> str:
    """Return the environment variable of a setting.

    >>> environment_name("kv_memory")
    'QUIRE_KV_MEMORY'
    """
    return PREFIX + setting.upper()


def read_count(text: str) -> int:
    """Parse a count; k means 1000 and K means 1024, as in context lengths. Raises ValueError.

    >>> read_count("512"), read_count("32K"), read_count("25.6k")
    (512, 32768, 25600)
    """
    match = COUNT.fullmatch(text)
    if match is None or len(text) > 40:
        raise ValueError("an integer")
    number, unit = match[1], COUNT_UNITS[match[2]]
    return round(float(number) * unit) if "." in number else int(number) * unit


def _read_truth(text: str) -> bool:
    if text.lower() not in TRUTHS:
        raise ValueError("yes or no")
    return TRUTHS[text.lower()]


def _read_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


# ---- flags ----------------------------------------------------------------------------------------------------------


def add_options(group: argparse._ArgumentGroup, options: Iterable[Option]) -> None:
    """Add a flag for each option. Mutates the group."""
    for option in options:
        shown = "none" if option.default in (None, ()) else option.default
        default = f"default: {str(shown).lower() if isinstance(shown, bool) else shown}"
        text = f"{option.help} ({default}; {option.variable})"
        if option.hint is bool:
            group.add_argument(option.flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        elif option.is_several:
            group.add_argument(
                option.flag,
                action="append",
                default=argparse.SUPPRESS,
                metavar=option.metavar or "TEXT",
                help=f"{text}; repeatable",
            )
        else:
            reader = _flag_reader(option)
            group.add_argument(option.flag, type=reader, default=argparse.SUPPRESS, metavar=_metavar(option), help=text)


def add_common_options(parser: argparse.ArgumentParser, options: Mapping[str, Option], names: Iterable[str]) -> None:
    """Add a group with the options that most people need, which the help shows first. Mutates the parser."""
    group = parser.add_argument_group(
        "common options", "each can also be set by an environment variable; the flag wins"
    )
    add_options(group, [options[name] for name in names])


def add_file_option(group: argparse._ArgumentGroup) -> None:
    """Add the flag that names a settings file. Mutates the group."""
    text = f"YAML file with settings; flags and environment variables win ({FILE_VARIABLE})"
    group.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=text)


def _flag_reader(option: Option) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return option.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not {error}") from None

    return read


def _metavar(option: Option) -> str:
    if option.metavar or option.is_size:
        return option.metavar or "SIZE"
    if option.hint in (int, int | None):
        return "N"
    if option.hint in (float, float | None):
        return "SECONDS" if option.name.endswith("_s") else "X"
    return "NAME"


# ---- where values come from -----------------------------------------------------------------------------------------


def resolve(
    options: Mapping[str, Option],
    arguments: argparse.Namespace,
    environ: Mapping[str, str],
    known: Collection[str],
) -> dict[str, Setting]:
    """Return each setting, its value and its origin. Reads the settings file, if one is named.

    `known` are the names that the file may contain.
    """
    _require_known(environ, known)
    given, file = vars(arguments), given_file(arguments, environ)
    in_file = {} if file is None else read_file(file, known)
    settings = {}
    for name, option in options.items():
        if name in given:
            value = tuple(given[name]) if option.is_several else given[name]
            settings[name] = Setting(option, value, FLAG)
        elif option.variable in environ:
            value = _read(option.read, option.variable, environ[option.variable])
            settings[name] = Setting(option, value, f"environment {option.variable}")
        elif name in in_file:
            settings[name] = Setting(option, _read(option.take, f"{name} in {file}", in_file[name]), f"file {file}")
        else:
            settings[name] = Setting(option, option.default, DEFAULT)
    return settings


def _require_known(environ: Mapping[str, str], known: Collection[str]) -> None:
    """Raise for a variable whose name is close to that of a setting: a misspelt API key would leave a server open."""
    variables = {*map(environment_name, known), *OTHER_VARIABLES}
    for name in environ:
        if name.startswith(PREFIX) and name not in variables:
            closest = get_close_matches(name, sorted(variables), n=1, cutoff=NEAR)
            if closest:
                allowed = f"names of settings; the closest is {closest[0]}"
                raise InvalidConfigError("environment variable", name, allowed)


def given_file(arguments: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """Return the path of the settings file; None if none is named."""
    path: str | None = vars(arguments).get("config", environ.get(FILE_VARIABLE))
    return path or None


def read_file(path: str, known: Collection[str]) -> dict[str, Any]:
    """Return the contents of a settings file; raises `InvalidConfigError` for any other file."""
    import yaml  # only needed with a settings file

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfigError("config", path, f"a file that can be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise InvalidConfigError("config", path, "a YAML file in UTF-8") from None
    if not isinstance(content, dict | None):
        raise InvalidConfigError("config", path, "a YAML file with names of settings and their values")
    values = {}
    for key, value in (content or {}).items():
        name = str(key).replace("-", "_")
        if name not in known:
            closest = get_close_matches(name, sorted(known), n=1, cutoff=0.0)
            raise InvalidConfigError(f"key of {path}", key, f"names of settings; the closest is {closest[0]}")
        values[name] = value
    return values


def make_config(kind: type[Config], settings: Settings) -> Config:
    """Return a config from resolved settings. An error about a value names the source of that value."""
    names = options_of(kind)
    try:
        return kind(**{name: settings[name].value for name in names})
    except InvalidConfigError as error:
        setting = settings.get(error.field.partition("[")[0])
        if setting is None or setting.origin in (FLAG, DEFAULT):
            raise
        what, _, where = setting.origin.partition(" ")
        field = where if what == "environment" else f"{error.field} in {where}"
        raise InvalidConfigError(field, error.value, error.allowed) from None


def _read(read: Callable[[Any], Any], field: str, value: object) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise InvalidConfigError(field, value, str(error)) from None
