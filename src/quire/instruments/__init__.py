"""Instruments: what measures quire and what tries to break it. Nothing that serves imports them."""
