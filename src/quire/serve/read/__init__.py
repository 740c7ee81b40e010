"""Read: the bytes of a body, within their limits, and the budget that all bodies share."""
