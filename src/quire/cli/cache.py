"""`quire cache`: what a disk cache holds; `verify` reads it all, `forget` erases blocks.

A store that an engine uses is listed and otherwise left alone.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

from quire.core.byte_sizes import format_bytes

FOLDER: Final = "the folder given as --disk-cache"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `cache`. Mutates `subparsers`."""
    text = "Look at the KV blocks that --disk-cache keeps."
    parser = subparsers.add_parser("cache", help="list, verify or forget what a disk cache keeps", description=text)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = commands.add_parser("ls", help="list the stores of a folder", description="List the stores of a folder.")
    listing.add_argument("--json", action="store_true", help="print one JSON object per store and line")
    listing.set_defaults(run=run_list)
    text = "Read every block, and compare it with its checksum. Changes nothing."
    verify = commands.add_parser("verify", help="compare every block with its checksum", description=text)
    verify.set_defaults(run=run_verify)
    text = "Erase blocks: their records and their bytes."
    forgetting = commands.add_parser("forget", help="erase the blocks of a tenant, or all", description=text)
    who = forgetting.add_mutually_exclusive_group(required=True)
    who.add_argument("--tenant", metavar="NAME", help="the tenant whose blocks are erased")
    who.add_argument("--all", action="store_true", help="erase all blocks")
    forgetting.set_defaults(run=run_forget)
    for command in (listing, verify, forgetting):
        command.add_argument("folder", metavar="DIR", nargs="?", type=_folder, default="", help=FOLDER)


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError(f"DIR is missing: {FOLDER}; for models, see quire models")
    return Path(text)


def run_list(arguments: argparse.Namespace) -> int:
    """Print the stores. Returns the exit status."""
    from quire.compute.worker.store.closed import summaries

    found = summaries(arguments.folder)
    if arguments.json:
        for each in found:
            print(json.dumps(asdict(each)))
        return 0
    rows = [("STORE", "MODEL", "NUMBERS", "SIZE", "BLOCKS", "TENANTS")]
    for each in found:
        blocks = "in use" if each.num_blocks is None else f"{each.num_blocks:,} of {each.block_size} tokens"
        tenants = ", ".join(f"{name or 'everyone'} {count:,}" for name, count in sorted((each.tenants or {}).items()))
        rows.append((each.name, each.model, each.dtype, format_bytes(each.num_bytes), blocks, tenants))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[5]]).rstrip())
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    """Print how many blocks are as written. Returns the exit status: 1 if one is damaged."""
    from quire.compute.worker.store.closed import damaged, opened, summaries

    status = 0
    for each in summaries(arguments.folder):
        with opened(arguments.folder / each.name) as store:
            if store is None:
                print(f"{each.name}  in use; end the engine first")
                continue
            bad = damaged(store)
            print(f"{each.name}  {len(store.kept) - len(bad):,} blocks are as written, {len(bad):,} are damaged")
            status = 1 if bad else status
    return status


def run_forget(arguments: argparse.Namespace) -> int:
    """Erase blocks. Returns the exit status: 1 if a store is in use."""
    from quire.compute.worker.store.closed import forget, opened, summaries

    status = 0
    for each in summaries(arguments.folder):
        with opened(arguments.folder / each.name) as store:
            if store is None:
                print(f"{each.name}  in use; end the engine first")
                status = 1
                continue
            print(f"{each.name}  {forget(store, arguments.tenant):,} blocks erased")
    return status
