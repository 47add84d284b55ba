"""The shared tier: blocks in a bucket or folder that several servers use.

Blocks never change, so servers need no coordination. Before a request is queued, its HTTP thread
fetches blocks as long as that is quicker than computing; a lookup never asks the store. A separate
thread puts missing objects, which wait on disk, not in RAM.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import dropwhile, takewhile
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from ..block import BLOCK_TOKENS, Block, Checkpoint, Record, Root, block_key, pack_ids
from ..errors import BlockCorrupt
from .disk_tier import DiskTier
from .objects import surplus
from .pool import BlockPool
from .records import SHARED, Commit, KVBlock, Saved
from .shared_objects import (
    OPENING_TOKENS,
    Conversation,
    SharedObjects,
    conversation_key,
    layout_key,
    opening_of,
)
from .writer import Result, Threads

logger = logging.getLogger(__name__)

MAX_WAITING = 4096
PROBE_S = 10.0
PRUNE_S = 600.0
"""How often a server that puts objects checks whether the size limit is exceeded."""
MOST_ATTEMPTS = 3
"""The most attempts to put one object, and the most failures in a row before a pause."""
CLOSING_S = 2.0
_N_TURNS = 256
N_AHEAD = 6
"""The most objects fetched at the same time. The first is fetched alone, to arrive sooner."""
MOST_LOSS = 0.06
"""A useless fetch may cost a prompt this share of its computing time, but at least `LEAST_LOSS_S`
and at most `MOST_LOSS_S`."""
LEAST_LOSS_S, MOST_LOSS_S = 0.02, 2.0
SLOW_S, MOST_SLOW_S = 30.0, 1800.0
"""How long a slow store is skipped, at first and at most."""
_SLOW = "the shared store is slower than computing"

RepliesOf = Callable[[Root, Sequence[Mapping[str, Any]]], Mapping[bytes, bytes]]
"""Returns the remembered replies among messages, as in `Commit.replies`."""


@dataclass(frozen=True)
class _Turn:
    """A conversation's new `leaf` after a turn, or only its new `replies`."""

    root: Root
    messages: Sequence[Mapping[str, Any]]
    leaf: bytes | None = None
    replies: Mapping[bytes, bytes] = field(default_factory=dict)


class Putting:
    """Puts blocks, checkpoints and conversations.

    If all objects in the store together exceed `max_bytes`, the oldest objects are removed.
    """

    def __init__(
        self, store: SharedObjects, disk: DiskTier, replies_of: RepliesOf, max_bytes: int | None
    ) -> None:
        self._store, self._disk, self._replies_of = store, disk, replies_of
        self._max_bytes, self._prune_at_s = max_bytes, time.monotonic()
        self._turns: OrderedDict[bytes, _Turn] = OrderedDict()
        self.waiting: deque[tuple[Record | _Turn | bytes, int]] = deque()
        """Objects to put, each with its number of failures. A key stands for a block's chain."""
        self._since_s = 0.0
        self._changes = SimpleQueue[None]()
        self._is_closing = self._is_busy = False
        self._thread = Thread(target=self._run, name="kvpersist-put", daemon=True)
        self._thread.start()

    def write(self, commit: Commit) -> bool:
        """Queue a written commit; return False if too much waits already.

        Until the turn ends, blocks that are not full are left out: no prompt finds them.
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
        return not self._is_busy and (not self.waiting or bool(self._store.failed_with))

    def _work(self) -> None:
        """Ask a failed store again; put the waiting objects as long as the store answers."""
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
        """Put a conversation, and keep the replies that its object already has."""
        store, root, chain = self._store, new.root, tuple[Block, ...]()
        if new.leaf is not None and not (chain := tuple(self._disk.chain(new.leaf))):
            return  # it was evicted, or removed
        opening = opening_of(new.messages, chain[0].packed_ids if chain else b"")
        now = store.conversation(root, opening)
        replies = {**now.replies, **new.replies}
        if chain:
            checkpoints = self._disk.checkpoints([block.key for block in chain])
            now = Conversation(chain, tuple(checkpoints))
            replies |= self._replies_of(root, new.messages)
        store.put(conversation_key(root, opening), replace(now, replies=replies).packed())
        if store.lacks(layout := layout_key(root, opening)):
            store.put(layout, root.layout.encode())

    def _prune(self) -> None:
        if self._max_bytes is None or time.monotonic() < self._prune_at_s:
            return
        self._prune_at_s = time.monotonic() + PRUNE_S
        try:
            old = surplus(self._store.objects.list(), None, self._max_bytes)
            self._store.objects.delete([item.name for item in old])
            if old:
                logger.info(
                    "kvpersist: %d objects beyond the shared store's size were removed", len(old)
                )
        except Exception as error:  # listing may be forbidden although putting is allowed
            if self._store.answers():
                self._store.failures.add("the shared store's size cannot be limited: %s", error)

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


@dataclass(frozen=True)
class Plan:
    """The blocks that match a prompt's beginning, and how many tokens they can restore.

    `missing` are the records to fetch, with approximate sizes in bytes, in the order of use.
    """

    path: Sequence[Block] = ()
    missing: Sequence[tuple[Record, int]] = ()
    n_tokens: int = 0


@dataclass(frozen=True)
class Wanted:
    """A prompt whose blocks in `chain` are on this server, and the functions to fetch the rest.

    `plan` returns the needed records of a conversation. `compute_s` returns the seconds to compute
    a number of tokens from a position. `learn` stores replies and returns the prompt with the
    model's own ids for them. An object has at most `max_bytes`. The model needs checkpoints unless
    `any_prefix`.
    """

    root: Root
    ids: Sequence[int]
    messages: Sequence[Any]
    chain: Sequence[Block]
    plan: Callable[[Conversation], Plan]
    compute_s: Callable[[int, int], float]
    learn: Callable[[Mapping[bytes, bytes]], Wanted]
    max_bytes: int
    any_prefix: bool = True

    @property
    def n_tokens(self) -> int:
        """Tokens of the prompt that this server has."""
        return self.chain[-1].stop if self.chain else 0

    @property
    def loss_s(self) -> float:
        """Seconds that the prompt may lose if fetching brings nothing."""
        left_s = self.compute_s(self.n_tokens, len(self.ids) - self.n_tokens)
        return min(MOST_LOSS_S, max(LEAST_LOSS_S, MOST_LOSS * left_s))

    def keys(self) -> list[bytes]:
        """Return the keys of the full blocks after `chain`, computed from the prompt's ids."""
        if not self.any_prefix:
            return []
        parent = self.chain[-1].key if self.chain else self.root.key
        keys = []
        for start in range(self.n_tokens, len(self.ids) - BLOCK_TOKENS, BLOCK_TOKENS):
            parent = block_key(parent, pack_ids(self.ids[start : start + BLOCK_TOKENS]))
            keys.append(parent)
        return keys


class Fetching:
    """Fetches a prompt's blocks into RAM, up to half of RAM's budget."""

    def __init__(self, tier: SharedTier, wanted: Wanted) -> None:
        self._tier, self._wanted = tier, wanted
        self._started_s = time.monotonic()
        self._plan = Plan()
        self._coming: dict[bytes, Future[KVBlock | None]] = {}
        self._got: dict[bytes, KVBlock] = {}
        self._n_tokens = self._n_bytes = 0

    def run(self) -> str:
        """Fetch, and return a note for people. Fetched blocks are used even if this raises.

        Raises TooLate if fetching takes longer than it saves, and OSError or RuntimeError.
        """
        wanted = self._wanted
        opening = opening_of(wanted.messages, pack_ids(wanted.ids[:OPENING_TOKENS]))
        ask = partial(self._tier.objects.conversation, wanted.root, opening)
        coming = self._tier.threads.submit(ask)
        self._ask(wanted.keys()[:1])
        beyond: list[bytes] = []
        try:
            conversation = self._result(coming)
            if conversation.replies:
                wanted = self._wanted = wanted.learn(conversation.replies)
            self._plan = wanted.plan(conversation)
            beyond = self._beyond()
            self._fetch([*(record.key for record, _ in self._plan.missing), *beyond])
            return conversation.note
        finally:
            self._land(beyond)
            for future in self._coming.values():
                future.cancel()

    def _beyond(self) -> list[bytes]:
        """Compute, from the prompt's ids, the keys of blocks after the conversation's blocks."""
        wanted = self._wanted
        own = [*(block.key for block in wanted.chain), *wanted.keys()]
        path = [block.key for block in self._full_path]
        return own[max(len(path), len(wanted.chain)) :] if own[: len(path)] == path else []

    @property
    def _full_path(self) -> list[Block]:
        return [block for block in self._plan.path if block.n_tokens == BLOCK_TOKENS]

    def _fetch(self, keys: Sequence[bytes]) -> None:
        """Fetch in order, up to the first missing object or half of RAM."""
        for n, key in enumerate(keys):
            self._ask(keys[n : n + min(N_AHEAD, 1 + n // 2)])
            entry = self._result(self._coming.pop(key))
            if entry is None or self._n_bytes + entry.n_bytes > self._tier.pool.max_bytes // 2:
                return
            self._got[key] = entry
            self._n_bytes += entry.n_bytes
            if isinstance(entry.block, Block):
                self._n_tokens += entry.block.n_tokens

    def _ask(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key not in self._coming and key not in self._got:
                wanted = self._wanted
                get = partial(self._tier.objects.block, key, wanted.root, wanted.max_bytes)
                self._coming[key] = self._tier.threads.submit(get)

    def _result(self, future: Future[Result]) -> Result:
        """Return a fetch's result. Raises TooLate if the wait exceeds the time that it saves."""
        try:
            return future.result(self._left_s())
        except TooLate as error:
            if future.done() and future.exception() is error:  # ETIMEDOUT of a network volume
                raise OSError(str(error)) from error
            raise

    def _left_s(self) -> float:
        """Return the seconds left: fetching may take the time that it saves, plus `loss_s`.

        If the model needs checkpoints, tokens are estimated from received bytes. Raises TooLate.
        """
        wanted, n_tokens = self._wanted, self._n_tokens
        if not wanted.any_prefix and self._plan.missing:
            share = self._n_bytes / max(1, sum(n_bytes for _, n_bytes in self._plan.missing))
            n_tokens = int(min(1.0, share) * (self._plan.n_tokens - wanted.n_tokens))
        saved_s = wanted.compute_s(wanted.n_tokens, n_tokens)
        left_s = self._started_s + wanted.loss_s + saved_s - time.monotonic()
        if left_s <= 0:
            raise TooLate
        return left_s

    def _land(self, beyond: Sequence[bytes]) -> None:
        """Put the received records before the first missing record into RAM."""
        got = self._got
        after = [got[key].block for key in beyond if key in got]
        if after:
            before = max(self._wanted.chain, self._full_path, key=len)
            chain = [*before, *(block for block in after if isinstance(block, Block))]
        else:
            missing = {record.key for record, _ in self._plan.missing} - got.keys()
            chain = list(takewhile(lambda block: block.key not in missing, self._plan.path))
        ends = {block.key for block in chain}
        entries = [entry for entry in got.values() if _block_of(entry.block) in ends]
        read_s = (time.monotonic() - self._started_s) / max(1, len(got))
        for entry in entries:
            entry.read_s = read_s
        if entries:
            new = tuple(dropwhile(lambda block: block.key not in got, chain))
            at_end = tuple(e.block for e in entries if isinstance(e.block, Checkpoint))
            self._tier.land(Commit(self._wanted.root, new, checkpoints=at_end), entries)


def _block_of(record: Record) -> bytes:
    return record.block if isinstance(record, Checkpoint) else record.key


class SharedTier:
    """Blocks in a store that several servers use; `land` stores fetched blocks. Any thread."""

    name = SHARED

    def __init__(
        self,
        objects: SharedObjects,
        disk: DiskTier,
        land: Callable[[Commit, list[KVBlock]], None],
        pool: BlockPool,
        replies_of: RepliesOf,
        max_bytes: int | None,
    ) -> None:
        self.objects, self.land, self.pool = objects, land, pool
        self.putting = Putting(objects, disk, replies_of, max_bytes)
        self.threads = Threads(N_AHEAD, "kvpersist-shared")
        self._slow_s = self._slow_until_s = self._slow_loss_s = 0.0
        """For `_slow_s`, prompts whose `loss_s` is at most `_slow_loss_s` skip the slow store."""

    def stats(self) -> dict[str, Any]:
        """Return counts of objects put and fetched, and why the store is not used now, if so."""
        return {
            "blocks": len(self.objects.seen_s),
            "evicted": 0,
            "asked_again_tokens": 0,
            **self.objects.counts,
            "failed_with": self.objects.failed_with,
            "waiting": len(self.putting.waiting),
        }

    def __contains__(self, key: bytes) -> bool:
        """Say whether the store recently had an object; the store is not asked."""
        return self.objects.is_seen(key)

    def remove(self, key: bytes, reason: str | None = None) -> None:
        """Treat a record as missing. A bad record is replaced when this server puts it again."""
        self.objects.forget(key, is_bad=reason is not None)

    def fetch(self, wanted: Wanted) -> str:
        """Fetch a prompt's blocks while that beats computing them; return a note. HTTP thread."""
        if failed_with := self.objects.reads.failed_with:
            return f"the shared store is not used now: {failed_with}"
        loss_s = wanted.loss_s
        if time.monotonic() < self._slow_until_s and loss_s <= self._slow_loss_s:
            return _SLOW
        try:
            note = Fetching(self, wanted).run()
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
        """Queue stored commits to be put; None for a commit if too much waits."""
        return [Saved(commit) if self.putting.write(commit) else None for commit in commits]

    def close(self, timeout_s: float) -> None:
        self.putting.close(timeout_s)
        self.objects.objects.close()
        self.threads.close(0)
