"""Read: the bytes of a body, within its limits, and the budget that all bodies share."""
