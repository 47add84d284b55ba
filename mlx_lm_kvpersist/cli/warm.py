"""`mlx-lm-kvpersist warm`: a running server computes a beginning, and pins it."""

from __future__ import annotations

import argparse

from ..api.agents import WARM_PATH, read_prompt, session_name
from .asking import ask
from .output import print_json, shown

_COMPUTED_S = 3600.0


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit status. Raises KVPersistError if it is not stored."""
    name = args.name or session_name(args.file)
    sent = {"name": name, "request": read_prompt(args.file)}
    done = ask(args.url, WARM_PATH, sent, timeout_s=_COMPUTED_S)
    if args.json:
        print_json(done)
    else:
        tokens = f"{done['tokens']:,} tokens"
        print(f"{done['id']}  {shown(done['name'])}  is computed and pinned: {tokens}")
    return 0
