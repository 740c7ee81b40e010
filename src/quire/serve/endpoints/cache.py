"""POST /cache/warm, /cache/export and /cache/import: operators keep prompts and move blocks between servers.

    warm     prompts ──► computed, or loaded ──► written to the disk cache, if there is one
    export   the same with one prompt ──► its blocks, read from the store ──► a bundle
    import   a bundle ──► spool, checked ──► the store of each engine ──► the next request hits it

A bundle has blocks of one prompt in the caller's own scope, and names no tenant: imported blocks belong to the
importing caller. So an operator can neither export another tenant's prompts nor write into another tenant's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Send

from quire.compute.worker.store.closed import meta_of
from quire.compute.worker.store.running import RunningStore
from quire.compute.worker.store.slot_file import DamagedBlockError
from quire.compute.worker.store.spool import Intake, IntakeLimits, Spool
from quire.core.errors import ExecutionError, InvalidRequestError
from quire.core.kept_block import KeptBlock, may_be_kept
from quire.core.request import CacheScope
from quire.engine.commands import Add
from quire.engine.records.stats import EngineStats
from quire.serve.context import RequestContext
from quire.serve.endpoints.line import admitted, fields_of, require_operator, require_ready
from quire.serve.loading.model_set import ModelSet
from quire.serve.management_errors import (
    disk_cache_is_off,
    no_disk_cache,
    prompt_not_kept,
    scope_not_kept,
    stores_elsewhere,
)
from quire.serve.read.bundle import MEDIA_TYPE, read_bundle, require_bundle
from quire.serve.render.answer import json_answer, shown_model
from quire.serve.run.cache_commands import CacheCommands, Kept, engines_of
from quire.serve.run.generation import Generation
from quire.serve.schemas.cache import (
    CacheExportRequest,
    CacheImportAnswer,
    CachePromptFields,
    CacheWarmAnswer,
    CacheWarmRequest,
    WarmPrompt,
)
from quire.serve.services import Services
from quire.serve.sse import LongAnswer, deadline, gone, unless, unless_gone
from quire.serve.translate.cache import cache_request

Fields = TypeVar("Fields", bound=CachePromptFields)


async def warm(request: Request) -> Response:
    """Compute prompts; answer when they are in the cache."""
    _require_access(request)
    fields, services = await fields_of(request, CacheWarmRequest)

    async def work() -> Response:
        generation, before = await _computed(request, fields, services)
        prompts = [each.request for each in generation.prepared]
        block_size = services.model.config.block_size
        kept = await CacheCommands(services.model, request.state.context.request_id).keep(prompts, block_size)
        data = [_warm_prompt(services, index, prompts[index], before[index], each) for index, each in enumerate(kept)]
        return json_answer(CacheWarmAnswer("list", shown_model(fields, generation), data))

    return await unless_gone(request, work, services.config)


def _warm_prompt(services: Services, index: int, prompt: Add, before: int, kept: Kept) -> WarmPrompt:
    stored = None if services.model.config.disk_cache is None else kept.job.num_stored_tokens
    num_tokens = len(prompt.prompt_token_ids)
    return WarmPrompt(index, num_tokens, before, kept.job.num_cached_tokens, stored, kept.replica)


async def _computed(request: Request, fields: Fields, services: Services) -> tuple[Generation, list[int]]:
    """Compute prompts; return them, and how many tokens of each were cached before."""
    generation = await admitted(request, services, partial(cache_request, fields))
    before = [0] * len(generation.prepared)
    async with aclosing(generation.steps()) as all_steps:
        async for steps in all_steps:
            for index, delta in steps:
                before[index] = delta.num_cached_tokens
    return generation, before


async def export(request: Request) -> BundleAnswer:
    """Answer with a prompt's blocks, from the engine that holds it."""
    _require_access(request)
    _require_near(request)
    fields, services = await fields_of(request, CacheExportRequest)
    _require_disk(services, request.state.context.tenant.scope_for(fields.cache_salt))

    async def work() -> Add:
        generation, _ = await _computed(request, fields, services)
        return generation.prepared[0].request

    prompt = await unless_gone(request, work, services.config)
    block_size = services.model.config.block_size
    num_full = len(prompt.prompt_token_ids) // block_size * block_size
    if not num_full:
        found = f"{len(prompt.prompt_token_ids)} tokens"
        raise InvalidRequestError("prompt", found, f"at least {block_size} tokens, one block")

    async def keep() -> Kept:
        job = CacheCommands(services.model, request.state.context.request_id)
        return (await job.keep([prompt], block_size, wants_slots=True))[0]

    kept = await unless_gone(request, keep, services.config)
    if kept.job.num_stored_tokens < num_full:
        _require_on([kept.engine])
        raise prompt_not_kept(kept.job.num_stored_tokens, num_full)
    return BundleAnswer(services, prompt, kept)


class BundleAnswer(LongAnswer):
    """Sends a bundle: reads it off the event loop, piece by piece, as fast as the client reads.

    A bundle that cannot be read to its end breaks off before its announced length.
    """

    def __init__(self, services: Services, prompt: Add, kept: Kept) -> None:
        self._services = services
        self._prompt = prompt
        self._path, self._slots = Path(kept.engine.disk_store), kept.job.slots

    async def write(self, send: Send) -> None:
        """Send the bundle."""
        path, bundles = self._path, self._services.bundles
        async with deadline(self._services.config.request_timeout_s):
            async with bundles.opened(lambda: RunningStore(path)) as store:
                blocks = await bundles.run(lambda: self._chain(store))
                headers = [(b"content-type", MEDIA_TYPE.encode())]
                headers.append((b"content-length", b"%d" % store.bundle_bytes(len(blocks))))
                pieces = store.pieces(blocks)
                piece = await bundles.run(lambda: next(pieces, b""))
                self.has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                while following := await bundles.run(lambda: next(pieces, b"")):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    piece = following
            # The last piece is sent after the turn ends, so a client that has the whole bundle can request another.
            await send({"type": "http.response.body", "body": piece, "more_body": False})

    def _chain(self, store: RunningStore) -> list[KeptBlock]:
        names = self._prompt.names(self._services.model.config.block_size)
        try:
            return store.chain(self._slots, names.tobytes(), self._prompt.scope)
        except DamagedBlockError as error:
            raise prompt_not_kept(0, len(self._prompt.prompt_token_ids)) from error


async def import_(request: Request) -> Response:
    """Import a bundle; answer when its blocks are in the stores of all engines."""
    _require_access(request)
    _require_near(request)
    models = require_ready(request)
    context: RequestContext = request.state.context
    services = models.find(request.query_params.get("model"), context.tenant)
    scope = context.tenant.scope_for(request.query_params.get("cache_salt"))
    _require_disk(services, scope)
    context.stay = await models.stay(services, context.tenant)
    engines = [each.engine for each in engines_of(services.model).values()]
    _require_on(engines)
    bundles = services.bundles
    async with deadline(services.config.request_timeout_s):
        limits = await bundles.run(lambda: _limits(services, engines))
        require_bundle(request, limits)
        async with bundles.opened(lambda: Spool(Path(services.model.config.disk_cache or ""))) as spool:
            intake = Intake(spool, limits)
            await read_bundle(request, services, intake)
            jobs = CacheCommands(services.model, context.request_id)

            async def read(first: int, end: int) -> tuple[KeptBlock, ...]:
                return await bundles.run(lambda: intake.blocks(first, end, scope))

            states = await unless(gone(request.receive), jobs.take(str(spool.path), intake.num_blocks, read))
    known, left_out = min(each.num_known for each in states), max(each.num_left_out for each in states)
    added = intake.num_blocks - known - left_out
    name = request.query_params.get("model") or services.name
    return json_answer(CacheImportAnswer(name, intake.num_blocks, added, known, left_out, len(states)))


def _limits(services: Services, engines: Sequence[EngineStats]) -> IntakeLimits:
    num_slots = min(each.num_disk_slots for each in engines)
    return IntakeLimits(meta_of(Path(engines[0].disk_store)), num_slots, services.model.limits.vocab_size)


def _require_access(request: Request) -> None:
    """Raise `ApiError` if the caller may not use these paths, before the body is read."""
    require_operator(request)
    models: ModelSet = request.app.state.models
    models.require_place(request.state.context.tenant)


def _require_near(request: Request) -> None:
    """Raise `ApiError` if the engines keep their blocks on other machines."""
    models: ModelSet = request.app.state.models
    if models.server.config.is_on_cluster:
        raise stores_elsewhere()


def _require_disk(services: Services, scope: CacheScope) -> None:
    """Raise `ApiError` if the server keeps no blocks on disk, or none of this caller's."""
    if services.model.config.disk_cache is None:
        raise no_disk_cache()
    if not may_be_kept(scope):
        raise scope_not_kept()


def _require_on(engines: Sequence[EngineStats]) -> None:
    if not engines:
        raise ExecutionError("the engine is not running")
    if any(each.disk_is_off for each in engines):
        raise disk_cache_is_off()


CACHE_ROUTES = (
    Route("/cache/warm", warm, methods=["POST"]),
    Route("/cache/export", export, methods=["POST"]),
    Route("/cache/import", import_, methods=["POST"]),
)
