"""`mlx-lm-kvpersist key`: the file with the key of what is encrypted."""

from __future__ import annotations

import argparse

from ..store.encryption import new_key


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit status. Raises ConfigError if the file exists."""
    new_key(args.file)
    print(
        f"{args.file} is made. Keep a copy: without it, what was encrypted with it is lost. "
        "Whoever has it reads everything."
    )
    return 0
