"""The CPU engine: thin Python over the compiled core, numpy only."""

from quire.compute.native.load import NativeSettings, activation_bytes, kv_cache_spec, load_worker

__all__ = ["NativeSettings", "activation_bytes", "kv_cache_spec", "load_worker"]
