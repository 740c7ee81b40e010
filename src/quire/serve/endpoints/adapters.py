"""Lets operators load and unload adapters while the server runs, only from folders below `adapter_root`."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from quire.core.adapters import LOAD_S
from quire.core.errors import CheckpointError, ExecutionError, InvalidRequestError, TooManyJobsError
from quire.serve.endpoints.line import fields_of, require_operator, require_ready
from quire.serve.loading.model_set import ModelSet
from quire.serve.management_errors import (
    adapter_not_found,
    adapter_not_loaded,
    adapter_refused,
    adapters_are_fixed,
    name_is_used,
    too_many_adapters,
)
from quire.serve.render.answer import json_answer
from quire.serve.schemas.adapters import AdapterAnswer, LoadAdapterRequest, UnloadAdapterRequest


async def load_adapter(request: Request) -> Response:
    """Load an adapter; answer when requests can use it by its name."""
    root = _root(request)
    fields, services = await fields_of(request, LoadAdapterRequest)
    services.gate.require_ready()
    name, model = fields.lora_name, services.model
    models: ModelSet = request.app.state.models
    if models.is_taken(services, name):
        raise name_is_used(name)
    is_used = name in model.adapters
    try:
        facts = await model.load_adapter(name, lambda: str(_below(root, fields.lora_path)))
    except TooManyJobsError as error:
        raise too_many_adapters(LOAD_S) from error
    except CheckpointError as error:
        raise adapter_refused(str(error).replace(str(root.resolve()), ".")) from error
    except InvalidRequestError as error:
        if is_used and error.field == "name":
            raise name_is_used(name) from error
        raise
    except ExecutionError as error:
        raise adapter_not_loaded(str(error)) from error
    return json_answer(AdapterAnswer("loaded", name, facts.rank, facts.num_bytes))


async def unload_adapter(request: Request) -> Response:
    """Remove the name of an adapter; requests that use it continue."""
    _root(request)
    fields, services = await fields_of(request, UnloadAdapterRequest)
    services.gate.require_ready()
    if fields.lora_name not in services.model.adapters:
        raise adapter_not_found(fields.lora_name, tuple(services.model.adapters))
    services.model.unload_adapter(fields.lora_name)
    return json_answer(AdapterAnswer("unloaded", fields.lora_name))


def _root(request: Request) -> Path:
    """Return the folder that adapters are loaded from; raises `ApiError` if the caller may not load any."""
    models: ModelSet = request.app.state.models
    require_operator(request)
    if models.server.config.adapter_root is None:
        raise adapters_are_fixed()
    require_ready(request)
    return Path(models.server.config.adapter_root)


def _below(root: Path, path: str) -> Path:
    """Return a folder or GGUF file below the root; raises for any other path, also if a link leads outside.

    Call it in a thread: a disk may never answer.
    """
    root = root.resolve()
    try:
        folder = (root / path).resolve(strict=True)
        files = [*folder.iterdir()] if folder.is_dir() else [folder]
        inside = folder != root and all(each.resolve().is_relative_to(root) for each in (folder, *files))
        inside = inside and (folder.is_dir() or folder.suffix.lower() == ".gguf")
    except (OSError, ValueError, RuntimeError):
        inside = False
    if not inside:
        raise adapter_refused("lora_path is neither a folder nor a GGUF file below adapter_root")
    return folder
