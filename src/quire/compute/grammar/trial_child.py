"""The process that tries grammars: a line of JSON in, two lines of JSON out; see `trial`.

It ends by a CPU timer (`SIGPROF`), a stack overflow, its memory limit, or the end of its input.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

from quire.compute.grammar.compilation import compile_grammar
from quire.compute.grammar.limits import GrammarLimits, limit_memory
from quire.compute.grammar.trial import STACK_BYTES
from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar


class ByteTokens:
    """A vocabulary of single bytes and the special tokens of a model, in llguidance's form."""

    is_tokenizer_wrapper = True

    def __init__(self, vocab_size: int, special_tokens: Mapping[int, str], eos_token_id: int) -> None:
        free = [token for token in range(vocab_size) if token not in special_tokens][:256]
        self.eos_token_id = eos_token_id
        self.bos_token_id: int | None = None
        self.special_token_ids = list(special_tokens)
        self.tokens = [b""] * vocab_size
        for token, text in special_tokens.items():
            self.tokens[token] = text.encode()
        for byte, token in enumerate(free):
            self.tokens[token] = bytes([byte])
        self._ids = free

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return [self._ids[byte] for byte in text.encode() if byte < len(self._ids)]


def serve() -> None:
    """Try one grammar after another until the input ends."""
    from llguidance import LLTokenizer

    settings = json.loads(sys.stdin.readline())
    special = {int(token): text for token, text in settings["special_tokens"].items()}
    eos_token_ids = settings["eos_token_ids"]
    tokens: Any = ByteTokens(settings["vocab_size"], special, eos_token_ids[0])
    tokenizer = LLTokenizer(tokens, eos_token=eos_token_ids)
    limits = GrammarLimits(**settings["limits"])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        grammar = Grammar(**json.loads(line))
        print(json.dumps("begun"), flush=True)
        signal.setitimer(signal.ITIMER_PROF, settings["budget_s"])
        try:
            compile_grammar(tokenizer, grammar, limits)
            reason = ""
        except InvalidRequestError as error:
            reason = error.allowed
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reason), flush=True)


def main() -> None:
    """Serve in a thread with a small stack: a grammar that fits there fits everywhere."""
    limit_memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
