"""Several models in one server: which of them are loaded, and who waits for which."""
