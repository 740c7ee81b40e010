"""Instruments: code that measures quire or tries to break it. The serving code does not import them."""
