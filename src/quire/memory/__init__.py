"""The paged KV memory, usable on its own by any engine. Its interface is `quire.memory.manager.KVCacheManager`."""
