"""Options: the settings of a config, from three sources and read by one schema.

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
"""How alike two names of the environment are where one is likely a mistake; other programs may use the prefix."""

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
        """Its name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return environment_name(self.name)

    @property
    def is_optional(self) -> bool:
        """Whether it need not have a value."""
        return type(None) in get_args(self.hint)

    @property
    def is_several(self) -> bool:
        """Whether it takes any number of values."""
        return bool(self.hint == tuple[str, ...])

    @property
    def is_size(self) -> bool:
        """Whether it is a number of bytes."""
        return self.hint in (int | str, int | str | None)

    def read(self, text: str) -> Any:
        """Return the value of a text; raises ValueError, which says what is allowed. Commas separate several values.

        An empty value stays one, for the config to refuse: a variable that was left empty must not open a server.
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
        """Return the value of an entry in a file; a text may spell a value of another type.

        Raises ValueError where nothing stands there and nothing is the default: the line was left empty by mistake.
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
        """Return a value as it may be shown: secrets are not."""
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
    """Return the environment name of a setting.

    >>> environment_name("kv_memory")
    'QUIRE_KV_MEMORY'
    """
    return PREFIX + setting.upper()


def read_count(text: str) -> int:
    """Return a number of things; k means 1000 and K means 1024, as for tokens of a context. Raises ValueError.

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
    """Give a command a flag for each option. Mutates the group."""
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
    """Give a command a group of the options that most people need; its help shows it first. Mutates the parser."""
    group = parser.add_argument_group(
        "common options", "each can also be set by an environment variable; the flag wins"
    )
    add_options(group, [options[name] for name in names])


def add_file_option(group: argparse._ArgumentGroup) -> None:
    """Give a command the flag that names a file of settings. Mutates the group."""
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
    """Return each setting, its value and where it comes from. Reads the file of settings, if one is named.

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
    """Raise for a variable that is nearly a setting: a misspelt key would leave a server open."""
    variables = {*map(environment_name, known), *OTHER_VARIABLES}
    for name in environ:
        if name.startswith(PREFIX) and name not in variables:
            closest = get_close_matches(name, sorted(variables), n=1, cutoff=NEAR)
            if closest:
                allowed = f"names of settings; the closest is {closest[0]}"
                raise InvalidConfigError("environment variable", name, allowed)


def given_file(arguments: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """Return the path of the file of settings; None: there is none."""
    path: str | None = vars(arguments).get("config", environ.get(FILE_VARIABLE))
    return path or None


def read_file(path: str, known: Collection[str]) -> dict[str, Any]:
    """Return the contents of a settings file; raises `InvalidConfigError` for any other file."""
    import yaml  # only where there is such a file

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfigError("config", path, f"a file that can be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise InvalidConfigError("config", path, "a file of YAML in UTF-8") from None
    if not isinstance(content, dict | None):
        raise InvalidConfigError("config", path, "a file of YAML with names of settings and their values")
    values = {}
    for key, value in (content or {}).items():
        name = str(key).replace("-", "_")
        if name not in known:
            closest = get_close_matches(name, sorted(known), n=1, cutoff=0.0)
            raise InvalidConfigError(f"key of {path}", key, f"names of settings; the closest is {closest[0]}")
        values[name] = value
    return values


def make_config(kind: type[Config], settings: Settings) -> Config:
    """Return a config of resolved settings. A value that it refuses is named as it was given."""
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
