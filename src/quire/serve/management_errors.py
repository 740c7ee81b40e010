"""The answers to requests that manage adapters and the disk cache, if they fail."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.errors import shortened
from quire.serve.errors import NO_RETRY, RESTART_S, ApiError, retry_after

# ---- adapters -------------------------------------------------------------------------------------------------------


def adapters_are_fixed() -> ApiError:
    """Return the answer to a request to load adapters where that is not allowed."""
    message = "this server serves the adapters that it was started with; start it with --adapter-root to load others"
    return ApiError(403, message, code="adapters_are_fixed")


def adapter_refused(message: str) -> ApiError:
    """Return the answer to an adapter that cannot be loaded, with the reason."""
    return ApiError(400, message, code="invalid_value", param="lora_path")


def adapter_not_found(name: str, served: Sequence[str]) -> ApiError:
    """Return the answer to the name of an adapter that is not loaded."""
    others = f"loaded are {', '.join(map(repr, served))}" if served else "no adapter is loaded"
    message = f"adapter {shortened(name)!r} not found; {others}"
    return ApiError(404, message, code="adapter_not_found", param="lora_name")


def name_is_used(name: str) -> ApiError:
    """Return the answer to an adapter whose name is taken."""
    message = f"the name {shortened(name)!r} is used for something else; unload that first, or choose another name"
    return ApiError(409, message, code="name_is_used", param="lora_name", headers=NO_RETRY)


def adapter_not_loaded(message: str) -> ApiError:
    """Return the answer if the engine could not load a valid adapter."""
    return ApiError(500, message, code="adapter_not_loaded", headers=NO_RETRY)


def too_many_adapters(retry_after_s: float) -> ApiError:
    """Return the answer to an adapter while many others wait to be read."""
    message = "many adapters wait to be read, one after another; if this does not end, their disk does not answer"
    return ApiError(503, message, code="too_many_adapters", headers=retry_after(retry_after_s))


# ---- the disk cache -------------------------------------------------------------------------------------------------


def no_disk_cache() -> ApiError:
    """Return the answer to a request to move blocks on a server without a disk cache."""
    message = "this server keeps no blocks on disk; start it with --disk-cache FOLDER"
    return ApiError(404, message, code="no_disk_cache")


def stores_elsewhere() -> ApiError:
    """Return the answer to a request to move blocks of engines on other machines."""
    message = "the engines keep blocks on other machines; use quire cache export and import there"
    return ApiError(400, message, code="stores_elsewhere")


def scope_not_kept() -> ApiError:
    """Return the answer to a key whose prompts must not be written to disk."""
    message = "prompts of this API key are not written to the disk; set persist: true for it in the keys file"
    return ApiError(403, message, code="not_persistent")


def bundle_under_way() -> ApiError:
    """Return the answer to a bundle while another is imported or exported."""
    message = "another bundle is being exported or imported; try again when it is done"
    return ApiError(429, message, code="slow_down", headers=retry_after(RESTART_S))


def prompt_not_kept(found: int, wanted: int) -> ApiError:
    """Return the answer if only a part of a prompt could be written to disk."""
    message = (
        f"only {found:,} of {wanted:,} tokens could be written to disk: the cache is too small, or other prompts "
        "need it; try again later, or raise --disk-cache-size"
    )
    return ApiError(503, message, code="prompt_not_kept", headers=retry_after(RESTART_S))


def disk_cache_fails(reason: str) -> ApiError:
    """Return the answer if the folder of the disk cache cannot be read or written."""
    message = f"the folder of the disk cache cannot be used: {reason}; free space in it, or restart the server"
    return ApiError(500, message, code="disk_cache_fails", headers=NO_RETRY)


def disk_cache_is_off() -> ApiError:
    """Return the answer after the disk has failed too often."""
    message = "the disk cache is off because the disk failed; see the server's log, and restart the server"
    return ApiError(500, message, code="disk_cache_is_off", headers=NO_RETRY)
