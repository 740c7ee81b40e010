"""HTTP as a client speaks it: what `quire bench serve` and `quire torture` ask a server with.

plain.py            one question, one answer; it blocks
connection.py       many streams at once, in an event loop, at a cost that a measurement can bear
events.py           server-sent events out of pieces that were cut anywhere
server_process.py   a `quire serve` of our own, from its start to its end
"""
