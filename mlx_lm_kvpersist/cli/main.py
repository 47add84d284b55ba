"""The command line `mlx-lm-kvpersist`: one subcommand a module, imported when it is used."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from .. import __version__
from .._startup import requested_plugins, serve
from ..errors import KVPersistError

PROG = "mlx-lm-kvpersist"


@dataclass(frozen=True)
class Command:
    """A subcommand. Its module has `main(argv) -> exit status` and parses its own options."""

    name: str
    module: str
    summary: str


COMMANDS: tuple[Command, ...] = (
    Command("demo", "mlx_lm_kvpersist.cli.demo", "kill a server, and see its conversation go on"),
    Command("doctor", "mlx_lm_kvpersist.cli.doctor", "say whether --plugin works here, and why"),
    Command("quality", "mlx_lm_kvpersist.cli.quality", "say what 8 and 4 bits of KV cost"),
    Command("selftest", "mlx_lm_kvpersist.cli.selftest", "prove every patch, start the plugin"),
    Command("sessions", "mlx_lm_kvpersist.cli.sessions", "list, pin, move, remove sessions"),
    Command("spec", "mlx_lm_kvpersist.cli.spec", "say how a model's cache is kept"),
    Command("store", "mlx_lm_kvpersist.cli.store", "check, repair and shrink the store"),
    Command("why", "mlx_lm_kvpersist.cli.why", "say why a request was not reused"),
)
SERVER = Command("server", "", "run mlx_lm.server with the plugin; needs no .pth file")


def main(argv: Sequence[str] | None = None, *, with_server: bool = False) -> int:
    """Run a subcommand and return its exit status.

    with_server: take `server` too, which stands for `mlx_lm.server --plugin kvpersist`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = (*COMMANDS, SERVER) if with_server else COMMANDS
    # The command's own parser reads the rest: a store or MLX is imported only where it is used.
    name = _parser(commands).parse_args(arguments[:1]).command
    options = arguments[1:]
    if name == SERVER.name:
        serve(options if requested_plugins(options) else ["--plugin", "kvpersist", *options])
        return 0
    module = next(command.module for command in commands if command.name == name)
    try:
        status: int = importlib.import_module(module).main(options)
    except KVPersistError as error:
        print(f"{PROG} {name}: {error}", file=sys.stderr)
        return 1
    return status


def _parser(commands: Sequence[Command]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, description="Persistent memory for mlx_lm.server.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands:
        subparsers.add_parser(command.name, help=command.summary, add_help=False)
    return parser
