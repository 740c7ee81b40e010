"""The scheduler: who runs next."""
