"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

import msgspec

from quire.serve.schemas.common import ModelFields


class LoadAdapterRequest(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """An adapter to load: its future name, and its folder below `adapter_root`."""

    lora_name: str
    lora_path: str


class UnloadAdapterRequest(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """The name of an adapter to unload."""

    lora_name: str


class AdapterAnswer(msgspec.Struct, frozen=True):
    """The loaded or unloaded adapter; `rank` and `bytes` are 0 after an unload."""

    status: str
    lora_name: str
    rank: int = 0
    bytes: int = 0
