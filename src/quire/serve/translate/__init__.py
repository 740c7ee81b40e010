"""Translate: turns a request's fields into a `GenerationRequest`. No other code knows both HTTP and engine names."""
