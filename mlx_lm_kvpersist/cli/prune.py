"""`mlx-lm-kvpersist store prune`: what a shared store may hold. Servers find the rest as before."""

from __future__ import annotations

import argparse

from ..errors import StoreError
from ..store.objects import Objects, TimedObjects, surplus
from ..units import show_bytes
from .output import counted, tell


def run(args: argparse.Namespace) -> int:
    """Run the command. Raises ConfigError for a URL that cannot be used, else StoreError."""
    objects = TimedObjects(Objects(args.url))
    try:
        stored = list(objects.list())
        old = surplus(stored, args.older, args.size)
        if not args.dry_run:
            objects.delete([item.name for item in old])
    except OSError as error:
        raise StoreError(f"{args.url} cannot be pruned: {error}") from error
    n_bytes, all_bytes = (sum(item.n_bytes for item in items) for items in (old, stored))
    n_left, left_bytes = len(stored) - len(old), all_bytes - n_bytes
    would = "would be removed" if args.dry_run else "removed"
    content = {"removed": len(old), "removed_bytes": n_bytes, "left_bytes": left_bytes}
    line = f"{counted(len(old), 'object')}, {show_bytes(n_bytes)}, {would}; "
    tell(args, content, f"{line}{counted(n_left, 'object')}, {show_bytes(left_bytes)}, left")
    return 0
