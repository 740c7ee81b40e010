"""As much of curl as our pages use, for machines without it: `python curl.py [--silent --fail] URL [-d BODY]`."""

from __future__ import annotations

import argparse
import sys
import urllib.error
import urllib.request


def main() -> int:
    """Print the answer to a request; the exit status is that of curl."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-d", dest="body")
    parser.add_argument("--silent", action="store_true")
    parser.add_argument("--fail", action="store_true")
    arguments = parser.parse_args()
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
