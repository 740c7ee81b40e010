"""As much of curl as our pages use, for machines without it: `python curl.py [-sf --retry N] URL [-d BODY]`."""

from __future__ import annotations

import argparse
import sys
import time
import urllib.error
import urllib.request


def main() -> int:
    """Print the answer to a request; the exit status is that of curl."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-d", dest="body")
    parser.add_argument("-s", "--silent", action="store_true")
    parser.add_argument("-f", "--fail", action="store_true")
    parser.add_argument("--retry", type=int, default=0)
    parser.add_argument("--retry-delay", type=float, default=1.0)
    parser.add_argument("--retry-connrefused", action="store_true")
    arguments = parser.parse_args()
    for _ in range(arguments.retry):
        status = fetch(arguments)
        if status == 0:
            return status
        time.sleep(arguments.retry_delay)
    return fetch(arguments)


def fetch(arguments: argparse.Namespace) -> int:
    """Print the answer to one request; return curl's status."""
    body = None if arguments.body is None else arguments.body.encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(arguments.url, body), timeout=600) as answer:
            sys.stdout.write(answer.read().decode())
    except urllib.error.HTTPError as error:
        if arguments.fail:
            return 22
        sys.stdout.write(error.read().decode())
    except OSError:
        return 7
    return 0


if __name__ == "__main__":
    sys.exit(main())
