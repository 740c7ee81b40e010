"""Images of a prompt: from the bytes that a client sends to tokens and pixels.

    messages ──► parts.py      takes the images out of a conversation; the template writes a marker for each
    bytes    ──► decoding.py   a file of a known format, within limits, to red, green and blue
    image    ──► a layout      resized and cut into tiles as the model's makers do; the tokens in place of the marker
                 reader.py     joins the three
                 ahead.py      has them encoded in an engine, before their request starts

Nothing here fetches anything: an image comes with the request, or, from Python, from a file.
"""
