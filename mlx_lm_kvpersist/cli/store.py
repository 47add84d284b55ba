"""`mlx-lm-kvpersist store` and `key`: what a store holds, whether it is whole, what may go."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from ..config import limits_of
from ..errors import StoreError
from ..store.encryption import new_key
from ..store.folder import INDEX_FILES, StoreLock
from ..store.index import Index
from ..store.index_schema import INDEX_FORMAT
from ..store.objects import Objects, TimedObjects, surplus
from ..store.rebuild import rebuild_index
from ..store.records import StoreLimits
from ..store.verify import Problem, find_problems, fix_problems
from ..units import show_bytes
from .opening import changing, existing, folder_of, reading
from .output import amount, counted, counts, named, progress, record, records, shown, table, tell


def stats(args: argparse.Namespace) -> int:
    folder = folder_of(args)
    with reading(args) as index:
        sessions = index.sessions()
        roots: list[dict[str, Any]] = [
            {
                "model": root.model,
                "fingerprint": root.fingerprint,
                "precision": root.layout,
                "namespace": root.namespace,
                "sessions": sum(session.root == root.key for session in sessions),
                **counts(totals),
                "bytes": totals.block_bytes + totals.checkpoint_bytes,
            }
            for root, totals in index.roots()
        ]
        totals, is_encrypted = index.totals(), index.files.is_encrypted
        n_bytes = {"index": index.files.n_bytes(*INDEX_FILES)}
    for kind in ("blocks", "checkpoints", "sessions", "quarantine"):
        n_bytes[kind] = index.files.n_bytes(kind)
    n_bytes["all"] = sum(n_bytes.values())
    limits = limits_of(args, folder)
    facts = {
        "folder": str(folder),
        "format": INDEX_FORMAT,
        "encrypted": is_encrypted,
        **counts(totals),
        "sessions": len(sessions),
        "pinned": sum(session.pinned for session in sessions),
        "models": len({root["fingerprint"] for root in roots}),
    }
    budgets = {**_budgets(limits), "free_bytes": shutil.disk_usage(folder).free}
    sizes = {f"bytes_of_{kind}": size for kind, size in n_bytes.items()}
    columns = ("model", "precision", "namespace", "sessions", "blocks", "checkpoints", "bytes")
    tell(
        args,
        {**facts, "bytes": n_bytes, "roots": roots, **budgets},
        record({**facts, **sizes, **budgets}),
        "",
        records(roots, *columns) if roots else "",
    )
    return 0


def _budgets(limits: StoreLimits) -> dict[str, int]:
    return {
        "max_disk_bytes": limits.max_disk_bytes,
        "max_model_bytes": int(limits.max_disk_bytes * limits.model_share),
        "min_free_bytes": limits.min_free_bytes,
    }


def verify(args: argparse.Namespace) -> int:
    folder = folder_of(args)
    if args.fix:
        with changing(args) as disk:
            problems = _problems(folder, disk.index)
            left = []
            if problems:
                fix_problems(disk, problems)
                left = _problems(folder, disk.index)
            totals = disk.index.totals()
    else:
        with reading(args, check_all=True) as index:
            left = problems = _problems(folder, index)
            totals = index.totals()
    if not problems:
        line = f"{amount(totals)}, all good"
    elif left:
        advice = "" if args.fix else "; --fix moves bad files to quarantine"
        line = f"{counted(len(left), 'problem')}{advice}"
    else:
        line = f"{counted(len(problems), 'problem')} fixed, {amount(totals)} left"
    listed = [{"fault": p.fault.value, "subject": p.subject, "reason": p.reason} for p in problems]
    report = {"ok": not left, **counts(totals), "problems": listed, "left": len(left)}
    rows = [[shown(value, 200) for value in problem.values()] for problem in listed]
    tell(
        args,
        {"folder": str(folder), **report},
        *([table(["fault", "subject", "reason"], rows)] if rows else []),
        f"{folder}: {line}",
    )
    return 1 if left else 0


def _problems(folder: Path, index: Index) -> list[Problem]:
    with progress("verify") as on_progress:
        return find_problems(folder, index, on_progress)


def rebuild(args: argparse.Namespace) -> int:
    files = existing(args)
    folder = files.folder
    with StoreLock(folder / "lock").held(), progress("rebuild") as on_progress:
        rebuild_index(files, on_progress)
    with reading(args) as index:
        totals, n_sessions = index.totals(), len(index.sessions())
    line = f"{folder}: the index has {amount(totals)}, {counted(n_sessions, 'session')}"
    tell(args, {"folder": str(folder), **counts(totals), "sessions": n_sessions}, line)
    return 0


def gc(args: argparse.Namespace) -> int:
    folder = folder_of(args)
    limits = limits_of(args, folder)
    with changing(args, limits) as disk, disk.lock.held():
        sessions = disk.index.sessions()
        before, n_bytes = disk.index.totals(), disk.used_bytes()
        fits = disk.make_room(0)
        went, used_bytes = before - disk.index.totals(), disk.used_bytes()
        left = {session.id for session in disk.index.sessions()}
    removed = [session for session in sessions if session.id not in left]
    content: dict[str, Any] = {
        "fits": fits,
        "sessions": [{"id": session.id, "name": session.name} for session in removed],
        "pinned": sum(session.pinned for session in sessions),
        **counts(went),
        "bytes": n_bytes - used_bytes,
        "used_bytes": used_bytes,
        **_budgets(limits),
    }
    tell(
        args,
        content,
        *(f"removed {named(session)}" for session in removed),
        f"{amount(went)}, {show_bytes(n_bytes - used_bytes)}, removed",
    )
    if not fits and not args.json:
        n_pinned, free = content["pinned"], shutil.disk_usage(folder).free
        rest = f"{counted(n_pinned, 'session')} pinned" if n_pinned else "only its index"
        raise StoreError(
            f"{folder} still holds {show_bytes(used_bytes)} ({rest}), but "
            f"--kvpersist-disk is {show_bytes(limits.max_disk_bytes)} and --kvpersist-min-free "
            f"{show_bytes(limits.min_free_bytes)} of {show_bytes(free)} free"
        )
    return 0 if fits else 1


def prune(args: argparse.Namespace) -> int:
    """Remove objects of a shared store. Raises ConfigError for a bad URL, StoreError else."""
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


def key(args: argparse.Namespace) -> int:
    """Make a file with a new key. Raises ConfigError if the file exists."""
    new_key(args.file)
    print(
        f"{args.file} is made. Keep a copy: without it, what was encrypted with it is lost. "
        "Whoever has it reads everything."
    )
    return 0
