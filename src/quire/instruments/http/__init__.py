"""HTTP clients for `quire bench serve` and `quire torture`.

plain.py            one request at a time, blocking
connection.py       many streams at once, in an event loop, cheap enough for measurements
events.py           server-sent events, from pieces of any size
server_process.py   a `quire serve` process, from its start to its end
"""
