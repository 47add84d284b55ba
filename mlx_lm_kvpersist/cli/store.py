"""`mlx-lm-kvpersist store`: what a store holds, whether it is whole, what may go."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import StoreError
from ..store.budget import StoreLimits, free_bytes, tree_bytes
from ..store.disk import DiskStore
from ..store.dry_run import Rehearsal
from ..store.index import Session
from ..store.lock import StoreLock
from ..store.rebuild import rebuild_index
from ..store.verify import Problem, find_problems, fix_problems
from .opening import (
    add_budgets,
    changing,
    check_exists,
    common_options,
    folder_of,
    limits_of,
    reading,
    said_in_one_line,
)
from .output import console, print_json, print_table, progress, shown, size


def stats(args: argparse.Namespace) -> int:
    folder = folder_of(args)
    with reading(folder) as index:
        sessions = index.sessions()
        n_pinned = sum(session.pinned for session in sessions)
        parts = index.parts_by_root()
        models: list[dict[str, Any]] = [
            {
                "model": root.model,
                "fingerprint": root.fingerprint,
                "precision": root.precision,
                "namespace": root.namespace,
                "sessions": sum(session.root == root.key for session in sessions),
                "blocks": n_blocks,
                "parts": parts.get(root.key, (0, 0))[0],
                "bytes": n_bytes + parts.get(root.key, (0, 0))[1],
            }
            for root, n_blocks, n_bytes in index.roots()
        ]
        n_blocks, n_parts, version = index.n_blocks(), index.n_parts(), index.format()
        index_bytes = sum(
            path.stat().st_size for path in folder.glob("index.sqlite*") if path.exists()
        )
    folders = ("blocks", "parts", "sessions", "quarantine")
    kinds = {name: tree_bytes(folder / name) for name in folders}
    kinds["index"] = index_bytes
    limits = limits_of(args, folder)
    n_models = len({model["fingerprint"] for model in models})
    stats = {
        "folder": str(folder),
        "format": version,
        "bytes": {**kinds, "all": sum(kinds.values())},
        "blocks": n_blocks,
        "parts": n_parts,
        "sessions": len(sessions),
        "pinned": n_pinned,
        "models": n_models,
        "roots": models,
        "max_disk_bytes": limits.max_disk_bytes,
        "min_free_bytes": limits.min_free_bytes,
        "free_bytes": free_bytes(folder),
    }
    if args.json:
        print_json(stats)
        return 0
    facts = [
        ("folder", str(folder)),
        ("format", str(version)),
        ("sessions", f"{len(sessions)}, {n_pinned} of them pinned"),
        ("blocks", f"{n_blocks} of {n_models} models"),
        ("parts", str(n_parts)),
        *((f"{name} bytes", size(kinds[name])) for name in sorted(kinds)),
        ("bytes in all", size(sum(kinds.values()))),
        ("budget", f"{size(limits.max_disk_bytes)} (--kvpersist-disk)"),
        ("free", f"{size(free_bytes(folder))}, {size(limits.min_free_bytes)} to be left"),
    ]
    print_table(["", ""], facts)
    if models:
        console().print()
        columns = ["model", "precision", "namespace", "sessions", "blocks", "parts", "size"]
        rows = [
            [
                shown(model["model"] or model["fingerprint"], 60),
                shown(model["precision"]),
                shown(model["namespace"] or "-"),
                str(model["sessions"]),
                str(model["blocks"]),
                str(model["parts"]),
                size(model["bytes"]),
            ]
            for model in models
        ]
        print_table(columns, rows, right="sessions blocks parts size")
    return 0


def verify(args: argparse.Namespace) -> int:
    folder = folder_of(args)
    left: list[Problem] = []
    if args.fix:
        with changing(folder) as disk:
            problems = _problems(folder, disk)
            if problems:
                fix_problems(disk, problems)
                left = _problems(folder, disk)
            n_blocks, n_parts = disk.index.n_blocks(), disk.index.n_parts()
    else:
        with reading(folder) as index, progress("verify") as told:
            left = problems = find_problems(folder, index, told)
            n_blocks, n_parts = index.n_blocks(), index.n_parts()
    if args.json:
        found = [
            {"fault": problem.fault.value, "subject": problem.subject, "reason": problem.reason}
            for problem in problems
        ]
        counts = {"blocks": n_blocks, "parts": n_parts}
        report = {"ok": not left, **counts, "problems": found, "left": len(left)}
        print_json({"folder": str(folder), **report})
        return 1 if left else 0
    rows = [
        [problem.fault.value, shown(problem.subject, 200), shown(problem.reason, 200)]
        for problem in problems
    ]
    if rows:
        print_table(["fault", "subject", "reason"], rows)
    if not problems:
        console().print(f"{folder}: {n_blocks} blocks and {n_parts} parts, all good")
    elif left:
        advice = "" if args.fix else "; --fix puts aside what is bad"
        console().print(f"{folder}: {len(left)} problems{advice}")
    else:
        console().print(
            f"{folder}: {len(problems)} problems fixed, {n_blocks} blocks and {n_parts} parts left"
        )
    return 1 if left else 0


def _problems(folder: Path, disk: DiskStore) -> list[Problem]:
    with progress("verify") as told:
        return find_problems(folder, disk.index, told)


def rebuild(args: argparse.Namespace) -> int:
    folder = folder_of(args)
    check_exists(folder)
    with (
        said_in_one_line(folder),
        StoreLock(folder / "lock").held(),
        progress("rebuild") as told,
    ):
        n_blocks = rebuild_index(folder, told)
    with reading(folder) as index:
        n_parts, n_sessions = index.n_parts(), len(index.sessions())
    if args.json:
        counts = {"blocks": n_blocks, "parts": n_parts, "sessions": n_sessions}
        print_json({"folder": str(folder), **counts})
    else:
        console().print(
            f"{folder}: the index has {n_blocks} blocks, {n_parts} parts and {n_sessions} sessions"
        )
    return 0


def gc(args: argparse.Namespace) -> int:
    folder = folder_of(args)
    check_exists(folder)
    limits = limits_of(args, folder)
    went = _rehearsed(folder, limits) if args.dry_run else _collected(folder, limits)
    if args.json:
        report = {
            "dry_run": args.dry_run,
            "fits": went.fits,
            "sessions": [{"id": session.id, "name": session.name} for session in went.sessions],
            "blocks": went.n_blocks,
            "parts": went.n_parts,
            "bytes": went.n_bytes,
            "used_bytes": went.n_bytes_used,
            "max_disk_bytes": limits.max_disk_bytes,
            "min_free_bytes": limits.min_free_bytes,
        }
        print_json(report)
        return 0 if went.fits else 1
    verb = "would go" if args.dry_run else "went"
    for session in went.sessions:
        name = "-" if session.name is None else shown(session.name)
        console().print(f"{session.id}  {name}  {verb}")
    console().print(f"{went.n_blocks} blocks and {went.n_parts} parts, {size(went.n_bytes)} {verb}")
    if not went.fits:
        raise StoreError(
            f"{folder}: what is pinned leaves no way to keep --kvpersist-disk "
            f"({size(limits.max_disk_bytes)}) and --kvpersist-min-free "
            f"({size(limits.min_free_bytes)})"
        )
    return 0


@dataclass(frozen=True)
class _Gone:
    """What making room removes, or would. `fits` says whether that was enough."""

    fits: bool
    sessions: list[Session]
    n_blocks: int
    n_parts: int
    n_bytes: int
    n_bytes_used: int


def _rehearsed(folder: Path, limits: StoreLimits) -> _Gone:
    with (
        reading(folder) as index,
        tempfile.TemporaryDirectory(prefix="kvpersist-gc-") as scratch,
    ):
        sessions = index.sessions()
        rehearsal = Rehearsal(folder, limits, Path(scratch))
        try:
            fits = rehearsal.make_room(0)
            return _Gone(
                fits,
                [session for session in sessions if session.id in rehearsal.ended],
                rehearsal.n_blocks,
                rehearsal.n_parts,
                rehearsal.n_freed_bytes,
                rehearsal.used_bytes(),
            )
        finally:
            rehearsal.close()


def _collected(folder: Path, limits: StoreLimits) -> _Gone:
    with changing(folder, limits) as disk, disk.lock.held():
        sessions = disk.index.sessions()
        n_blocks, n_parts = disk.index.n_blocks(), disk.index.n_parts()
        n_bytes = disk.used_bytes()
        fits = disk.make_room(0)
        left = {session.id for session in disk.index.sessions()}
        return _Gone(
            fits,
            [session for session in sessions if session.id not in left],
            n_blocks - disk.index.n_blocks(),
            n_parts - disk.index.n_parts(),
            n_bytes - disk.used_bytes(),
            disk.used_bytes(),
        )
