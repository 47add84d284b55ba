"""`mlx-lm-kvpersist store map`: what takes a store's bytes, by session, shared segment and age.

A segment is a run of blocks that the same sessions go through. JSON calls segments parts.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from ..block import Root
from ..cache.geometry.precision import layout_in_words
from ..store.index import Index
from ..store.records import Session
from ..units import show_bytes
from .opening import folder_of, reading
from .output import (
    age,
    called,
    counted,
    fitted,
    fitted_rows,
    shown,
    table,
    tell,
    terminal_width,
    utc_time,
)

_MOST_DRAWN = 40
"""The largest segments are drawn."""
_MOST_CHARS = 60
_NAME_CHARS = 160
_BAR = 20
_ID_CHARS = 8
"""The beginning of an id that is drawn; the commands take it for the id."""
_AGES_S = {"1 hour": 3600, "1 day": 86_400, "7 days": 604_800, "30 days": 2_592_000}


@dataclass(eq=False)
class Segment:
    """Blocks that `n_sessions` go through; `first` is the key of the first block.

    `tree_bytes` and `used` (seconds since 1970) count the segments below, too: a use marks the end
    of a chain only. `ending`: sessions that end in it.
    """

    number: int
    root: bytes
    parent: Segment | None
    first: bytes
    n_sessions: int
    n_blocks: int = 0
    n_tokens: int = 0
    n_bytes: int = 0
    tree_bytes: int = 0
    used: float = 0.0
    children: list[Segment] = field(default_factory=list)
    ending: list[Session] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    """Run the command. Nothing is locked or changed, so a server may use the folder meanwhile."""
    folder, now = folder_of(args), time.time()
    with reading(args) as index:
        segments = _segments(index)
        ages = dict.fromkeys([*_AGES_S, "longer ago"], 0)
        for segment in segments:
            older = (named for named, limit_s in _AGES_S.items() if now - segment.used < limit_s)
            ages[next(older, "longer ago")] += segment.n_bytes
        roots, n_bytes = {root.key: root for root, _ in index.roots()}, sum(ages.values())
        if args.json:
            described = [_described(index, segment, roots) for segment in segments]
            facts = {"bytes": n_bytes, "bytes_by_age": ages, "parts": described}
            tell(args, {"folder": str(folder), **facts})
            return 0
        n_sessions = sum(len(segment.ending) for segment in segments)
        summary = f"{folder}: {show_bytes(n_bytes)} in {counted(n_sessions, 'session')}"
        tell(args, None, summary)
        if segments:
            rows = [[named, _bar(size, n_bytes), show_bytes(size)] for named, size in ages.items()]
            by_age = table(["used within", "", ""], rows)
            tell(args, None, *_drawn(index, segments, roots), "", by_age)
    return 0


def _segments(index: Index) -> list[Segment]:
    """Return all segments, parents first."""
    rows = sorted(index.sizes(), key=lambda row: row[3])
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
        # A segment ends at the block after which its sessions diverge.
        if segment is None or segment.n_sessions != n_through[key]:
            segment = Segment(len(segments), root, parent, key, n_through[key])
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


def _described(index: Index, segment: Segment, roots: Mapping[bytes, Root]) -> dict[str, Any]:
    root = roots.get(segment.root)
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
        "words": _words(index, segment),
        "blocks": segment.n_blocks,
        "tokens": segment.n_tokens,
        "bytes": segment.n_bytes,
        "used": utc_time(segment.used),
    }


def _words(index: Index, segment: Segment) -> str:
    row = index.block(segment.first)
    return row[0].text[:_MOST_CHARS] if row else ""


def _drawn(
    index: Index, segments: Sequence[Segment], roots: Mapping[bytes, Root]
) -> Iterator[str | Table]:
    models: dict[tuple[str, str], list[Segment]] = defaultdict(list)
    for segment in segments:
        if segment.parent is None and (root := roots.get(segment.root)) is not None:
            models[root.model, root.layout].append(segment)
    # No segment is larger than its parent, so the parents of large ones are among them, too.
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

    width, columns = terminal_width(), ["size", "", "used", "session"]
    sizes = {key: sum(segment.tree_bytes for segment in tops) for key, tops in models.items()}
    for model, layout in sorted(models, key=sizes.__getitem__, reverse=True):
        yield ""
        facts = f", {layout_in_words(layout)}: {show_bytes(sizes[model, layout])}"
        yield fitted(shown(model, 200), width - len(facts)) + facts
        rows = fitted_rows([*tree(models[model, layout], "", "", "")], columns, "session", width)
        yield table(columns, rows, "size used")


def _label(index: Index, segment: Segment) -> str:
    shared = f"shared by {segment.n_sessions:,}" if segment.n_sessions else "of no session"
    if not segment.ending:
        words = shown(_words(index, segment).strip(), _MOST_CHARS)
        return f"{shared}, {segment.n_tokens:,} tokens" + (f' "{words}"' if words else "")
    first, n_more = segment.ending[0], len(segment.ending) - 1
    name = shown(called(first.name, index.state.note(first.id)), _NAME_CHARS)
    sessions = f"{first.id[:_ID_CHARS]} {name}".strip() + " (pinned)" * first.pinned
    sessions += f" and {n_more:,} more" if n_more else ""
    is_own = len(segment.ending) == segment.n_sessions
    return sessions if is_own else f"{shared}; end here: {sessions}"


def _bar(n_bytes: int, most: int, glyph: str = "█") -> str:
    return glyph * max(1, round(_BAR * n_bytes / max(most, 1))) if n_bytes else ""
