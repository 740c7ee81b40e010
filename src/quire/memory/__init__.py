"""The paged KV memory: usable on its own, by any engine. The door is `quire.memory.manager.KVCacheManager`."""
