"""The stored sessions of a running server, for its operator and its agents. HTTP threads."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar

from ..block import Record
from ..errors import RequestRefused, StoreError
from .block_store import BlockStore
from .disk import DiskStore
from .index import Index
from .records import Session
from .runs import StoredRuns
from .session_file import export_parts, export_records
from .writer import run_into

SHOWN = 50
_TIMEOUT_S = 30.0

Answer = TypeVar("Answer")


class StoredSessions:
    """Shows and changes sessions, for the operator's programs and for agents.

    All sessions of one name in one namespace are the branches of one agent. Every method may raise
    RequestRefused.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._last: tuple[Any, dict[str, Any]] = (None, {})
        self._by_size: tuple[Any, list[Session]] = (None, [])

    def describe(
        self, find: str = "", skip: int = 0, *, by_size: bool = False, with_text: bool = False
    ) -> dict[str, Any]:
        """Return up to `SHOWN` sessions that match `find`, after the first `skip`, and a `total`.

        A session matches if its id, name, title, client or first words contain `find`. `total` is
        the number of all matching sessions. The most recently used sessions come first, or the
        largest sessions if `by_size`. Blocks and bytes are those of the whole chain on disk. `used`
        and `created` are seconds since the epoch. First words are shown and searched only if
        `with_text`.
        """
        pool = self._store.pool
        with _readable(), self._store.index.asked_once() as index:
            sessions, total = index.sessions(SHOWN, skip), index.n_sessions()
            if find or by_size:
                everything = self._sorted_by_size(index) if by_size else index.sessions()
                matching = index.state.matching(everything, find, with_text=with_text)
                sessions, total = matching[skip : skip + SHOWN], len(matching)
            notes = [index.state.note(session.id, with_text=with_text) for session in sessions]
            saved = index.state.saved()
            # The last answer is kept: pages ask every few seconds, and there are many blocks.
            state = sessions, notes, total, saved, index.totals(), pool.n_bytes, pool.n_evicted
            before, answer = self._last
            if state == before:
                return answer
            sums = self._sums(index, sessions)
            roots = {key: index.root(key) for key in {session.root for session in sessions}}
        described = []
        for session, note in zip(sessions, notes, strict=True):
            n_blocks, n_in_ram, n_bytes = sums.get(session.leaf, (0, 0, 0))
            root = roots[session.root]
            described.append(
                {
                    "id": session.id,
                    "name": session.name,
                    **{name: note.get(name) or None for name in ("title", "client", "words")},
                    "model": root.model if root else None,
                    "namespace": root.namespace if root else None,
                    "tier": "ram" if n_blocks == n_in_ram else "disk",
                    "tokens": session.n_tokens,
                    "blocks": n_blocks,
                    "ram_blocks": n_in_ram,
                    "bytes": n_bytes,
                    "pinned": session.pinned,
                    "created": session.created,
                    "used": session.used,
                }
            )
        is_all = len(described) == total
        answer = {"is_all": is_all, "total": total, "saved": saved, "sessions": described}
        self._last = state, answer
        return answer

    def _sums(self, index: Index, sessions: Sequence[Session]) -> dict[bytes, tuple[int, int, int]]:
        """Return each session's blocks, blocks in RAM, and bytes, by its last block (leaf)."""
        sums: dict[bytes, tuple[int, int, int]] = {}
        for key, parent, n_bytes, *_ in index.outline({session.leaf for session in sessions}):
            n_above, n_in_ram_above, bytes_above = sums.get(parent, (0, 0, 0))
            n_in_ram = n_in_ram_above + (key in self._store.pool)
            sums[key] = n_above + 1, n_in_ram, bytes_above + n_bytes
        return sums

    def _sorted_by_size(self, index: Index) -> list[Session]:
        """Return all sessions, the largest first. Their sizes are computed only after a change."""
        sessions = index.sessions()
        state = sessions, index.totals()
        before, answer = self._by_size
        if state != before:
            sums = self._sums(index, sessions)
            sizes = {session.id: sums.get(session.leaf, (0, 0, 0))[2] for session in sessions}
            answer = sorted(sessions, key=lambda session: -sizes[session.id])
            self._by_size = state, answer
        return answer

    def add_names(
        self, records: Sequence[dict[str, Any]], *, with_text: bool
    ) -> list[dict[str, Any]]:
        """Add to each request's record a session's `title` and, if `with_text`, first `words`.

        If several sessions have the request's name and namespace, the last used session is taken.
        Both fields are None without a session, and while the index cannot be read.
        """
        wanted = {(record["session"], record["namespace"]) for record in records}
        newest: dict[tuple[str | None, str], Session] = {}
        with self._store.view.asked_once() as index:
            root_of = cache(index.root)
            for session in index.sessions_named(*{name for name, _ in wanted if name}):
                if root := root_of(session.root):
                    newest.setdefault((session.name, root.namespace), session)
            notes = {
                key: index.state.note(newest[key].id, with_text=with_text)
                for key in wanted & newest.keys()
            }
        return [
            {**record, **{name: note.get(name) or None for name in ("title", "words")}}
            for record in records
            for note in [notes.get((record["session"], record["namespace"]), {})]
        ]

    def select(
        self, ids: Collection[str] = (), find: str | None = None, *, with_text: bool = False
    ) -> dict[str, Any]:
        """Return the ids of sessions, and how many bytes deleting them all would free on disk.

        Without `find`, `ids` names the sessions. Ids of deleted sessions are left out.
        """
        with _readable(), self._store.index.asked_once() as index:
            sessions = index.sessions()
            if find is None:
                wanted = set(ids)
                sessions = [session for session in sessions if session.id in wanted]
            else:
                sessions = index.state.matching(sessions, find, with_text=with_text)
            n_bytes = _freed_bytes(index, sessions)
        return {"ids": [session.id for session in sessions], "disk_bytes": n_bytes}

    def pin(self, session_id: str, pinned: bool) -> dict[str, Any]:
        """Pin or unpin a session: a pinned session is never evicted from disk."""

        def change(disk: DiskStore) -> dict[str, Any]:
            session = disk.set_pinned(_session(disk, session_id), pinned)
            return {"id": session.id, "pinned": session.pinned}

        return self.changed(change)

    def rename(self, session_id: str, title: str) -> dict[str, Any]:
        """Give a session a title for people, or remove the title with ""."""

        def change(disk: DiskStore) -> dict[str, Any]:
            session = _session(disk, session_id)
            disk.index.state.add_note(session.id, title=title)
            return {"id": session.id, "title": title or None}

        return self.changed(change)

    def export(self, session_id: str) -> tuple[int, Iterator[bytes]]:
        """Write a session's postponed checkpoints; return the exported size in bytes, and parts."""

        def find(disk: DiskStore) -> tuple[Session, list[Record]]:
            session = _session(disk, session_id)
            return session, export_records(disk.index, session)

        self._write_postponed(session_id)
        session, records = self.changed(find)
        with _readable():
            return export_parts(self._store.index, session, records)

    def evict(self, session_id: str) -> dict[str, Any]:
        """Evict a session from RAM, except for blocks that other sessions continue."""

        def change(disk: DiskStore) -> dict[str, Any]:
            chain = disk.index.chain(_session(disk, session_id).leaf)
            freed = self._store.pool.drop_chain(block.key for block, _ in chain)
            return {"id": session_id, "ram_bytes_freed": freed}

        self._write_postponed(session_id)
        return self.changed(change)

    def _write_postponed(self, session_id: str) -> None:
        chain = self.changed(lambda disk: disk.index.chain(_session(disk, session_id).leaf))
        self._store.writer.write_postponed(ends={block.key for block, _ in chain})

    def delete(self, session_id: str) -> tuple[Session, str | None, dict[str, Any]]:
        """Delete a session, the blocks that only it needs, and its text in records of requests.

        Return the session, its namespace if it is known, and what was freed.
        """

        def change(disk: DiskStore) -> tuple[Session, str | None, dict[str, Any]]:
            session, before = _session(disk, session_id), disk.index.totals().n_bytes
            namespace = disk.index.namespace(session)
            gone = disk.remove_session(session)
            disk.index.state.forget_requests([(session.name, namespace)])
            disk.index.database.empty_log()
            freed = before - disk.index.totals().n_bytes
            self._store.writer.withdraw(block.key for block in gone)
            for block in gone:
                self._store.pool.drop_beginnings(block)
                self._store.pool.drop_unpinned(block.key)
            self._store.runs = StoredRuns(disk.index)  # ids read before may be deleted ids
            done = {"id": session_id, "deleted": True, "disk_bytes_freed": freed}
            return session, namespace, done

        return self.changed(change)

    def changed(self, change: Callable[[DiskStore], Answer]) -> Answer:
        """Let the writer change the disk under its lock, without pauses; return the result."""
        disk, future = self._store.disk, Future[Answer]()

        def run() -> Answer:
            with disk.lock.held():
                disk.follow_folder()  # otherwise a replaced index would be changed
                return change(disk)

        self._store.writer.submit(partial(run_into, future, run))
        self._store.writer.finish(future.done, _TIMEOUT_S)
        if not future.done():
            may_come = not future.cancel()
            what = "the change may still be made" if may_come else "nothing was changed; ask again"
            raise RequestRefused(f"the store was busy for {_TIMEOUT_S:.0f} s and {what}", 503)
        with _readable():
            return future.result()

    # Sessions by name.

    def describe_named(self, namespace: str, name: str) -> dict[str, Any]:
        """Describe the branches of a name together; `used` is in seconds since the epoch.

        Tokens and precision are those of the most recently used branch.
        """
        with _readable(), self._store.index.asked_once() as index:
            branches = _branches(index, namespace, name)
            rows = index.outline({session.leaf for session in branches})
            root = index.root(branches[0].root) if branches else None
        pool = self._store.pool
        keys = [row[0] for row in rows]
        in_ram = [entry.n_bytes for key in keys if (entry := pool.get(key))]
        checkpoint_bytes = [
            entry.n_bytes for c in pool.checkpoints(keys) if (entry := pool.get(c.key))
        ]
        n_bytes = sum(row[2] for row in rows)
        return {
            "tokens": branches[0].n_tokens if branches else 0,
            "branches": len(branches),
            "bytes": n_bytes,
            "tiers": {
                "ram": {"blocks": len(in_ram), "bytes": sum(in_ram) + sum(checkpoint_bytes)},
                "disk": {"blocks": len(keys), "bytes": n_bytes},
            },
            "precision": root.layout if root else None,
            "pinned": any(session.pinned for session in branches),
            "used": branches[0].used if branches else None,
        }

    def pin_newest(self, namespace: str, name: str, since_s: float) -> dict[str, Any] | None:
        """Pin the newest session of a name, and unpin the name's older sessions of that model.

        Return None if no session was saved since `since_s`.
        """

        def change(disk: DiskStore) -> dict[str, Any] | None:
            branches = _branches(disk.index, namespace, name)
            if not branches or branches[0].used < since_s:
                return None
            newest, *older = branches
            for session in older:
                if session.pinned and session.root == newest.root:
                    disk.set_pinned(session, False)
            disk.set_pinned(newest, True)
            return {"id": newest.id, "name": name, "tokens": newest.n_tokens, "pinned": True}

        return self.changed(change)

    def each_named(self, namespace: str, name: str, change: Callable[[str], object]) -> bool:
        """Call `change`, such as `evict`, with each branch's id; return whether a branch exists."""
        ids = self.changed(
            lambda disk: [session.id for session in _branches(disk.index, namespace, name)]
        )
        for session_id in ids:
            change(session_id)
        return bool(ids)


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error, StoreError) as error:
        raise RequestRefused(f"the store cannot be used: {error}", 503) from error


def _freed_bytes(index: Index, sessions: Sequence[Session]) -> int:
    """Return the bytes of the blocks and checkpoints that only these sessions need."""
    outline = index.outline({session.leaf for session in sessions})
    rows = {key: (parent, n_bytes) for key, parent, n_bytes, *_ in outline}
    # A block is removed if all of its children, and all sessions that end in it, are removed.
    n_kept = Counter({key: n_children for key, _, _, n_children, _ in outline})
    n_kept.update(session.leaf for session in index.sessions_at(*rows))
    n_kept.subtract(session.leaf for session in sessions)
    freed = 0
    for key in reversed(rows):  # children before their parents
        parent, n_bytes = rows[key]
        if n_kept[key] <= 0:
            n_kept[parent] -= 1
            freed += n_bytes
    return freed


def _session(disk: DiskStore, session_id: str) -> Session:
    # SQLite takes no text that is not valid Unicode.
    session = disk.index.session(session_id) if session_id.isascii() else None
    if session is None:
        raise RequestRefused(f"no session has the id {session_id!r}; it may be deleted", 404)
    return session


def _branches(index: Index, namespace: str, name: str) -> list[Session]:
    sessions = index.sessions_named(name)
    return [session for session in sessions if index.namespace(session) == namespace]
