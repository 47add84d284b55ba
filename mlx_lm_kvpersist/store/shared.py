"""The shared tier: blocks in a bucket or folder that several servers use.

Blocks never change, so servers need not agree: each puts what is not there (`putting`), fetches
what a prompt needs before the request is queued (`fetching`), and checks it (`shared_objects`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as TooLate
from typing import Any

from .disk_tier import DiskTier
from .fetching import N_AHEAD, Fetching, Wanted
from .pool import BlockPool
from .putting import Putting, RepliesOf
from .records import Commit, KVBlock, Saved
from .shared_objects import SharedObjects
from .threads import Threads
from .tier import SHARED

SLOW_S, MOST_SLOW_S = 30.0, 1800.0
"""How long a slow store is not asked, at first and at most."""
_SLOW = "the shared store is slower than computing"


class SharedTier:
    """Blocks in a store that several servers use. Any thread may ask.

    `land` takes what was fetched, at most half of what `pool` may have.
    """

    name = SHARED

    def __init__(
        self,
        objects: SharedObjects,
        disk: DiskTier,
        land: Callable[[Commit, list[KVBlock]], None],
        pool: BlockPool,
        replies_of: RepliesOf = lambda root, messages: {},
        max_bytes: int | None = None,
    ) -> None:
        self._land, self._pool = land, pool
        self.objects = objects
        self.putting = Putting(objects, disk, replies_of, max_bytes)
        self._threads = Threads(N_AHEAD, "kvpersist-shared")
        self._slow_s = self._slow_until_s = self._slow_loss_s = 0.0
        """How long a slow store is not asked, until when, and the most loss that does not ask."""

    def stats(self) -> dict[str, Any]:
        """Return what was put and fetched, and why nothing is now, if so."""
        return {
            "blocks": len(self.objects.seen_s),
            "evicted": 0,
            "asked_again_tokens": 0,
            **self.objects.counts,
            "failed_with": self.objects.failed_with,
            "waiting": len(self.putting.waiting),
        }

    def __contains__(self, key: bytes) -> bool:
        """Say whether an object was known to be there lately; the store is not asked."""
        return self.objects.is_seen(key)

    def remove(self, key: bytes, reason: str | None = None) -> None:
        """Have a bad block replaced when this server computes it again."""
        self.objects.forget(key, is_bad=reason is not None)

    def fetch(self, wanted: Wanted) -> str:
        """Fetch a prompt while that is quicker than computing; return a note. HTTP thread."""
        if failed_with := self.objects.reads.failed_with:
            return f"the shared store is not used now: {failed_with}"
        loss_s = wanted.loss_s
        if time.monotonic() < self._slow_until_s and loss_s <= self._slow_loss_s:
            return _SLOW
        most_bytes = self._pool.max_bytes // 2
        fetching = Fetching(self.objects, self._threads, self._land, most_bytes, wanted)
        try:
            note = fetching.run()
        except TooLate:
            self.objects.failures.add("%s: it is tried less often", _SLOW)
            self._slow_s = min(max(2 * self._slow_s, SLOW_S), MOST_SLOW_S)
            self._slow_until_s = time.monotonic() + self._slow_s
            self._slow_loss_s = max(self._slow_loss_s, loss_s)
            return _SLOW
        except (OSError, RuntimeError) as error:
            self.objects.reads.failed(error)
            return f"the shared store cannot be read: {error}"
        if loss_s <= self._slow_loss_s:
            self._slow_s = self._slow_loss_s = 0.0
        return note

    def store(
        self, commits: Sequence[Commit], entry_of: Callable[[bytes], KVBlock | None]
    ) -> list[Saved | Exception | None]:
        """Have stored commits put; None for a commit if too much waits."""
        return [Saved(commit) if self.putting.write(commit) else None for commit in commits]

    def close(self, timeout_s: float) -> None:
        """Put the waiting objects, for at most `timeout_s` seconds, and stop."""
        self.putting.close(timeout_s)
        self.objects.objects.close()
        self._threads.close(0)
