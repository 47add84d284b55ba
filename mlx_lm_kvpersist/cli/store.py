"""`mlx-lm-kvpersist store` and `key`: show, check, repair and shrink a store, and make its key."""

from __future__ import annotations

import argparse
import heapq
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from ..block import Root
from ..cache.geometry.precision import layout_in_words
from ..config import limits_of
from ..errors import StoreError
from ..store.database import INDEX_FORMAT
from ..store.disk import rebuild_index
from ..store.encryption import new_key
from ..store.folder import INDEX_FILES, StoreLock
from ..store.index import Index
from ..store.objects import Objects, TimedObjects, surplus
from ..store.records import Session, StoreLimits
from ..store.verify import Problem, find_problems, fix_problems
from ..units import shortened, show_bytes
from .opening import changing, existing, reading
from .output import (
    Report,
    age,
    amount,
    called,
    counted,
    counts,
    fitted,
    named,
    progress,
    record,
    records,
    shown,
    table,
    terminal_width,
    utc_time,
)

_MOST_DRAWN = 40
_MOST_CHARS = 60
_BAR = 20
_ID_CHARS = 8
"""Characters of a session's id in the drawing. Commands accept this part."""
_AGES_S = {"1 hour": 3600, "1 day": 86_400, "7 days": 604_800, "30 days": 2_592_000}


def stats(args: argparse.Namespace) -> Report:
    folder = args.kvpersist_dir
    with reading(args) as index:
        sessions = index.sessions()
        n_sessions = Counter(session.root for session in sessions)
        roots: list[dict[str, Any]] = [
            {
                "model": root.model,
                "fingerprint": root.fingerprint,
                "precision": root.layout,
                "namespace": root.namespace,
                "sessions": n_sessions[root.key],
                **counts(totals),
                "bytes": totals.n_bytes,
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
    return Report(
        {**facts, "bytes": n_bytes, "roots": roots, **budgets},
        record({**facts, **sizes, **budgets}),
        "",
        records(roots, *columns) if roots else "",
    )


def _budgets(limits: StoreLimits) -> dict[str, int]:
    return {
        "max_disk_bytes": limits.max_disk_bytes,
        "max_model_bytes": int(limits.max_disk_bytes * limits.model_share),
        "min_free_bytes": limits.min_free_bytes,
    }


def verify(args: argparse.Namespace) -> Report:
    folder = args.kvpersist_dir
    if args.fix:
        with changing(args) as disk:
            problems = left = _problems(folder, disk.index)
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
    found = [table(["fault", "subject", "reason"], rows)] if rows else []
    content = {"folder": str(folder), **report}
    return Report(content, *found, f"{folder}: {line}", status=1 if left else 0)


def _problems(folder: Path, index: Index) -> list[Problem]:
    with progress("verify") as on_progress:
        return find_problems(folder, index, on_progress)


def rebuild(args: argparse.Namespace) -> Report:
    files = existing(args)
    folder = files.folder
    with StoreLock(folder / "lock").held(), progress("rebuild") as on_progress:
        rebuild_index(files, on_progress)
    with reading(args) as index:
        totals, n_sessions = index.totals(), len(index.sessions())
    line = f"{folder}: the index has {amount(totals)}, {counted(n_sessions, 'session')}"
    return Report({"folder": str(folder), **counts(totals), "sessions": n_sessions}, line)


def gc(args: argparse.Namespace) -> Report:
    folder = args.kvpersist_dir
    limits = limits_of(args, folder)
    with changing(args, limits) as disk, disk.lock.held():
        sessions = disk.index.sessions()
        names = {one.id: named(one, disk.index.state.note(one.id)) for one in sessions}
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
    report = Report(
        content,
        *(f"removed {names[session.id]}" for session in removed),
        f"freed {show_bytes(n_bytes - used_bytes)}: {amount(went)}",
        status=0 if fits else 1,
    )
    if not fits and not args.json:
        report.tell(args)
        n_pinned, free = content["pinned"], shutil.disk_usage(folder).free
        rest = f"{counted(n_pinned, 'session')} pinned" if n_pinned else "only its index"
        raise StoreError(
            f"{folder} still holds {show_bytes(used_bytes)} ({rest}), but "
            f"--kvpersist-disk is {show_bytes(limits.max_disk_bytes)} and --kvpersist-min-free "
            f"{show_bytes(limits.min_free_bytes)} of {show_bytes(free)} free"
        )
    return report


def prune(args: argparse.Namespace) -> Report:
    """Remove objects of a shared store. Raises ConfigError for a bad URL, otherwise StoreError."""
    objects = TimedObjects(Objects(args.url, makes_folder=False))
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
    return Report(content, f"{line}{counted(n_left, 'object')}, {show_bytes(left_bytes)}, left")


def key(args: argparse.Namespace) -> int:
    """Make a file with a new key. Raises ConfigError if the file exists."""
    new_key(args.file)
    print(
        f"{args.file} is made. Keep a copy: without it, everything that was encrypted with it "
        "is lost. Anybody who has it can read everything."
    )
    return 0


@dataclass(eq=False)
class Segment:
    """Consecutive blocks of the same `n_sessions` sessions. words: the beginning of the text.

    tree_bytes: the bytes of this segment and of all after it. used: the last use of any of them, in
    seconds since 1970. The store records a use only at the end of a chain. ending: sessions that
    end in this segment.
    """

    number: int
    root: Root | None
    parent: Segment | None
    words: str
    n_sessions: int
    n_blocks: int = 0
    n_tokens: int = 0
    n_bytes: int = 0
    tree_bytes: int = 0
    used: float = 0.0
    children: list[Segment] = field(default_factory=list)
    ending: list[Session] = field(default_factory=list)


def draw(args: argparse.Namespace) -> Report:
    """Draw the bytes of a store by session, segment and age. In JSON, a segment is a "part"."""
    folder, now = args.kvpersist_dir, time.time()
    with reading(args) as index:
        segments = _segments(index)
        ages = dict.fromkeys([*_AGES_S, "longer ago"], 0)
        for segment in segments:
            older = (name for name, limit_s in _AGES_S.items() if now - segment.used < limit_s)
            ages[next(older, "longer ago")] += segment.n_bytes
        n_bytes, described = sum(ages.values()), [_described(index, one) for one in segments]
        facts = {"bytes": n_bytes, "bytes_by_age": ages, "parts": described}
        n_sessions = sum(len(segment.ending) for segment in segments)
        summary = f"{folder}: {show_bytes(n_bytes)} in {counted(n_sessions, 'session')}"
        rows = [[name, _bar(size, n_bytes), show_bytes(size)] for name, size in ages.items()]
        by_age = table(["used within", "", ""], rows)
        drawn = [*_drawn(index, segments), "", by_age] if segments else []
    return Report({"folder": str(folder), **facts}, summary, *drawn)


def _segments(index: Index) -> list[Segment]:
    """Return all segments, parents first."""
    rows = sorted(index.sizes(), key=lambda row: row[3])
    roots = {root.key: root for root, _ in index.roots()}
    ending: dict[bytes, list[Session]] = defaultdict(list)
    for session in index.sessions():
        ending[session.leaf].append(session)
    n_through = Counter({key: len(sessions) for key, sessions in ending.items()})
    for key, parent_key, *_ in reversed(rows):
        n_through[parent_key] += n_through[key]
    segments: list[Segment] = []
    segment_of: dict[bytes, Segment] = {}
    for key, parent_key, root, _, n_tokens, n_bytes, used in rows:
        segment = parent = segment_of.get(parent_key)
        # A segment ends where its sessions diverge or one of them ends.
        if segment is None or segment.n_sessions != n_through[key]:
            row = index.block(key)
            words = shortened(row[0].text, _MOST_CHARS) if row else ""
            segment = Segment(len(segments), roots.get(root), parent, words, n_through[key])
            segments.append(segment)
            if parent is not None:
                parent.children.append(segment)
        segment_of[key] = segment
        segment.ending += ending.get(key, ())
        segment.n_blocks += 1
        segment.n_tokens += n_tokens
        segment.n_bytes += n_bytes
        segment.used = max(segment.used, used)
    for segment in reversed(segments):
        segment.tree_bytes = segment.n_bytes + sum(child.tree_bytes for child in segment.children)
        segment.used = max([segment.used, *(child.used for child in segment.children)])
    return segments


def _described(index: Index, segment: Segment) -> dict[str, Any]:
    root = segment.root
    return {
        "part": segment.number,
        "goes_on_from": None if segment.parent is None else segment.parent.number,
        "model": root.model if root else None,
        "precision": root.layout if root else None,
        "namespace": root.namespace if root else None,
        "shared_by": segment.n_sessions,
        "sessions": [
            {"id": leaf.id, "name": leaf.name, "title": index.state.note(leaf.id).get("title")}
            for leaf in segment.ending
        ],
        "words": segment.words,
        "blocks": segment.n_blocks,
        "tokens": segment.n_tokens,
        "bytes": segment.n_bytes,
        "used": utc_time(segment.used),
    }


def _drawn(index: Index, segments: Sequence[Segment]) -> Iterator[str | Table]:
    models: dict[tuple[str, str], list[Segment]] = defaultdict(list)
    for segment in segments:
        if segment.parent is None and segment.root is not None:
            models[segment.root.model, segment.root.layout].append(segment)
    # `tree_bytes` includes the children, so parents of drawn segments are also drawn.
    large = set(heapq.nlargest(_MOST_DRAWN, segments, key=lambda segment: segment.tree_bytes))
    most, now = max(segment.n_bytes for segment in segments), time.time()

    def tree(tops: Sequence[Segment], indent: str, first: str, last: str) -> Iterator[list[str]]:
        tops = sorted(tops, key=lambda segment: (segment not in large, -segment.tree_bytes))
        drawn = [segment for segment in tops if segment in large]
        rest = tops[len(drawn) :]
        for segment in drawn:
            is_last = segment is tops[-1]
            bar = _bar(segment.n_bytes, most, "█" if segment.n_sessions == 1 else "▒")
            label = indent + (last if is_last else first) + _label(index, segment)
            yield [show_bytes(segment.n_bytes), bar, age(now - segment.used), label]
            below = indent + ("  " if is_last else "│ ") * bool(first)
            yield from tree(segment.children, below, "├ ", "└ ")
        if rest:
            n_bytes = sum(segment.tree_bytes for segment in rest)
            n_sessions = sum(segment.n_sessions for segment in rest)
            more = counted(n_sessions, "more session") if n_sessions else "more of no session"
            used = age(now - max(segment.used for segment in rest))
            yield [show_bytes(n_bytes), "", used, f"{indent}{last}… and {more}"]

    columns = ["size", "", "used", "session"]
    sizes = {key: sum(segment.tree_bytes for segment in tops) for key, tops in models.items()}
    for model, layout in sorted(models, key=sizes.__getitem__, reverse=True):
        yield ""
        facts = f", {layout_in_words(layout)}: {show_bytes(sizes[model, layout])}"
        yield fitted(shown(model, 200), terminal_width() - len(facts)) + facts
        yield table(columns, tree(models[model, layout], "", "", ""), "size used", "session")


def _label(index: Index, segment: Segment) -> str:
    shared = f"shared by {segment.n_sessions:,}" if segment.n_sessions else "of no session"
    if not segment.ending:
        words = shown(segment.words.strip(), _MOST_CHARS)
        return f"{shared}, {segment.n_tokens:,} tokens" + (f' "{words}"' if words else "")
    first, n_more = segment.ending[0], len(segment.ending) - 1
    name = called(first.name, index.state.note(first.id))
    sessions = f"{first.id[:_ID_CHARS]} {name}".strip() + " (pinned)" * first.pinned
    sessions += f" and {n_more:,} more" if n_more else ""
    is_own = len(segment.ending) == segment.n_sessions
    return sessions if is_own else f"{shared}; end here: {sessions}"


def _bar(n_bytes: int, most: int, glyph: str = "█") -> str:
    return glyph * max(1, round(_BAR * n_bytes / max(most, 1))) if n_bytes else ""
