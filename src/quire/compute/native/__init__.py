"""The CPU engine: thin Python over the compiled core, numpy only."""

from quire.compute.native.load import NativeSettings, activation_bytes, kv_cache_spec, load_parts

__all__ = ["NativeSettings", "activation_bytes", "kv_cache_spec", "load_parts"]
