"""LoRA adapters: small changes to a model's matrices, checked before any is loaded.

    folder of PEFT ──► settings.py: rank, scale ──► folder.py: Adapter, checked against the spec ──► an engine packs it
    requests       ──► CacheScope.adapter, its digest ──► rows.py: which sequence of a step has which adapter

A matrix W is never changed: rows of an adapter get B (scale * (A x)) in addition to W x. So requests with many
adapters, and with none, are computed in one step, and a base of any weight type can have adapters.
"""
