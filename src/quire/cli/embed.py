"""`quire embed`: texts in, vectors out, as lines of JSON or as a file of numpy."""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

from quire.cli.engine_options import add_engine_options, engine_config
from quire.cli.session import chosen_adapter, in_utf8, load, remark, stderr_terminal
from quire.cli.terminal import add_color_option
from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError, InvalidRequestError, ModelError, RequestTooLargeError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `embed`. Mutates `subparsers`."""
    parser = subparsers.add_parser(
        "embed", help="make vectors of texts", description="Make a vector of each text. Texts come from -p or a file."
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", "-p", metavar="TEXT", action="append", help="a text; repeat it for several")
    source.add_argument("--file", metavar="FILE", help="file with a text in each line; -: stdin, which is the default")
    parser.add_argument("--dimensions", type=int, default=0, metavar="N", help="numbers to keep of each vector; 0: all")
    parser.add_argument("--truncate", action="store_true", help="cut the end of texts that are too long for the model")
    parser.add_argument("--out", metavar="FILE.npy", help="write the vectors here, as an array of float32")
    parser.add_argument("--quiet", "-q", action="store_true", help="print only the vectors and errors")
    add_engine_options(parser)
    add_color_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make the vectors. Returns the exit status."""
    config, texts = engine_config(arguments, os.environ), arguments.prompt or _lines(arguments.file)
    _require_pooling(config)
    terminal = stderr_terminal(arguments.color)
    with load(config, None if arguments.quiet else terminal) as llm:
        if not arguments.quiet:
            remark(str(llm.report), terminal)
        dimensions, adapter = arguments.dimensions, chosen_adapter(llm)
        try:
            outputs = llm.embed(
                texts,
                dimensions=dimensions,
                truncate=arguments.truncate,
                adapter=adapter,
                use_tqdm=not arguments.quiet,
            )
        except RequestTooLargeError as error:
            sentence = str(error).removesuffix(".")
            raise error.saying(f"{sentence}. --truncate cuts the end of texts that are too long.") from None
    failed = next((output.error for output in outputs if output.error), "")
    if failed:
        raise ExecutionError(failed)
    vectors = [output.embedding for output in outputs]
    if arguments.out is not None:
        import numpy as np

        with open(arguments.out, "wb") as file:
            np.save(file, np.array(vectors, np.float32))
        return 0
    for text, vector in zip(texts, vectors, strict=True):
        print(json.dumps({"text": text, "embedding": vector}, ensure_ascii=False))
    return 0


def _require_pooling(config: EngineConfig) -> None:
    """Raise, before the weights are loaded, if nothing says how the model makes a vector of a text."""
    from quire.engine.factory import plan_engine

    if config.pooling == "auto" and not plan_engine(config).pooling:
        sentence = f"{config.model} names no pooling, the way to make a vector. Choose one: --pooling last or mean"
        sentence += ", or cls for an encoder"
        raise ModelError(config.model, sentence)


def _lines(file: str | None) -> list[str]:
    """Return the lines of a file that are not empty."""
    is_stdin = file in (None, "-")
    read = sys.stdin.read if is_stdin else partial(Path(str(file)).read_text, encoding="utf-8")
    text = in_utf8(read, "stdin" if is_stdin else str(file))
    found = [line for line in text.splitlines() if line.strip()]
    if not found:
        raise InvalidRequestError("file", file or "stdin", "a file with at least one line of text")
    return found
