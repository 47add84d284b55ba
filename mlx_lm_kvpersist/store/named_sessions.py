"""All sessions of one name in one namespace, taken as one: the branches of an agent."""

from __future__ import annotations

from typing import Any

from .block_store import BlockStore
from .index import Index, Session
from .stored_sessions import StoredSessions, readable


class NamedSessions:
    """What a store has of a name. HTTP threads. Every method may raise RequestRefused."""

    def __init__(self, store: BlockStore) -> None:
        self._store, self._stored = store, StoredSessions(store)

    def describe(self, namespace: str, name: str) -> dict[str, Any]:
        """Return numbers of tokens, blocks and bytes; `used` is in seconds since the epoch.

        Tokens and precision are those of the branch that was used last. A block in RAM and on disk
        counts in both tiers.
        """
        with readable(), self._store.index.asked_once() as index:
            branches = _branches(index, namespace, name)
            rows = index.outline([session.leaf for session in branches[:500]])
            root = index.root(branches[0].root) if branches else None
        pool = self._store.pool
        keys = [row[0] for row in rows]
        hot = [entry.n_bytes for key in keys if (entry := pool.get(key))]
        parts = [entry.n_bytes for c in pool.checkpoints(keys) if (entry := pool.get(c.key))]
        n_bytes = sum(row[4] for row in rows)
        return {
            "tokens": branches[0].n_tokens if branches else 0,
            "branches": len(branches),
            "bytes": n_bytes,
            "tiers": {
                "hot": {"blocks": len(hot), "bytes": sum(hot) + sum(parts)},
                "warm": {"blocks": len(keys), "bytes": n_bytes},
            },
            "precision": root.precision if root else None,
            "pinned": any(session.pinned for session in branches),
            "used": branches[0].used if branches else None,
        }

    def set_pinned(self, namespace: str, name: str, pinned: bool) -> bool:
        """Pin all branches, or let them go; return whether there are any."""
        ids = self._ids(namespace, name)
        for each in ids:
            self._stored.pin(each, pinned)
        return bool(ids)

    def evict(self, namespace: str, name: str) -> None:
        """Remove from RAM what the disk has; what other conversations in RAM continue stays."""
        for each in self._ids(namespace, name):
            self._stored.evict(each)

    def remove(self, namespace: str, name: str) -> None:
        """Remove the sessions, and from RAM and disk what no other session needs."""
        for each in self._ids(namespace, name):
            self._stored.delete(each)

    def _ids(self, namespace: str, name: str) -> list[str]:
        """Return the ids of the sessions, when the turns that wait are written."""
        return self._stored.changed(
            lambda disk: [session.id for session in _branches(disk.index, namespace, name)]
        )


def _branches(index: Index, namespace: str, name: str) -> list[Session]:
    """Return the sessions, the most recently used first."""
    found = index.sessions_named(name)
    roots = {session.root: index.root(session.root) for session in found}
    return [
        session
        for session in found
        if (root := roots[session.root]) is not None and root.namespace == namespace
    ]
