"""Tiers: the host and the disk, which hold blocks when the device is short of room."""
