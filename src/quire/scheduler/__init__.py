"""The scheduler: decides which requests run next."""
