"""The writer: one thread that changes the store, so that generation never waits for a disk.

Checkpoints that the next turn will probably supersede are postponed. They are written if their
conversation does not continue, if too much is postponed, and when the store is drained or closed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

from .records import Commit

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
REST_FACTOR = 6.0
"""While replies run, pauses are this many times as long as work. On a GPU, the writer takes 2.5%
of the replies' time."""
MAX_AGE_S = 5.0
"""While a commit that is this old waits or is being written, the writer does not pause."""
POSTPONE_S = 30.0
MOST_TASKS = 10_000
ABANDON_S = 300.0
"""If a reply has not ended after this time, the postponed checkpoints of its prompt are written."""
MOST_TOGETHER_BYTES = 64 << 20
"""Waiting turns are saved together, up to this size."""
GATHER_S = 0.25
"""How long turns and notes wait for more turns, to share a lock and a transaction."""


class Threads:
    """Runs tasks in order on daemon threads: the process can exit even if a disk hangs."""

    def __init__(self, n_threads: int, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}_{n}", daemon=True)
            for n in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Queue a task; its future is cancelled if the threads are closed before it runs."""
        future: Future[Result] = Future()
        self._tasks.put((future, task))
        if self._closed:
            future.cancel()
        return future

    def close(self, timeout_s: float) -> bool:
        """Drop waiting tasks and stop; return False if the running task exceeds `timeout_s`."""
        self._closed = True
        for _ in self._threads:
            self._tasks.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        for future, task in iter(self._tasks.get, None):
            if self._closed:
                future.cancel()
            run_into(future, task)
            # An idle thread must not refer to the arrays that it read last.
            del future, task


def run_into(future: Future[Result], task: Callable[[], Result]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)


@dataclass(eq=False)
class Task:
    """A task: call `run`, or save a `commit`, whose records are pinned until `let_go` is called.

    `sizes` has the sizes in bytes of the records that are only in RAM, by key.
    """

    run: Callable[[], object] = lambda: None
    commit: Commit | None = None
    let_go: Callable[[], None] = lambda: None
    sizes: Mapping[bytes, int] = field(default_factory=dict)
    since_s: float = field(default_factory=lambda: time.monotonic())
    due_s: float = math.inf
    """When the task is written if it is postponed, by the writer's clock."""
    is_urgent: bool = False
    """Whether the task belongs to a turn that has ended: a client may wait for it."""
    is_note: bool = False
    """Whether `run` changes rows of the index only."""

    @property
    def is_turn(self) -> bool:
        return self.commit is not None and self.commit.leaf is not None


def _bytes_of(tasks: Iterable[Task]) -> int:
    """Return the size in RAM: a record of several tasks counts once."""
    return sum({key: n for task in tasks for key, n in task.sizes.items()}.values())


class Writer:
    """Runs tasks on one long-lived thread, in order, but tasks of ended turns come first.

    `save` is called with the waiting turns, the waiting notes, or one other commit. Turns and notes
    wait `GATHER_S` for more, unless an action, a caller, or over half of `max_bytes` waits.

    If more than `max_bytes` of blocks and checkpoints wait, commits are dropped, because no request
    may wait for the disk. The oldest commit that a later commit contains is dropped first. If no
    later commit contains an older one, the oldest commit is dropped. The newest commit is dropped
    only if `_fits` refuses it. In addition, half of `max_bytes` may be postponed.
    """

    def __init__(self, max_bytes: int, save: Callable[[Sequence[Task]], object]) -> None:
        self.max_bytes = max_bytes
        self._save = save
        self.now: Callable[[], float] = time.monotonic
        self._tasks: deque[Task] = deque()
        self._postponed: dict[bytes, Task] = {}
        self._closing = False
        self._running: list[Task] = []
        self.rest_factor = REST_FACTOR
        self._n_replies = 0
        self._since_s = 0.0
        self._rests_until_s = 0.0
        """When the pause ends, at most `MAX_AGE_S` from now."""
        self._n_waiting = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvpersist-writer", daemon=True)
        self._thread.start()

    @property
    def n_tasks(self) -> int:
        return len(self._tasks) + len(self._running)

    @property
    def n_bytes(self) -> int:
        """Size of the blocks and checkpoints that wait or are being written."""
        with self._changed:
            return _bytes_of(self._commit_tasks())

    @property
    def n_postponed_bytes(self) -> int:
        with self._changed:
            return _bytes_of(self._postponed.values())

    def commits(self) -> list[Commit]:
        """Return the commits that are being written, then those waiting, then those postponed."""
        with self._changed:
            tasks = (*self._commit_tasks(), *self._postponed.values())
            return [task.commit for task in tasks if task.commit is not None]

    def unwritten(self) -> set[bytes]:
        """Return the waiting keys: of records only in RAM, of turns' leaves, and of replies."""
        with self._changed:
            keys = set[bytes]()
            for task in self._commit_tasks():
                keys.update(task.sizes)
                if (commit := task.commit) is not None:
                    keys.update(commit.replies, (commit.leaf.key,) if commit.leaf else ())
            return keys

    def _commit_tasks(self) -> list[Task]:
        return [task for task in (*self._running, *self._tasks) if task.commit]

    def submit(self, run: Callable[[], object], *, is_note: bool = False) -> None:
        """Queue an action. A note is dropped if too many tasks wait."""
        with self._changed:
            if not is_note or len(self._tasks) < MOST_TASKS:
                self._tasks.append(Task(run, is_note=is_note))
            if not is_note or len(self._tasks) == 1:  # else the writer waits for more
                self._changed.notify_all()

    def submit_commit(self, newest: Task) -> int:
        """Queue a commit; return how many turns are lost because too much waits.

        The commit's own turn may be lost, too. A dropped turn that a later commit contains is not
        lost.
        """
        victims: list[Task] = []
        n_lost = 0
        with self._changed:
            self._tasks.append(newest)
            self._hurry(newest)
            while self.n_bytes > self.max_bytes:
                waiting = (task for task in self._tasks if task.commit and task.sizes)
                oldest = min(waiting, key=lambda task: task.since_s, default=None)
                superseded = self._superseded()
                victim = superseded or oldest
                if victim is None or (victim is newest and self._fits(newest)):
                    break
                self._tasks.remove(victim)
                victims.append(victim)
                n_lost += victim.is_turn and not superseded
            if len(self._tasks) == 1 or self._is_half_full():  # else the writer waits for more
                self._changed.notify_all()
        for victim in victims:
            victim.let_go()
        return n_lost

    def _hurry(self, newest: Task) -> None:
        """Move an ended turn, with its conversation's tasks, ahead of unfinished prompts."""
        assert newest.commit is not None
        if newest.commit.leaf is None and not newest.commit.replies:
            return
        newest.is_urgent, chain = True, {block.key for block in newest.commit.blocks}
        for task in self._tasks:
            if task.commit and task.commit.blocks and task.commit.blocks[-1].key in chain:
                task.is_urgent = True
        self._tasks = deque(sorted(self._tasks, key=lambda task: not task.is_urgent))

    def _fits(self, newest: Task) -> bool:
        other_bytes = _bytes_of(task for task in self._commit_tasks() if task is not newest)
        if not other_bytes or self.n_bytes <= 2 * self.max_bytes:
            return True
        return self.n_bytes - other_bytes <= self.max_bytes < _bytes_of(self._running) // 2

    def _superseded(self) -> Task | None:
        """Return the oldest waiting commit that a later waiting commit contains."""
        passed: set[bytes] = set()
        oldest = None
        for task in reversed(self._tasks):
            if task.commit is None:
                continue
            if task.commit.blocks and task.commit.blocks[-1].key in passed:
                oldest = task
            passed.update(node.key for node in task.commit.blocks)
            if task.commit.leaf is not None:
                passed.update(old for old, _ in task.commit.leaf.replaced)
        return oldest

    # Postponed commits.

    def postpone(self, end: bytes, task: Task, *, has_ended: bool) -> None:
        """Postpone the commit of a conversation that ends in `end`; it can still be withdrawn.

        While the reply still runs, the commit waits longer: the reply continues from `end`, and its
        own commit will probably withdraw this commit.
        """
        task.due_s = self.now() + (POSTPONE_S if has_ended else ABANDON_S)
        with self._changed:
            self._postponed[end] = task
            self.resize(self.max_bytes)
            self._changed.notify_all()

    def resize(self, max_bytes: int) -> None:
        """Change `max_bytes`; write the oldest postponed commits beyond half of `max_bytes`."""
        with self._changed:
            self.max_bytes = max_bytes
            while self._postponed and self.n_postponed_bytes > max_bytes // 2:
                self.write_postponed(ends=[next(iter(self._postponed))])

    def withdraw(self, ends: Iterable[bytes]) -> None:
        """Drop the postponed commits of conversations that end at `ends`. Any thread."""
        with self._changed:
            gone = [self._postponed.pop(end) for end in ends if end in self._postponed]
        for task in gone:
            task.let_go()

    def write_postponed(
        self, due_s: float = math.inf, ends: Collection[bytes] | None = None
    ) -> None:
        """Queue the postponed commits that are due by `due_s` and end at `ends`. Any thread."""
        with self._changed:
            for end, task in list(self._postponed.items()):
                if task.due_s <= due_s and (ends is None or end in ends):
                    task.since_s = time.monotonic()
                    self._tasks.append(self._postponed.pop(end))
            self._changed.notify_all()

    def drain(self) -> None:
        """Queue postponed commits, and wait until no task is left; the writer does not pause."""
        with self._changed:
            self.write_postponed()
            self.finish(lambda: not self.n_tasks)

    def finish(self, is_done: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait until `is_done` returns True, or until a timeout; the writer does not pause."""
        with self._changed:
            self._n_waiting += 1
            try:
                self._changed.notify_all()
                self._changed.wait_for(is_done, timeout_s)
            finally:
                self._n_waiting -= 1

    def set_n_replies(self, n_replies: int) -> None:
        """Set the number of running replies. Any thread."""
        if n_replies != self._n_replies:
            with self._changed:
                self._n_replies = n_replies
                if n_replies == 0:  # then a pause ends
                    self._changed.notify_all()

    def rest(self) -> None:
        """While replies run, pause in proportion to the work so far. Writer thread.

        The pause ends when a caller waits, half of `max_bytes` waits, or the oldest commit is
        `MAX_AGE_S` old.
        """
        with self._changed:
            self._end_work()
            rest_s = max(0.0, self._rests_until_s - time.perf_counter())
            oldest_s = min((task.since_s for task in self._commit_tasks()), default=math.inf)
            left_s = max(0.0, oldest_s + MAX_AGE_S - time.monotonic())
            self._changed.wait_for(lambda: not self._may_rest(), min(rest_s, left_s))
            self._since_s = time.perf_counter()

    def _end_work(self) -> None:
        now_s = time.perf_counter()
        if self._n_replies:
            rest_s = self.rest_factor * (now_s - self._since_s)
            until_s = max(now_s, self._rests_until_s) + rest_s
            self._rests_until_s = min(until_s, now_s + MAX_AGE_S)

    def _may_rest(self) -> bool:
        is_waited_for = self._closing or self._n_waiting > 0
        return self._n_replies > 0 and not is_waited_for and not self._is_half_full()

    def close(self, timeout_s: float) -> tuple[int, int]:
        """Run the waiting tasks and stop; return how many commits are left, and their bytes."""
        with self._changed:
            self._closing = True
            self.write_postponed()
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            left = len(self._commit_tasks()), self.n_bytes
            self._tasks.clear()
            return left

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self.write_postponed(self.now())
                while not self._closing and (not self._tasks or self._gathers_s() > 0):
                    due_s = min((task.due_s for task in self._postponed.values()), default=math.inf)
                    wait_s = min(due_s - self.now(), self._gathers_s() if self._tasks else math.inf)
                    self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))
                    self.write_postponed(self.now())
                if not self._tasks:
                    return
                tasks = self._running = self._next_tasks()
            self._since_s = time.perf_counter()
            try:
                self._save(tasks) if tasks[0].commit or tasks[0].is_note else tasks[0].run()
            except Exception:
                logger.exception(
                    "kvpersist: the store could not be changed; serving continues from memory"
                )
            finally:
                with self._changed:
                    self._end_work()
                    self._running = []
                    self._changed.notify_all()
            # An idle writer must not refer to the arrays of the last commit.
            del tasks

    def _gathers_s(self) -> float:
        """Return how long to wait for more turns and notes; 0 if a caller waits. O(tasks)."""
        has_other = any(not (task.commit or task.is_note) for task in self._tasks)
        if has_other or self._n_waiting or self._is_half_full():
            return 0.0
        return min(task.since_s for task in self._tasks) + GATHER_S - time.monotonic()

    def _is_half_full(self) -> bool:
        return self.n_bytes > self.max_bytes // 2

    def _next_tasks(self) -> list[Task]:
        tasks = [self._tasks.popleft()]
        while self._tasks and _go_together(tasks, self._tasks[0]):
            tasks.append(self._tasks.popleft())
        return tasks


def _go_together(tasks: Sequence[Task], task: Task) -> bool:
    """Whether a task is saved together with `tasks`: all are notes, or all are ended turns."""
    if not (tasks[0].is_urgent and task.is_urgent):
        return tasks[0].is_note and task.is_note
    return _bytes_of([*tasks, task]) <= MOST_TOGETHER_BYTES
