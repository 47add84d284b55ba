"""The sessions of a running store, for its operator and its agents. HTTP threads ask."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from ..errors import RequestRefused, StoreError
from .block_store import BlockStore
from .disk import DiskStore
from .index import Index
from .records import Session
from .session_file import export_parts, export_records

SHOWN = 50
_TIMEOUT_S = 30.0

Answer = TypeVar("Answer")


class StoredSessions:
    """Sessions for the operator's programs and for agents: shown, and changed.

    All sessions of one name in one namespace are branches of an agent, taken as one. Every method
    may raise RequestRefused.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._last: tuple[Any, dict[str, Any]] = (None, {})

    def describe(self, find: str = "", skip: int = 0, *, with_text: bool = False) -> dict[str, Any]:
        """Return the sessions used last, after the first `skip`, that contain `find`, of `total`.

        A session counts its whole chain; bytes are those on disk. `used` and `created` are seconds
        since the epoch. Only `with_text` are conversations quoted and searched.
        """
        pool = self._store.pool
        with _readable(), self._store.index.asked_once() as index:

            def note_of(session: Session) -> dict[str, str]:
                note = index.state.note(session.id)
                return note if with_text else {**note, "words": ""}

            def says(session: Session) -> bool:
                texts = session.id, session.name or "", *note_of(session).values()
                return find.casefold() in "\n".join(texts).casefold()

            sessions, total = index.sessions(SHOWN, skip), index.n_sessions()
            if find:
                matching = [session for session in index.sessions() if says(session)]
                sessions, total = matching[skip : skip + SHOWN], len(matching)
            notes, saved = [note_of(session) for session in sessions], index.state.saved()
            # Pages ask every few seconds, and long conversations have thousands of blocks.
            state = sessions, notes, total, saved, index.totals(), pool.n_bytes, pool.n_evicted
            before, answer = self._last
            if state == before:
                return answer
            rows = index.outline([session.leaf for session in sessions])
            roots = {key: index.root(key) for key in {session.root for session in sessions}}
        sums: dict[bytes, tuple[int, int, int]] = {}
        for key, parent, n_bytes, _ in rows:
            n_above, n_in_ram_above, bytes_above = sums.get(parent, (0, 0, 0))
            sums[key] = n_above + 1, n_in_ram_above + (key in pool), bytes_above + n_bytes
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

    def pin(self, session_id: str, pinned: bool) -> dict[str, Any]:
        """Pin or unpin a session: a pinned one is never evicted from disk."""

        def change(disk: DiskStore) -> dict[str, Any]:
            session = disk.set_pinned(_session(disk, session_id), pinned)
            return {"id": session.id, "pinned": session.pinned}

        return self.changed(change)

    def rename(self, session_id: str, title: str) -> dict[str, Any]:
        """Give a session a title for people, or take it away with ""."""

        def change(disk: DiskStore) -> dict[str, Any]:
            with disk.lock.held():
                session = _session(disk, session_id)
                disk.index.state.add_note(session.id, title=title)
            return {"id": session.id, "title": title or None}

        return self.changed(change)

    def export(self, session_id: str) -> tuple[int, Iterator[bytes]]:
        """Write what waits of a session; return the exported size in bytes, and the parts."""
        disk = self._store.disk
        self._write_postponed(session_id)
        self.changed(lambda disk: None)
        with _readable():
            with self._store.index.asked_once() as index:
                session = _session(disk, session_id)
                records = export_records(index, session)
            return export_parts(disk.index, session, records)

    def evict(self, session_id: str) -> dict[str, Any]:
        """Evict a session from RAM, except for blocks with other children."""

        def change(disk: DiskStore) -> dict[str, Any]:
            chain = disk.index.chain(_session(disk, session_id).leaf)
            freed = self._store.pool.drop_chain(block.key for block, _ in chain)
            return {"id": session_id, "ram_bytes_freed": freed}

        self._write_postponed(session_id)
        return self.changed(change)

    def _write_postponed(self, session_id: str) -> None:

        chain = self.changed(lambda disk: disk.index.chain(_session(disk, session_id).leaf))
        self._store.writer.write_postponed(ends={block.key for block, _ in chain})

    def delete(self, session_id: str) -> tuple[Session, dict[str, Any]]:
        """Delete a session, what only it needs, and what records of requests say of it."""

        def change(disk: DiskStore) -> tuple[Session, dict[str, Any]]:
            with disk.lock.held():
                session, before = _session(disk, session_id), disk.index.totals().n_bytes
                gone = disk.remove_session(session)
                disk.index.state.forget_requests([session.name])
                freed = before - disk.index.totals().n_bytes
            self._store.writer.withdraw(gone)
            for key in gone:
                self._store.pool.drop_unpinned(key)
            self._store.runs.clear()
            return session, {"id": session_id, "deleted": True, "disk_bytes_freed": freed}

        return self.changed(change)

    def changed(self, change: Callable[[DiskStore], Answer]) -> Answer:
        """Have the writer change the disk, at full speed; return what it returns."""
        future: Future[Answer] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(change(self._store.disk))
                except BaseException as error:
                    future.set_exception(error)

        self._store.writer.submit(run)
        self._store.writer.finish(future.done, _TIMEOUT_S)
        if not future.done() and future.cancel():
            why = f"the store was busy for {_TIMEOUT_S:.0f} s and nothing is changed; ask again"
            raise RequestRefused(why, 503)
        with _readable():
            return future.result()

    # Sessions by name.

    def describe_named(self, namespace: str, name: str) -> dict[str, Any]:
        """Return numbers of tokens, blocks and bytes; `used` is in seconds since the epoch.

        Tokens and precision are those of the branch used last.
        """
        with _readable(), self._store.index.asked_once() as index:
            branches = _branches(index, namespace, name)
            rows = index.outline([session.leaf for session in branches[:500]])
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
        """Pin the session of this name that was saved last, and unpin older ones of this model.

        Return None if none was saved since.
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
        """Change every branch by its id: `pin`, `evict` or `delete`; return whether one exists."""
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


def _session(disk: DiskStore, session_id: str) -> Session:
    session = disk.index.session(session_id)
    if session is None:
        raise RequestRefused(f"no session has the id {session_id!r}; it may be deleted", 404)
    return session


def _branches(index: Index, namespace: str, name: str) -> list[Session]:
    sessions = index.sessions_named(name)
    roots = {session.root: index.root(session.root) for session in sessions}
    return [
        session
        for session in sessions
        if (root := roots[session.root]) is not None and root.namespace == namespace
    ]
