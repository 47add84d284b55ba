"""`mlx-lm-kvpersist store map`: what takes a store's bytes, by session, shared part and age.

A part is a run of blocks that the same sessions go through. Parts form a tree: a conversation's own
part hangs on those that it shares, such as the system prompt.
"""

from __future__ import annotations

import argparse
import heapq
import re
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
from .output import counted, shown, table, tell, utc_time

_MOST_PARTS = 40
"""The largest ones are drawn."""
_MOST_CHARS = 60
_BAR = 20
_IS_ID = re.compile("[0-9a-f]{8}-?[0-9a-f]{4}|^digest-", re.IGNORECASE)
"""A session's name that is made for programs."""
_UNITS_S = {"d": 86_400, "h": 3600, "min": 60}
_AGES_S = {"1 hour": 3600, "1 day": 86_400, "7 days": 604_800, "30 days": 2_592_000}


@dataclass(eq=False)
class _Part:
    """Blocks that `n_sessions` go through; `first` is the key of the first one.

    `bytes_on` and `used` count the parts that go on from it, too: a use marks the end of a chain
    only. Seconds are since 1970.
    """

    number: int
    root: bytes
    above: _Part | None
    first: bytes
    n_sessions: int
    n_blocks: int = 0
    n_tokens: int = 0
    n_bytes: int = 0
    bytes_on: int = 0
    used: float = 0.0
    on: list[_Part] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    """Those that end in it."""


def run(args: argparse.Namespace) -> int:
    """Run the command. Nothing is locked or changed, so a server may use the folder meanwhile."""
    folder = folder_of(args)
    with reading(args) as index:
        parts = _read(index)
        now, ages = time.time(), dict.fromkeys([*_AGES_S, "longer ago"], 0)
        for part in parts:
            older = (age for age, seconds in _AGES_S.items() if now - part.used < seconds)
            ages[next(older, "longer ago")] += part.n_bytes
        roots, whole = {root.key: root for root, _ in index.roots()}, sum(ages.values())
        if args.json:
            described = [_described(index, part, roots.get(part.root)) for part in parts]
            facts = {"bytes": whole, "bytes_by_age": ages, "parts": described}
            tell(args, {"folder": str(folder), **facts})
            return 0
        n_sessions = sum(len(part.sessions) for part in parts)
        tell(args, None, f"{folder}: {show_bytes(whole)} in {counted(n_sessions, 'session')}")
        if parts:
            rows = [[age, _bar(n, whole), show_bytes(n)] for age, n in ages.items()]
            tell(args, None, *_drawn(index, parts, roots), "", table(["used within", "", ""], rows))
    return 0


def _read(index: Index) -> list[_Part]:
    """Return all parts, those above first."""
    rows = sorted(index.sizes(), key=lambda row: row[3])
    ends: dict[bytes, list[Session]] = defaultdict(list)
    for session in index.sessions():
        ends[session.leaf].append(session)
    n_through = Counter({key: len(found) for key, found in ends.items()})
    for key, parent, *_ in reversed(rows):
        n_through[parent] += n_through[key]
    parts: list[_Part] = []
    part_of: dict[bytes, _Part] = {}
    for key, parent, root, _, n_tokens, n_bytes, used in rows:
        part = above = part_of.get(parent)
        # Either all sessions of the block before go on here, or another part begins.
        if part is None or part.n_sessions != n_through[key]:
            part = _Part(len(parts), root, above, key, n_through[key])
            parts.append(part)
            if above is not None:
                above.on.append(part)
        part_of[key] = part
        part.sessions += ends.get(key, ())
        part.n_blocks, part.n_tokens = part.n_blocks + 1, part.n_tokens + n_tokens
        part.n_bytes, part.used = part.n_bytes + n_bytes, max(part.used, used)
    for part in reversed(parts):
        part.bytes_on += part.n_bytes
        if part.above is not None:
            part.above.bytes_on += part.bytes_on
            part.above.used = max(part.above.used, part.used)
    return parts


def _described(index: Index, part: _Part, root: Root | None) -> dict[str, Any]:
    return {
        "part": part.number,
        "goes_on_from": None if part.above is None else part.above.number,
        "model": root.model if root else None,
        "precision": root.layout if root else None,
        "namespace": root.namespace if root else None,
        "shared_by": part.n_sessions,
        "sessions": [
            {"id": one.id, "name": one.name, "title": index.state.note(one.id).get("title")}
            for one in part.sessions
        ],
        "words": _words(index, part),
        "blocks": part.n_blocks,
        "tokens": part.n_tokens,
        "bytes": part.n_bytes,
        "used": utc_time(part.used),
    }


def _words(index: Index, part: _Part) -> str:
    """Return the text that a part begins with, "" where none is stored."""
    found = index.block(part.first)
    return found[0].text[:_MOST_CHARS] if found else ""


def _drawn(
    index: Index, parts: Sequence[_Part], roots: Mapping[bytes, Root]
) -> Iterator[str | Table]:
    """Yield a head and a tree for each model, that with most first; small parts are summed up."""
    models: dict[tuple[str, str], list[_Part]] = defaultdict(list)
    for part in parts:
        if part.above is None and (root := roots.get(part.root)) is not None:
            models[root.model, root.layout].append(part)
    # A part is never larger than what it goes on from, so that is among them, too.
    large = set(heapq.nlargest(_MOST_PARTS, parts, key=lambda part: part.bytes_on))
    most, now = max(part.n_bytes for part in parts), time.time()

    def tree(tops: Sequence[_Part], indent: str, first: str, last: str) -> Iterator[list[str]]:
        tops = sorted(tops, key=lambda part: part.bytes_on, reverse=True)
        drawn = [one for one in tops if one in large]
        rest = [one for one in tops if one not in large]
        for number, part in enumerate(drawn):
            is_last = number == len(drawn) - 1 and not rest
            bar = _bar(part.n_bytes, most, "█" if part.n_sessions == 1 else "▒")
            label = indent + (last if is_last else first) + _label(index, part)
            yield [show_bytes(part.n_bytes), bar, _ago(now - part.used), label]
            yield from tree(part.on, indent + ("  " if is_last else "│ ") * bool(first), "├ ", "└ ")
        if rest:
            n_bytes, used = sum(one.bytes_on for one in rest), max(one.used for one in rest)
            n_sessions = sum(one.n_sessions for one in rest)
            more = counted(n_sessions, "more session") if n_sessions else "more of no session"
            yield [show_bytes(n_bytes), "", _ago(now - used), f"{indent}{last}… and {more}"]

    sizes = {key: sum(part.bytes_on for part in tops) for key, tops in models.items()}
    for model, layout in sorted(models, key=sizes.__getitem__, reverse=True):
        yield ""
        yield f"{shown(model, 200)}, {layout_in_words(layout)}: {show_bytes(sizes[model, layout])}"
        yield table(["size", "", "used", ""], tree(models[model, layout], "", "", ""), "size used")


def _label(index: Index, part: _Part) -> str:
    """Return what people know a part by."""
    ended = ""
    if part.sessions:
        first, *others = part.sessions
        ended = _called(index, first) + (f" and {len(others):,} more" if others else "")
        if len(part.sessions) == part.n_sessions:
            return ended
    words = shown(_words(index, part).strip(), _MOST_CHARS)
    shared = f"shared by {part.n_sessions:,}" if part.n_sessions else "of no session"
    said = f"{shared}, {part.n_tokens:,} tokens" + (f' "{words}"' if words else "")
    return said + (f"; end here: {ended}" if ended else "")


def _called(index: Index, session: Session) -> str:
    """Return a session's id, and what people call it, as the page does."""
    note, name = index.state.note(session.id), session.name or ""
    words = note.get("words", "")
    called = note.get("title") or (words if words and _IS_ID.search(name) else name or words)
    return f"{session.id} {shown(called)}".strip() + (" (pinned)" if session.pinned else "")


def _bar(n_bytes: int, most: int, glyph: str = "█") -> str:
    return glyph * max(1, round(_BAR * n_bytes / max(most, 1))) if n_bytes else ""


def _ago(seconds: float) -> str:
    for unit, its_seconds in _UNITS_S.items():
        if seconds >= its_seconds:
            return f"{seconds // its_seconds:.0f} {unit}"
    return "now"
