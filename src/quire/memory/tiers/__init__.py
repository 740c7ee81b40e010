"""Tiers: where blocks go when the device is short of room."""
