"""`quire config show`: the settings that a server would start with, and where each value comes from."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from quire.cli.options import Setting
from quire.cli.server_options import ServeSettings, add_serve_options, serve_settings
from quire.cli.tables import show_table
from quire.core.byte_sizes import format_bytes


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `config`. Mutates `subparsers`."""
    text = "show the settings quire would use, and where each comes from"
    parser = subparsers.add_parser("config", help=text, description="Show settings.")
    parser.set_defaults(run=lambda _: _show_help(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    show = commands.add_parser(
        "show",
        help="each setting, its value and where it comes from",
        description="Print each setting, its value and where it comes from: flag, environment, file or default. "
        "Takes the options of quire serve, and shows the settings that it would use.",
    )
    show.add_argument("--json", action="store_true", help="print one JSON object")
    add_serve_options(show)
    show.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the settings. Returns the exit status."""
    resolved = serve_settings(arguments, os.environ)
    if arguments.json:
        print(json.dumps({name: _plain(resolved, setting) for name, setting in resolved.settings.items()}, indent=2))
        return 0
    rows = [("setting", "value", "origin")]
    rows += [(name, _text(resolved, setting), setting.origin) for name, setting in resolved.settings.items()]
    print(show_table(rows, "<"))
    return 0


def _show_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def _value(resolved: ServeSettings, setting: Setting) -> Any:
    """Return a value as the config stores it, with secrets masked."""
    name = setting.option.name
    holder = resolved.server if name in resolved.server.__dataclass_fields__ else resolved.engine
    return setting.option.show(getattr(holder, name))


def _plain(resolved: ServeSettings, setting: Setting) -> dict[str, Any]:
    return {"value": _value(resolved, setting), "origin": setting.origin}


def _text(resolved: ServeSettings, setting: Setting) -> str:
    value = _value(resolved, setting)
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value)
    if setting.option.is_size:
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
