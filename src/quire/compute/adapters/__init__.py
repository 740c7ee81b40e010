"""LoRA adapters: small changes to a model's matrices, checked before any is loaded.

    folder of PEFT ──► settings.py: rank, scale ──► folder.py: Adapter, checked against the spec ──► an engine packs it
    requests       ──► CacheScope.adapter, its digest ──► rows.py: the adapter of each sequence of a step

A matrix W is never changed: rows of an adapter get B (scale * (A x)) in addition to W x. So one step can compute
requests with different adapters and with none, and a base of any weight type can have adapters.
"""
