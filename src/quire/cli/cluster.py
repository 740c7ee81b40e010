"""`quire cluster`: joins machines to hold the engines of one model; a thin wrapper around Ray's own commands.

first machine     quire cluster start               listens on 6379, creates a token
other machines    quire cluster join HOST:6379      with the same token
first machine     quire serve MODEL --replicas ray:N
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from typing import Final

from quire.cli import DONE
from quire.core.byte_sizes import format_bytes
from quire.core.errors import ExecutionError
from quire.core.python_process import start_python
from quire.core.setting_checks import require_int

PORT: Final = 6379


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `cluster`. Mutates `subparsers`."""
    text = "Join machines to hold the engines of quire serve --replicas ray:N. Needs quire[ray]. To leave: `ray stop`."
    parser = subparsers.add_parser("cluster", help="join machines to hold the engines of one model", description=text)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "Start a cluster on this machine. The first start creates the token that all machines need."
    start = commands.add_parser("start", help="start a cluster on this machine", description=text)
    start.add_argument("--port", type=int, default=PORT, metavar="N", help=f"port to listen on (default: {PORT})")
    start.add_argument("--host", metavar="ADDRESS", help="address by which other machines reach this one")
    help_text = "place no engines on this machine, only the server"
    start.add_argument("--no-engines", action="store_true", help=help_text)
    start.set_defaults(run=run_start)
    text = "Join this machine to a cluster, with the token of the machine that started it."
    join = commands.add_parser("join", help="join this machine to a cluster", description=text)
    join.add_argument("address", metavar="HOST:PORT", help="address of the machine that ran quire cluster start")
    join.set_defaults(run=run_join)
    text = "List the machines of the cluster at RAY_ADDRESS, or of this machine's cluster."
    commands.add_parser("status", help="list the machines", description=text).set_defaults(run=run_status)


def run_start(arguments: argparse.Namespace) -> int:
    """Start a cluster. Returns the exit status."""
    from quire.serve.replicas.access import require_ray, require_token

    require_ray()
    require_int("port", arguments.port, 1, 65_535)
    where = [] if arguments.host is None else [f"--node-ip-address={arguments.host}"]
    gives = ["--num-cpus=0", "--num-gpus=0"] if arguments.no_engines else []
    token = require_token(os.environ, may_make=True)
    _ray_start("--head", f"--port={arguments.port}", "--include-dashboard=false", *where, *gives)
    print(f"started     a cluster; its token is in {token}")
    address = f"{arguments.host or 'HOST'}:{arguments.port}"
    print(f"next        on other machines, with that token: quire cluster join {address}")
    print("            here: quire serve MODEL --replicas ray:N")
    return DONE


def run_join(arguments: argparse.Namespace) -> int:
    """Join this machine to a cluster. Returns the exit status."""
    from quire.serve.replicas.access import require_ray, require_reachable, require_token

    require_ray()
    require_token(os.environ, may_make=False)
    require_reachable(arguments.address)
    _ray_start(f"--address={arguments.address}")
    print(f"joined      {arguments.address}")
    return DONE


def run_status(_: argparse.Namespace) -> int:
    """List the machines. Returns the exit status."""
    from quire.serve.replicas.cluster import Cluster

    for each in Cluster.connect(may_start=False).machines:
        gpus = f", {each.num_gpus} GPU{'s' * (each.num_gpus != 1)}" if each.num_gpus else ""
        cpus = f"{each.num_cpus} CPU{'s' * (each.num_cpus != 1)}"
        print(f"{each.address:<24}{cpus}{gpus}, {format_bytes(each.memory_bytes)}")
    return DONE


def _ray_start(*options: str) -> None:
    """Run `ray start`; raises `ExecutionError` with its last line of output.

    The output is a file: the daemons keep it open, so a pipe would never end.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = start_python(
            *("-m", "ray.scripts.scripts", "start", "--disable-usage-stats", *options),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        if process.wait() != 0:
            output.seek(0)
            lines = [line.strip() for line in output if line.strip()]
            raise ExecutionError(f"ray start: {lines[-1] if lines else 'it failed without a message'}")
