"""POST /cache/warm, /cache/export and /cache/import: for operators, who keep prompts and take blocks elsewhere.

    warm     prompts ──► computed, or loaded ──► written to the disk, if there is one
    export   the same with one prompt ──► its blocks, read from the store ──► a bundle
    import   a bundle ──► spool, checked ──► the store ──► the next request hits it

A bundle has blocks of one prompt in the caller's own scope, and names no tenant: they become those of the caller who
takes them in. So an operator exports the prompts of no other tenant, and writes into the cache of none.
"""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quire.compute.worker.store.closed import meta_of
from quire.compute.worker.store.running import RunningStore
from quire.compute.worker.store.slot_file import DamagedBlockError
from quire.compute.worker.store.spool import Intake, IntakeLimits, Spool
from quire.core.errors import InvalidRequestError
from quire.core.kept_block import CacheJob, KeptBlock, may_be_kept
from quire.core.request import CacheScope
from quire.engine.commands import Add
from quire.serve.bundles import Bundles
from quire.serve.context import RequestContext
from quire.serve.endpoints.line import admitted, fields_of, require_ready
from quire.serve.errors import (
    disk_cache_is_off,
    no_disk_cache,
    operator_required,
    prompt_not_kept,
    scope_not_kept,
    several_engines,
)
from quire.serve.loading.model_set import ModelSet
from quire.serve.read.bundle import MEDIA_TYPE, read_bundle, require_bundle
from quire.serve.render.answer import json_answer, shown_model
from quire.serve.run.cache_jobs import CacheJobs
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
from quire.serve.sse import deadline, gone, unless, unless_gone
from quire.serve.translate.cache import cache_request

Fields = TypeVar("Fields", bound=CachePromptFields)


async def warm(request: Request) -> Response:
    """Answer when the prompts are in the cache."""
    _require_access(request)
    fields, services = await fields_of(request, CacheWarmRequest)

    async def work() -> Response:
        generation, before = await _computed(request, fields, services)
        prompts = [each.request for each in generation.prepared]
        jobs = await CacheJobs(services.model, request.state.context.request_id).keep(prompts)
        data = [_warm_prompt(services, index, prompts[index], before[index], job) for index, job in enumerate(jobs)]
        return json_answer(CacheWarmAnswer("list", shown_model(fields, generation), data))

    return await unless_gone(request, work, services.config)


def _warm_prompt(services: Services, index: int, prompt: Add, before: int, job: CacheJob) -> WarmPrompt:
    stored = None if services.model.config.disk_cache is None else job.num_stored_tokens
    return WarmPrompt(index, len(prompt.prompt_token_ids), before, job.num_cached_tokens, stored)


async def _computed(request: Request, fields: Fields, services: Services) -> tuple[Generation, list[int]]:
    """Have prompts computed; return them, and how many tokens of each were cached before."""
    generation = await admitted(request, services, partial(cache_request, fields))
    before = [0] * len(generation.prepared)
    async with aclosing(generation.steps()) as all_steps:
        async for steps in all_steps:
            for index, delta in steps:
                before[index] = delta.num_cached_tokens
    return generation, before


async def export(request: Request) -> BundleAnswer:
    """Answer with the blocks of a prompt."""
    _require_access(request)
    fields, services = await fields_of(request, CacheExportRequest)
    _require_disk(services, request.state.context.tenant.scope_for(fields.cache_salt))
    bundles = services.bundles

    async def work() -> Add:
        generation, _ = await _computed(request, fields, services)
        return generation.prepared[0].request

    prompt = await unless_gone(request, work, services.config)
    num_full = len(prompt.prompt_token_ids) // services.model.config.block_size * services.model.config.block_size
    if not num_full:
        found = f"{len(prompt.prompt_token_ids)} tokens"
        raise InvalidRequestError("prompt", found, f"one of at least {services.model.config.block_size}: a block")

    async def keep() -> CacheJob:
        job = CacheJobs(services.model, request.state.context.request_id)
        return (await job.keep([prompt], wants_slots=True))[0]

    state = await unless_gone(request, keep, services.config)
    if state.num_stored_tokens < num_full:
        _require_on(services)
        raise prompt_not_kept(state.num_stored_tokens, num_full)
    return BundleAnswer(services, bundles, prompt, state.slots)


class BundleAnswer:
    """A bundle on its way: read off the event loop, one piece at a time, as the client takes them."""

    def __init__(self, services: Services, bundles: Bundles, prompt: Add, slots: tuple[int, ...]) -> None:
        self._services = services
        self._bundles = bundles
        self._prompt = prompt
        self._slots = slots
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; a bundle that cannot be read to its end breaks off, short of the length that was announced."""
        try:
            await unless(gone(receive), self._write(send))
        except ClientDisconnect:
            if not self._has_begun:
                raise

    async def _write(self, send: Send) -> None:
        path = Path(self._services.model.stats().disk_store)
        run = self._bundles.run
        limit_s = self._services.config.request_timeout_s
        async with deadline(limit_s), self._bundles.opened(lambda: RunningStore(path)) as store:
            blocks = await run(lambda: self._chain(store))
            headers = [(b"content-type", MEDIA_TYPE.encode())]
            headers.append((b"content-length", b"%d" % store.bundle_bytes(len(blocks))))
            pieces = store.pieces(blocks)
            piece = await run(lambda: next(pieces, b""))
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await run(lambda: next(pieces, b""))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _chain(self, store: RunningStore) -> list[KeptBlock]:
        try:
            return store.chain(self._slots, self._prompt.prompt_token_ids.tobytes(), self._prompt.scope)
        except DamagedBlockError as error:
            raise prompt_not_kept(0, len(self._prompt.prompt_token_ids)) from error


async def import_(request: Request) -> Response:
    """Answer when the blocks of a bundle are in the store."""
    _require_access(request)
    models, context = require_ready(request), _context(request)
    services = models.find(request.query_params.get("model"), context.tenant)
    scope = context.tenant.scope_for(request.query_params.get("cache_salt"))
    _require_disk(services, scope)
    context.stay = await models.stay(services, context.tenant)
    _require_on(services)
    bundles = services.bundles
    async with deadline(services.config.request_timeout_s):
        limits = await bundles.run(lambda: _limits(services))
        require_bundle(request, limits)
        async with bundles.opened(lambda: Spool(Path(services.model.config.disk_cache or ""))) as spool:
            intake = Intake(spool, limits)
            await read_bundle(request, services, intake, bundles)
            jobs = CacheJobs(services.model, context.request_id)
            state = await unless(gone(request.receive), jobs.take(intake, scope, bundles))
    added = intake.num_blocks - state.num_known - state.num_left_out
    name = request.query_params.get("model") or services.name
    return json_answer(CacheImportAnswer(name, intake.num_blocks, added, state.num_known, state.num_left_out))


def _limits(services: Services) -> IntakeLimits:
    stats, vocab_size = services.model.stats(), services.model.limits.vocab_size
    return IntakeLimits(meta_of(Path(stats.disk_store)), stats.num_disk_slots, vocab_size)


def _context(request: Request) -> RequestContext:
    context: RequestContext = request.state.context
    return context


def _require_access(request: Request) -> None:
    """Raise the answer to who may not ask, and of a server whose engines have a cache each; before a body is read."""
    models: ModelSet = request.app.state.models
    tenant = _context(request).tenant
    if not tenant.is_operator:
        raise operator_required(request.url.path)
    models.require_place(tenant)
    if models.server.config.num_replicas > 1:
        raise several_engines()


def _require_disk(services: Services, scope: CacheScope) -> None:
    """Raise the answer of a server that keeps no blocks on disk, or none of this caller."""
    if services.model.config.disk_cache is None:
        raise no_disk_cache()
    if not may_be_kept(scope):
        raise scope_not_kept()


def _require_on(services: Services) -> None:
    if services.model.stats().disk_is_off:
        raise disk_cache_is_off()


CACHE_ROUTES = (
    Route("/cache/warm", warm, methods=["POST"]),
    Route("/cache/export", export, methods=["POST"]),
    Route("/cache/import", import_, methods=["POST"]),
)
