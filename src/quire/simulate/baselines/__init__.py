"""Engines of others, as the paper describes them, behind the same executor, ledger and measures as the product."""
