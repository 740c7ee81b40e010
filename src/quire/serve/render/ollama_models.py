"""Descriptions of models for Ollama's API, in lists and for one name, taken from the start-up tables."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from quire.core.sampling_params import PARAMETERS, SamplingParams
from quire.engine.text.infill import infill_format
from quire.serve.loading.model_set import ModelSet, names_for
from quire.serve.model import ServedModel
from quire.serve.model_names import LATEST
from quire.serve.reasoning import create_reasoning_format
from quire.serve.schemas.ollama import (
    OPTION_NAMES,
    ListedModel,
    ListedModels,
    LoadedModel,
    LoadedModels,
    ModelDetails,
    OllamaAnswer,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateAnswer,
    OllamaMessage,
    ShownModel,
)
from quire.serve.services import Services
from quire.serve.tenants import Tenant
from quire.serve.tools import create_tool_format

STAYS: Final = timedelta(days=36_500)
"""The time reported for a model that is never unloaded."""


def listed_models(models: Sequence[Services], tenant: Tenant) -> ListedModels:
    """Return all models that a tenant may call, under all their names. Does not mutate."""
    return ListedModels([listed for services in models for listed in _listed(services, tenant)])


def _listed(services: Services, tenant: Tenant) -> Iterator[ListedModel]:
    size, digest, details = services.model.report.plan.needs.weight_bytes, _digest(services), _details(services)
    for name in _names(services, tenant):
        yield ListedModel(
            name=name, model=name, modified_at=_began(services), size=size, digest=digest, details=details
        )


def loaded_models(models: ModelSet, tenant: Tenant) -> LoadedModels:
    """Return the loaded models, under all their names, with their memory. Does not mutate."""
    now = datetime.now(UTC)
    return LoadedModels(
        [
            loaded
            for services in models.loaded
            for loaded in _loaded(services, tenant, models.residency.expires_in_s(services.name), now)
        ]
    )


def _loaded(services: Services, tenant: Tenant, expires_in_s: float, now: datetime) -> Iterator[LoadedModel]:
    plan = services.model.report.plan
    is_on_host = plan.needs.host_bytes is None
    expires_at = _began(services) + STAYS if math.isinf(expires_in_s) else now + timedelta(seconds=expires_in_s)
    for name in _names(services, tenant):
        yield LoadedModel(
            name=name,
            model=name,
            size=plan.total_bytes,
            digest=_digest(services),
            details=_details(services),
            expires_at=expires_at,
            size_vram=0 if is_on_host else plan.total_bytes,
            context_length=plan.max_model_len,
        )


def unloaded_model(fields: OllamaFields, services: Services) -> OllamaAnswer:
    """Return the answer to a request that unloads a model. Does not mutate."""
    common: dict[str, Any] = {
        "model": fields.model or services.name,
        "created_at": datetime.now(UTC),
        "done": True,
        "done_reason": "unload",
    }
    if isinstance(fields, OllamaChatRequest):
        return OllamaChatAnswer(**common, message=OllamaMessage("assistant", ""))
    return OllamaGenerateAnswer(**common, response="")


def shown_model(services: Services, model: ServedModel, name: str | None) -> ShownModel:
    """Return the details of `model`: the services' own, or a second object without an engine. Does not mutate."""
    report, tokenizer, config = model.report, model.tokenizer, services.config
    template, details = "" if tokenizer is None else tokenizer.template_source(), _details(services)
    with_tools = "" if tokenizer is None else tokenizer.template_source(with_tools=True)
    capabilities = {
        "completion": not model.config.one_step,
        "embedding": model.config.one_step or model.config.pooling != "auto",
        "vision": report.reads_images,
        "insert": tokenizer is not None and infill_format(tokenizer) is not None,
        "tools": create_tool_format(config.tool_format, with_tools) is not None,
        "thinking": create_reasoning_format(config.reasoning_format, template) is not None,
    }
    return ShownModel(
        modelfile=f"# served by quire\nFROM {name or services.model_names[0]}\n",
        parameters="\n".join(_parameters(model.get_default_sampling_params())),
        template=template,
        details=details,
        model_info={
            "general.architecture": details.family,
            "general.parameter_count": report.num_parameters,
            f"{details.family}.block_count": report.num_layers,
            f"{details.family}.context_length": report.plan.max_model_len,
        },
        capabilities=[name for name, has_it in capabilities.items() if has_it],
        modified_at=_began(services),
    )


def _names(services: Services, tenant: Tenant) -> list[str]:
    """Return the names in Ollama's form: with a tag."""
    names = names_for(services, tenant)
    return [name if ":" in name.rpartition("/")[2] else f"{name}{LATEST}" for name in names]


def _began(services: Services) -> datetime:
    return datetime.fromtimestamp(services.created_s, UTC)


def _digest(services: Services) -> str:
    """Return an id of the model in the form of a file's digest, which no file has."""
    report = services.model.report
    facts = (report.model, report.architecture, report.weight_type, report.num_parameters)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _details(services: Services) -> ModelDetails:
    report = services.model.report
    family = report.architecture.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model").lower()
    return ModelDetails(
        format=report.file_format,
        family=family,
        families=[family],
        parameter_size=parameter_size(report.num_parameters),
        quantization_level=report.weight_type,
    )


def parameter_size(count: int) -> str:
    """Return a number of parameters in Ollama's form.

    >>> parameter_size(134_515_008), parameter_size(8_030_261_248)
    ('134.52M', '8.0B')
    """
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _parameters(sampling: SamplingParams) -> Iterable[str]:
    """Yield the defaults that the model's makers chose, one per line."""
    for ours, theirs in OPTION_NAMES.items():
        value = getattr(sampling, ours)
        if value != PARAMETERS[ours].default:
            for each in value if isinstance(value, tuple) else (value,):
                yield f"{theirs} {json.dumps(each)}"
