"""Put records from the disk into a shared store, on a separate thread.

Waiting objects are on disk, not in RAM. An object that cannot be put is skipped after some
attempts.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from ..block import BLOCK_TOKENS, Block, Record, Root
from ..errors import BlockCorrupt
from .disk_tier import DiskTier
from .objects import surplus
from .records import Commit
from .shared_objects import Conversation, SharedObjects, conversation_key, layout_key, opening_of

logger = logging.getLogger(__name__)

MAX_WAITING = 4096
PROBE_S = 10.0
PRUNE_S = 600.0
"""How often a server that puts objects checks whether the size limit is exceeded."""
MOST_ATTEMPTS = 3
"""At most this many attempts per object, and failures in a row."""
CLOSING_S = 2.0
_N_TURNS = 256


RepliesOf = Callable[[Root, Sequence[Mapping[str, Any]]], Mapping[bytes, bytes]]
"""Returns the packed ids of replies among messages, by digest."""


@dataclass(frozen=True)
class _Turn:
    """A conversation's new `leaf`, if a turn has ended, or new replies."""

    root: Root
    messages: Sequence[Mapping[str, Any]]
    leaf: bytes | None = None
    replies: Mapping[bytes, bytes] = field(default_factory=dict)


class Putting:
    """Puts blocks, checkpoints and conversations.

    `disk` has the records, and `replies_of` returns the remembered replies among messages. The
    oldest objects are removed if all servers have put more than `max_bytes`.
    """

    def __init__(
        self,
        store: SharedObjects,
        disk: DiskTier,
        replies_of: RepliesOf,
        max_bytes: int | None = None,
    ) -> None:
        self._store, self._disk, self._replies_of = store, disk, replies_of
        self._max_bytes, self._prune_at_s = max_bytes, time.monotonic()
        self._turns: OrderedDict[bytes, _Turn] = OrderedDict()
        self.waiting: deque[tuple[Record | _Turn | bytes, int]] = deque()
        """Objects to put, with failed attempts. A key stands for the chain up to its block."""
        self._since_s = 0.0
        self._changes = SimpleQueue[None]()
        self._is_closing = self._is_busy = False
        self._thread = Thread(target=self._run, name="kvpersist-put", daemon=True)
        self._thread.start()

    def write(self, commit: Commit) -> bool:
        """Queue a written commit; return False if too much waits already.

        Blocks that are not full are left out unless the turn has ended, because no prompt finds
        them.
        """
        blocks = [block for block in commit.blocks if commit.leaf or block.n_tokens == BLOCK_TOKENS]
        records: list[Record] = [*blocks, *commit.checkpoints]
        unseen = [record for record in records if not self._store.is_seen(record.key)]
        before = [commit.parent] if commit.leaf and commit.parent != commit.root.key else []
        new: list[Record | _Turn | bytes] = [*before, *unseen, *self._new_of(commit)]
        if len(self.waiting) + len(new) > MAX_WAITING:
            self._store.counts["not_written"] += len(new)
            return False
        self.waiting += ((item, 0) for item in new)
        self._changes.put(None)
        return True

    def _new_of(self, commit: Commit) -> list[_Turn]:
        new: list[_Turn] = []
        if commit.leaf is not None:
            turn = _Turn(commit.root, commit.leaf.messages, commit.leaf.key)
            self._turns[commit.leaf.key] = turn
            self._turns.move_to_end(commit.leaf.key)
            while len(self._turns) > _N_TURNS:
                self._turns.popitem(last=False)
            new.append(turn)
        else:
            ends = dict.fromkeys(checkpoint.block for checkpoint in commit.checkpoints)
            new += [self._turns[end] for end in ends if end in self._turns]
        if commit.replies and commit.messages:
            new.append(_Turn(commit.root, commit.messages, replies=commit.replies))
        return new

    def _run(self) -> None:
        while True:
            probe_s = time.monotonic() + PROBE_S
            with suppress(Empty):
                while self.has_done_all and not self._is_closing:
                    self._changes.get(timeout=max(0.0, probe_s - time.monotonic()))
            if self._is_closing and self.has_done_all:
                return
            self._is_busy = True
            if self.waiting or self._store.failed_with:
                self._work()
            self._is_busy = False

    @property
    def has_done_all(self) -> bool:
        """Whether the queue is empty, or putting has failed."""
        return not self._is_busy and (not self.waiting or bool(self._store.failed_with))

    def _work(self) -> None:
        """Try a store that failed, and put the waiting objects as long as the store answers."""
        store, self._since_s = self._store, time.monotonic()
        if store.reads.failed_with and not store.answers():
            return
        self._prune()
        n_before, n_in_a_row = store.counts["written"], 0
        while self.waiting and n_in_a_row < MOST_ATTEMPTS:
            (item, n_failed), self._since_s = self.waiting[0], time.monotonic()
            if isinstance(item, bytes):
                self.waiting.popleft()
                blocks = [block for block in self._disk.chain(item) if not store.is_seen(block.key)]
                self.waiting.extendleft((block, 0) for block in reversed(blocks))
                continue
            try:
                self._put_turn(item) if isinstance(item, _Turn) else self._put(item)
                n_in_a_row = 0
            except Exception as error:
                if not store.answers():
                    return
                n_in_a_row, n_failed, failed_with = n_in_a_row + 1, n_failed + 1, error
                if n_failed < MOST_ATTEMPTS:
                    self.waiting.append((item, n_failed))
                else:
                    store.counts["not_written"] += 1
                    message = "an object cannot be put into the shared store: %s"
                    store.failures.add(message, str(error) or repr(error))
            self.waiting.popleft()
        if store.counts["written"] > n_before:
            store.writes.worked()
        elif self.waiting and n_in_a_row == MOST_ATTEMPTS:
            store.writes.failed(failed_with)

    def _put(self, record: Record) -> None:
        if not self._store.lacks(record.key):
            return
        try:
            content = self._disk.content_of(record)
        except (FileNotFoundError, BlockCorrupt):
            return  # it was evicted, or replaced by a longer block, or is damaged
        self._store.put(record.key, content)

    def _put_turn(self, new: _Turn) -> None:
        """Put a conversation, with the replies that were put before."""
        store, root, chain = self._store, new.root, tuple[Block, ...]()
        if new.leaf is not None and not (chain := tuple(self._disk.chain(new.leaf))):
            return  # it was evicted, or removed
        opening = opening_of(new.messages, chain[0].packed_ids if chain else b"")
        stored, _ = store.conversation(root, opening)
        checkpoints = stored.checkpoints
        if chain:
            checkpoints = tuple(self._disk.checkpoints([block.key for block in chain]))
        remembered = {} if new.leaf is None else self._replies_of(root, new.messages)
        replies = {**stored.replies, **remembered, **new.replies}
        now = Conversation(chain or stored.chain, checkpoints, replies)
        store.put(conversation_key(root, opening), now.packed())
        if store.lacks(layout := layout_key(root, opening)):
            store.put(layout, root.layout.encode())

    def _prune(self) -> None:
        if self._max_bytes is None or time.monotonic() < self._prune_at_s:
            return
        self._prune_at_s = time.monotonic() + PRUNE_S
        try:
            old = surplus(self._store.objects.list(), None, self._max_bytes)
            self._store.objects.delete([item.name for item in old])
        except Exception as error:  # listing may be forbidden although putting is allowed
            if self._store.answers():
                self._store.failures.add("the shared store's size cannot be limited: %s", error)
            return
        if old:
            logger.info(
                "kvpersist: %d objects beyond the shared store's size were removed", len(old)
            )

    def close(self, timeout_s: float) -> None:
        """Put the waiting objects, for at most `timeout_s` seconds, and stop."""
        self._is_closing = True
        self._changes.put(None)
        ends_s = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < ends_s:
            self._thread.join(0.02)
            if self._is_busy and time.monotonic() > self._since_s + CLOSING_S:
                break
        if self.waiting:
            logger.warning(
                "kvpersist: %d objects were not put into the shared store", len(self.waiting)
            )
