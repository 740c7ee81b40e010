"""`quire models`: the models on this machine, and whether each runs and fits; `pull` fetches one, `rm` removes one.

A broken model is listed with its problem. Stores of other programs are read and never written: `rm` removes models from
the hub cache only, through huggingface_hub.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quire.cli.tables import show_table
from quire.core.byte_sizes import format_bytes
from quire.core.clock import Clock, SystemClock
from quire.core.errors import InvalidConfigError, ModelError, shortened
from quire.core.model_files import path_of

if TYPE_CHECKING:
    from quire.compute.models.inventory import StoredModel
    from quire.compute.models.source import ModelSource

MAX_LOOKING_S: Final = 20.0
"""After this time, models are listed by name only: a header can take seconds, a store can have hundreds of models."""

PULLED: Final = "quire pulls ORG/REPO, such as Qwen/Qwen3-0.6B, or ORG/REPO:TYPE for a GGUF file"
UNREAD: Final = "not read: reading earlier models took too long"


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A row of the list. `runs`, `fits`: None if unknown; `reason`: why not, or for what use only."""

    name: str
    store: str
    path: str
    num_bytes: int
    family: str = ""
    type: str = ""
    memory_bytes: int | None = None
    runs: bool | None = None
    fits: bool | None = None
    reason: str = ""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `models`. Mutates `subparsers`."""
    parser = subparsers.add_parser(
        "models",
        help="list the models on this machine, fetch one, remove one",
        description="List the models on this machine: those in Ollama, LM Studio, the hub cache and packages.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per model and line")
    parser.set_defaults(run=run)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    pull = commands.add_parser("pull", help="fetch a model from the hub", description="Fetch a model from the hub.")
    pull.add_argument("model", metavar="NAME", help="ORG/REPO, or ORG/REPO:TYPE for a GGUF file; may end in @REVISION")
    pull.set_defaults(run=run_pull)
    text = "Remove a model from the hub cache. Models of other programs are never removed."
    remove = commands.add_parser("rm", help="remove a fetched model", description=text)
    remove.add_argument("model", metavar="NAME", help="ORG/REPO, with all its revisions, or ORG/REPO@REVISION")
    remove.add_argument("--yes", "-y", action="store_true", help="do not ask for confirmation")
    remove.set_defaults(run=run_remove)


def run(arguments: argparse.Namespace) -> int:
    """Print the list. Returns the exit status."""
    from quire.compute.models.inventory import unreadable_stores

    listed = list_models(Path.home(), os.environ, SystemClock())
    for note in unreadable_stores(Path.home(), os.environ):
        print(f"note: {note}", file=sys.stderr)
    if arguments.json:
        for model in listed:
            print(json.dumps(asdict(model)))
        return 0
    rows = [("NAME", "FAMILY", "SIZE", "TYPE", "STORE", "RUNS HERE"), *map(_row, listed)]
    print(show_table(rows, "<"))
    return 0


def list_models(home: Path, environ: Mapping[str, str], clock: Clock) -> list[ListedModel]:
    """Return a row for each model on this machine. Does not mutate."""
    from quire.compute.models.inventory import StoredModel, stored_models
    from quire.compute.models.source import ModelFolder
    from quire.guide import GUIDE_FOLDER

    weights = GUIDE_FOLDER / "model.safetensors"
    guide = StoredModel("guide", "quire", weights.stat().st_size, ModelFolder(GUIDE_FOLDER))
    return list(_listed(chain([guide], stored_models(home, environ)), clock))


def _listed(models: Iterable[StoredModel], clock: Clock) -> Iterator[ListedModel]:
    end = clock.now() + MAX_LOOKING_S
    for model in models:
        path = "" if model.source is None else model.source.name
        row = ListedModel(model.name, model.store, path, model.num_bytes)
        if model.source is None:
            yield replace(row, runs=False, reason=model.problem)
        else:
            yield _described(row, model.source) if clock.now() < end else replace(row, reason=UNREAD)


def _described(row: ListedModel, source: ModelSource) -> ListedModel:
    """Return the row, completed from the model's settings and the headers of its weights."""
    from quire.compute.choice import choose_backend
    from quire.compute.models import read_model
    from quire.compute.models.image_encoders import with_images
    from quire.compute.weights.decoder_weights import WeightReader
    from quire.core.config import EngineConfig
    from quire.engine.memory_plan import plan_memory

    try:
        source = with_images(source)
        model = read_model(source)
        row = replace(row, family=model.architecture.partition("For")[0], type=model.weight_type)
        WeightReader(model.spec, source.tensors(), "float32", "auto")
        backend, _ = choose_backend(EngineConfig(), model)
        needs = backend.needs()
    # The files are untrusted: an error of one model must not hide the others.
    except Exception as error:
        return replace(row, runs=False, reason=_without_path(str(error), source))
    memory_bytes = needs.weight_bytes + needs.activation_bytes
    images = "" if model.vision is None else "reads images"
    use = images if model.generates else "for vectors or scores only"
    row = replace(row, memory_bytes=memory_bytes, runs=True, fits=True, reason=use)
    try:
        plan_memory(backend.facts.config, backend.facts.kv_spec, model.spec.context_length, needs)
    except InvalidConfigError:
        free = "unknown" if needs.free_bytes is None else format_bytes(needs.free_bytes)
        return replace(row, fits=False, reason=f"takes {format_bytes(memory_bytes)} and KV memory, {free} is free")
    return row


def _without_path(text: str, source: ModelSource) -> str:
    for path in (source.where("config.json"), source.name):
        text = text.removeprefix(f"{path}: ").replace(f"{path} is incomplete", "incomplete")
    return text


def _row(model: ListedModel) -> tuple[str, ...]:
    reason = shortened(model.reason.partition(". ")[0])
    runs = f"yes, {reason}" if reason else "yes"
    verdict = runs if model.fits else f"no: {reason}" if model.fits is False or model.runs is False else reason
    return model.name, model.family or "-", format_bytes(model.num_bytes), model.type or "-", model.store, verdict


def run_pull(arguments: argparse.Namespace) -> int:
    """Fetch a model, once its settings show that it runs here. Returns the exit status."""
    from quire.compute.models import read_model
    from quire.compute.models.hub import HubName, fetch_model, fetch_settings, find_kept, resolve_model
    from quire.compute.models.packaged import PACKAGES

    name = arguments.model
    is_path = path_of(name).exists()
    model = None if is_path else HubName.parse(name)
    if model is None and not is_path and name not in PACKAGES and find_kept(name) is None:
        raise ModelError(name, f'"{name}" is no model of the Hugging Face hub. {PULLED}')
    if model is not None and not model.kind:
        settings = fetch_settings(model)
        if settings.has("config.json"):
            read_model(settings)
    source = resolve_model(name) if model is None else fetch_model(model)
    read_model(source)
    source.tensors()
    print(f"{name} is in {source.name}\nTo talk to it: quire chat {name}")
    return 0


def run_remove(arguments: argparse.Namespace) -> int:
    """Remove a model from the hub cache, after confirmation. Returns the exit status."""
    from quire.compute.models.hub_cache import find_removal

    removal = find_removal(arguments.model, Path.home(), os.environ)
    print(f"{removal.num_files} files of {removal.repository}, {format_bytes(removal.num_bytes)}, in {removal.folder}")
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise ModelError(arguments.model, "Nothing was removed: no terminal to ask on. Give --yes")
        if input("Remove them? [y/N] ").strip().lower() not in ("y", "yes"):
            print("Nothing was removed.")
            return 1
    removal.execute()
    print("Removed.")
    return 0
