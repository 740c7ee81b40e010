"""Translate: the fields of a request become a `GenerationRequest`. Nothing else knows both HTTP and engine names."""
