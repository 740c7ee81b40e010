"""Runs in a separate process: many clients send requests as fast as they can, until the input ends.

    python -m quire.instruments.torture.flood http://127.0.0.1:8000 KEY 400 < BODIES

The first line of the input is a JSON list of bodies; each client takes one and sends it over and over. A client that is
refused retries after a quarter of a second, and ignores Retry-After. At the end, one line of JSON counts the answers by
status.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter

from quire.instruments.http.connection import HTTP_OK, HttpClient

AGAIN_S = 0.25


async def flood(url: str, key: str, num_clients: int, bodies: list[dict[str, object]]) -> Counter[int]:
    """Send requests until the input ends; return the number of answers by status, 0 for broken connections."""
    client = HttpClient(url, headers={"Authorization": f"Bearer {key}"})
    requests = [client.post_request("/v1/completions", json.dumps(body).encode()) for body in bodies]
    counts: Counter[int] = Counter()

    async def ask_on(request: bytes) -> None:
        while True:
            try:
                status = (await client.exchange(request)).status
            except OSError:
                status = 0
            counts[status] += 1
            if status != HTTP_OK:
                await asyncio.sleep(AGAIN_S)

    tasks = [asyncio.create_task(ask_on(requests[index % len(requests)])) for index in range(num_clients)]
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return counts


def main(url: str, key: str, num_clients: str) -> None:
    """Read the bodies, flood the server, print the counts."""
    counts = asyncio.run(flood(url, key, int(num_clients), json.loads(sys.stdin.readline())))
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
