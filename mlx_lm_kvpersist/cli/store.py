"""`mlx-lm-kvpersist store`: what a store holds, whether it is whole, what may go."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from ..cache.geometry.precision import layout_in_words
from ..errors import StoreError
from ..store.budget import StoreLimits, free_bytes
from ..store.disk import DiskStore
from ..store.eviction import DryRun, Eviction
from ..store.folder import own_bytes
from ..store.index import Session
from ..store.lock import StoreLock
from ..store.rebuild import rebuild_index
from ..store.stored_files import StoredFiles
from ..store.verify import Problem, find_problems, fix_problems
from ..units import show_bytes
from .opening import changing, check_exists, folder_of, limits_of, reading
from .output import console, counted, print_json, print_table, progress, shown, tell


def stats(args: argparse.Namespace) -> int:
    folder = folder_of(args)
    with reading(folder) as index:
        sessions = index.sessions()
        n_pinned = sum(session.pinned for session in sessions)
        models: list[dict[str, Any]] = [
            {
                "model": root.model,
                "fingerprint": root.fingerprint,
                "precision": root.layout,
                "namespace": root.namespace,
                "sessions": sum(session.root == root.key for session in sessions),
                "blocks": totals.n_blocks,
                "checkpoints": totals.n_checkpoints,
                "bytes": totals.block_bytes + totals.checkpoint_bytes,
            }
            for root, totals in index.roots()
        ]
        held, version = index.totals(), index.format()
        files = [path for path in folder.glob("index.sqlite*") if path.exists()]
        index_bytes = sum(path.stat().st_size for path in files)
    kinds = {name: own_bytes(folder, name) for name in ("blocks", "sessions", "quarantine")}
    kinds |= {"checkpoints": own_bytes(folder, "checkpoints"), "index": index_bytes}
    limits = limits_of(args, folder)
    n_models = len({model["fingerprint"] for model in models})
    stats = {
        "folder": str(folder),
        "format": version,
        "bytes": {**kinds, "all": sum(kinds.values())},
        "blocks": held.n_blocks,
        "checkpoints": held.n_checkpoints,
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
        ("sessions", f"{len(sessions):,}, {n_pinned:,} pinned"),
        ("blocks", f"{held.n_blocks:,} of {counted(n_models, 'model')}"),
        ("checkpoints", f"{held.n_checkpoints:,}"),
        *((f"size of {name}", show_bytes(kinds[name])) for name in sorted(kinds)),
        ("size in all", show_bytes(sum(kinds.values()))),
        ("budget", f"{show_bytes(limits.max_disk_bytes)} (--kvpersist-disk)"),
        (
            "free",
            f"{show_bytes(free_bytes(folder))}, {show_bytes(limits.min_free_bytes)} to be left",
        ),
    ]
    print_table(["", ""], facts)
    if models:
        console().print()
        columns = ["model", "precision", "namespace", "sessions", "blocks", "checkpoints", "size"]
        rows = [
            [
                shown(model["model"] or model["fingerprint"], 60),
                shown(layout_in_words(model["precision"]), 60),
                shown(model["namespace"] or "-"),
                str(model["sessions"]),
                str(model["blocks"]),
                str(model["checkpoints"]),
                show_bytes(model["bytes"]),
            ]
            for model in models
        ]
        print_table(columns, rows, right="sessions blocks checkpoints size")
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
            totals = disk.index.totals()
    else:
        with reading(folder) as index, progress("verify") as on_progress:
            left = problems = find_problems(folder, index, on_progress)
            totals = index.totals()
            is_copy = index.path.parent != folder
        if problems and is_copy:  # what a server saved since is not in it
            with reading(folder) as index:
                again = find_problems(folder, index)
            left = problems = [problem for problem in again if problem in problems]
    n_blocks, n_checkpoints = totals.n_blocks, totals.n_checkpoints
    if args.json:
        found = [
            {"fault": problem.fault.value, "subject": problem.subject, "reason": problem.reason}
            for problem in problems
        ]
        counts = {"blocks": n_blocks, "checkpoints": n_checkpoints}
        report = {"ok": not left, **counts, "problems": found, "left": len(left)}
        print_json({"folder": str(folder), **report})
        return 1 if left else 0
    rows = [
        [problem.fault.value, shown(problem.subject, 200), shown(problem.reason, 200)]
        for problem in problems
    ]
    if rows:
        print_table(["fault", "subject", "reason"], rows)
    held = f"{counted(n_blocks, 'block')} and {counted(n_checkpoints, 'checkpoint')}"
    if not problems:
        console().print(f"{folder}: {held}, all good")
    elif left:
        advice = "" if args.fix else "; --fix moves bad files to quarantine"
        console().print(f"{folder}: {counted(len(left), 'problem')}{advice}")
    else:
        console().print(f"{folder}: {counted(len(problems), 'problem')} fixed, {held} left")
    return 1 if left else 0


def _problems(folder: Path, disk: DiskStore) -> list[Problem]:
    with progress("verify") as on_progress:
        return find_problems(folder, disk.index, on_progress)


def rebuild(args: argparse.Namespace) -> int:
    folder = folder_of(args)
    check_exists(folder)
    with StoreLock(folder / "lock").held(), progress("rebuild") as on_progress:
        n_blocks = rebuild_index(folder, on_progress)
    with reading(folder) as index:
        n_checkpoints, n_sessions = index.totals().n_checkpoints, len(index.sessions())
    counts = {"blocks": n_blocks, "checkpoints": n_checkpoints, "sessions": n_sessions}
    held = f"{counted(n_blocks, 'block')}, {counted(n_checkpoints, 'checkpoint')}"
    said = f"{folder}: the index has {held}, {counted(n_sessions, 'session')}"
    tell(args, {"folder": str(folder), **counts}, said)
    return 0


def gc(args: argparse.Namespace) -> int:
    folder = folder_of(args)
    check_exists(folder)
    limits = limits_of(args, folder)
    if args.dry_run:
        found = _would_remove(folder, limits)
    else:
        with changing(folder, limits) as disk, disk.lock.held():
            found = _remove(disk.files, limits, disk.index.sessions())
    fits: bool = found["fits"]
    if args.json:
        budgets = {"max_disk_bytes": limits.max_disk_bytes, "min_free_bytes": limits.min_free_bytes}
        print_json({"dry_run": args.dry_run, **found, **budgets})
        return 0 if fits else 1
    verb = "would be removed" if args.dry_run else "removed"
    for session in found["sessions"]:
        name = "-" if session["name"] is None else shown(session["name"])
        console().print(f"{session['id']}  {name}  {verb}")
    held = f"{counted(found['blocks'], 'block')} and {counted(found['checkpoints'], 'checkpoint')}"
    console().print(f"{held}, {show_bytes(found['bytes'])}, {verb}")
    if not fits:
        n_pinned = found["pinned"]
        rest = f"{counted(n_pinned, 'session')} pinned" if n_pinned else "only its index"
        raise StoreError(
            f"{folder} still holds {show_bytes(found['used_bytes'])} ({rest}), but "
            f"--kvpersist-disk is {show_bytes(limits.max_disk_bytes)} and --kvpersist-min-free "
            f"{show_bytes(limits.min_free_bytes)} of {show_bytes(free_bytes(folder))} free"
        )
    return 0


def _would_remove(folder: Path, limits: StoreLimits) -> dict[str, Any]:
    """Return what `_remove` would, found on a copy of the index."""
    with (
        reading(folder) as index,
        tempfile.TemporaryDirectory(prefix="kvpersist-gc-") as scratch,
    ):
        sessions = index.sessions()  # the copy has no names
        copy = DryRun(folder, index.path, Path(scratch))
        with closing(copy.index):
            return _remove(copy, limits, sessions)


def _remove(files: StoredFiles, limits: StoreLimits, sessions: list[Session]) -> dict[str, Any]:
    """Make room within the budgets; return whether that was possible, and what was removed."""
    index = files.index
    before, used_bytes = index.totals(), files.used_bytes()
    fits = Eviction(files, limits).make_room(0)
    after = index.totals()
    return {
        "fits": fits,
        **_sessions(sessions, {each.id for each in index.sessions()}),
        "blocks": before.n_blocks - after.n_blocks,
        "checkpoints": before.n_checkpoints - after.n_checkpoints,
        "bytes": used_bytes - files.used_bytes(),
        "used_bytes": files.used_bytes(),
    }


def _sessions(before: list[Session], left: set[str]) -> dict[str, Any]:
    """Return the sessions that are not left, and how many pinned ones there are."""
    removed = [{"id": each.id, "name": each.name} for each in before if each.id not in left]
    return {"sessions": removed, "pinned": sum(each.pinned for each in before)}
