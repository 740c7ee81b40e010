"""`quire serve`: the server, for clients of OpenAI, Anthropic and Ollama.

    settings ──► the engine's process starts, and imports what engines need ──► builds the engine ──► ready
                 meanwhile this process imports the server, plans, listens ──┘

stdout shows the start-up table, the address as soon as the server listens, and a line when the model is loaded. Logs
are written to stderr.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.cli import DONE, INTERRUPTED
from quire.cli.server_options import ServeSettings, add_serve_options, serve_settings

if TYPE_CHECKING:
    from quire.engine.process.waiting_host import WaitingHost


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `serve`. Mutates `subparsers`."""
    parser = subparsers.add_parser(
        "serve",
        help="serve models over HTTP, to clients of OpenAI, Anthropic and Ollama",
        description="Serve models over HTTP, to clients of OpenAI, Anthropic and Ollama. One model is\n"
        "loaded at start and stays loaded. Several models are loaded on demand, and\n"
        "unloaded when idle for --keep-alive. SIGTERM or Ctrl-C lets running requests\n"
        "finish; a second signal stops the server at once.",
    )
    add_serve_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal arrives. Returns the exit status."""
    resolved = serve_settings(arguments, os.environ)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library's own threads would ignore tenants' shares
    with _early_host(resolved) as host:
        return _serve(resolved, host)


@contextmanager
def _early_host(resolved: ServeSettings) -> Iterator[WaitingHost | None]:
    """Start the process of the engine; None if the server decides later how many it needs, and where."""
    server = resolved.server
    if len(resolved.named) != 1 or server.model_dir is not None or server.is_on_cluster or server.num_replicas > 1:
        yield None
        return
    from quire.engine.process.waiting_host import WaitingHost

    with closing(WaitingHost()) as host:
        yield host


def _serve(resolved: ServeSettings, host: WaitingHost | None) -> int:
    from quire.core.clock import SystemClock
    from quire.core.threaded_output import thread_output
    from quire.serve.loading.build import make_model_set
    from quire.serve.loading.folder import models_in
    from quire.serve.logs import configure_logs
    from quire.serve.server import end_process, run_server

    thread_output()
    configure_logs(resolved.server.log_format, sys.stderr)
    configs = list(resolved.named)
    if resolved.server.model_dir is not None:
        folder = models_in(resolved.server.model_dir)
        configs += [replace(resolved.engine, model=path) for path in folder.paths]
        for line in folder.skipped:
            _announce(f"skipped     {line}")
    models = make_model_set(configs, resolved.server, SystemClock(), num_named=len(resolved.named), host=host)
    status = DONE if run_server(models, _announce) else INTERRUPTED
    if models.first.model.text_pool.num_running:  # a thread without the GIL must not run into Python's exit
        logging.getLogger("quire.serve").warning(
            "stopped: dropped the texts that were still being processed for clients that left"
        )
        end_process(status)
    return status


def _announce(text: str) -> None:
    print(text, flush=True)
