"""`quire cache`: the blocks of a disk cache. `verify` reads them all, `export` and `import` copy, `forget` erases.

A store that an engine uses is listed, but not opened.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quire.cli.tables import show_table
from quire.core.byte_sizes import format_bytes, parse_bytes
from quire.core.errors import InvalidConfigError
from quire.core.kept_block import num_slots_within

if TYPE_CHECKING:
    from quire.compute.worker.store.slot_file import SlotFile

FOLDER: Final = "the folder given as --disk-cache"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `cache`. Mutates `subparsers`."""
    text = "Manage the KV blocks that --disk-cache keeps."
    parser = subparsers.add_parser(
        "cache", help="list, verify, copy or erase the blocks of a disk cache", description=text
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = commands.add_parser("ls", help="list the stores of a folder", description="List the stores of a folder.")
    listing.add_argument("--json", action="store_true", help="print one JSON object per store and line")
    listing.set_defaults(run=run_list)
    text = "Compare every block with its checksum and, with --recompute, compute some again. Changes nothing."
    verify = commands.add_parser("verify", help="compare every block with its checksum", description=text)
    text = "also recompute N blocks of each store, with the tokens before them, and compare every byte"
    verify.add_argument("--recompute", metavar="N", type=_count, default=0, help=text)
    text = "the model of the store, for --recompute (default: the name that the engine was given)"
    verify.add_argument("--model", metavar="MODEL", help=text)
    verify.set_defaults(run=run_verify)
    text = "Erase blocks: their records and their bytes."
    forgetting = commands.add_parser("forget", help="erase the blocks of a tenant, or all", description=text)
    who = forgetting.add_mutually_exclusive_group(required=True)
    who.add_argument("--tenant", metavar="NAME", help="the tenant whose blocks are erased")
    who.add_argument("--all", action="store_true", help="erase all blocks")
    forgetting.set_defaults(run=run_forget)
    for command in (listing, verify, forgetting):
        command.add_argument("folder", metavar="DIR", nargs="?", type=_folder, default="", help=FOLDER)
    _add_copying(commands)


def _add_copying(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Write the blocks of a store to a new file. It contains their tokens: its readers can read the prompts."
    exporting = commands.add_parser("export", help="write the blocks of a store to a file", description=text)
    exporting.set_defaults(run=run_export)
    text = "Import the blocks of a file into the store of an engine with the same settings. Overwrites no block."
    importing = commands.add_parser("import", help="import the blocks of a file", description=text)
    importing.set_defaults(run=run_import)
    for command in (exporting, importing):
        command.add_argument("folder", metavar="DIR", type=_folder, help=FOLDER)
        command.add_argument("file", metavar="FILE", type=Path, help="the file that holds the blocks")
    exporting.add_argument("--store", metavar="NAME", help="which store, if the folder has several: see quire cache ls")
    exporting.add_argument("--tenant", metavar="NAME", help="only the blocks of this tenant (default: all)")
    size = "size limit of the store, as given to the engine (default: 4GiB)"
    importing.add_argument("--disk-cache-size", metavar="SIZE", default="4GiB", help=size)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


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
    print(show_table(rows, "<"))
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    """Print how many blocks are intact. Returns the exit status: 1 if one is damaged or differs, or is in use."""
    from quire.compute.worker.store.closed import damaged

    def verify(path: Path, store: SlotFile) -> bool:
        bad = damaged(store)
        print(f"{path.name}  blocks: {len(store.kept) - len(bad):,} intact, {len(bad):,} damaged")
        if bad or not (arguments.recompute and store.kept):
            return not bad
        from quire.cli.recompute import recompute

        again = recompute(path, store, arguments.recompute, arguments.model)
        print(f"{path.name}  blocks: {again.num_blocks:,} recomputed, {len(again.differing):,} different")
        return not again.differing

    return _for_each_store(arguments.folder, verify)


def run_forget(arguments: argparse.Namespace) -> int:
    """Erase blocks. Returns the exit status: 1 if a store is in use."""
    from quire.compute.worker.store.closed import forget

    def erase(path: Path, store: SlotFile) -> bool:
        print(f"{path.name}  blocks: {forget(store, arguments.tenant):,} erased")
        return True

    return _for_each_store(arguments.folder, erase)


def _for_each_store(folder: Path, act: Callable[[Path, SlotFile], bool]) -> int:
    """Open each store of a folder, and act on it. Returns the exit status: 1 if one is in use, or `act` says no."""
    from quire.compute.worker.store.closed import opened, summaries

    status = 0
    for each in summaries(folder):
        path = folder / each.name
        with opened(path) as store:
            if store is None:
                print(f"{each.name}  in use; stop the engine first")
            if store is None or not act(path, store):
                status = 1
    return status


def run_export(arguments: argparse.Namespace) -> int:
    """Write the blocks of a store to a file. Returns the exit status: 1 if the store is in use."""
    from quire.compute.worker.store.closed import meta_of, opened
    from quire.compute.worker.store.portable import export_blocks

    path = _chosen_store(arguments.folder, arguments.store)
    with opened(path) as store:
        if store is None:
            print(f"{path.name}  in use; stop the engine first, or use its server: POST /cache/export")
            return 1
        count = export_blocks(store, meta_of(path), arguments.file, arguments.tenant)
        lost = "" if arguments.tenant is not None else f" of {len(store.kept):,}"
        print(f"{path.name}  blocks: {count:,}{lost} written to {arguments.file}")
    return 0


def _chosen_store(folder: Path, name: str | None) -> Path:
    from quire.compute.worker.store.closed import require_folder
    from quire.compute.worker.store.folder import stores_in

    require_folder(folder)
    found = sorted(path.name for path in stores_in(folder))
    if name is None and len(found) != 1:
        allowed = f"a folder with one store, or --store with one of {', '.join(found)}" if found else "one with a store"
        raise InvalidConfigError("DIR", str(folder), allowed)
    if name is None:
        return folder / found[0]
    if name not in found:
        raise InvalidConfigError("--store", name, ", ".join(found) or f"none: {folder} has no store")
    return folder / name


def run_import(arguments: argparse.Namespace) -> int:
    """Import the blocks of a file. Returns the exit status: 1 if the store is in use, or a block is damaged."""
    from quire.compute.worker.store.closed import meta_of, opened, require_folder
    from quire.compute.worker.store.folder import is_store
    from quire.compute.worker.store.portable import import_blocks, opened_file

    require_folder(arguments.folder)
    with opened_file(arguments.file) as source:
        path = arguments.folder / source.store_name
        if not is_store(path):
            allowed = f"a store of {arguments.folder}: start the engine once, with the model and settings of the file"
            raise InvalidConfigError("the store that FILE is for", path.name, allowed)
        with opened(path) as store:
            if store is None:
                print(f"{path.name}  in use; stop the engine first, or use its server: POST /cache/import")
                return 1
            meta, budget = meta_of(path), parse_bytes(arguments.disk_cache_size, "--disk-cache-size")
            slots = num_slots_within(budget, meta["block_bytes"], meta["block_size"])
            taken = import_blocks(source, store, meta, slots)
    print(
        f"{path.name}  blocks: {taken.added:,} imported, {taken.known:,} already in the store, "
        f"{taken.damaged:,} damaged, {taken.left_out:,} did not fit"
    )
    return 1 if taken.damaged else 0
