"""Wait for other threads and processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep  # a test may replace those of the module

from mlx_lm_kvpersist.store.block_store import BlockStore
from mlx_lm_kvpersist.store.writer import Writer


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Raise AssertionError naming `what` if `condition()` does not become true in time."""
    deadline = monotonic() + timeout_s
    while not condition():
        if monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        sleep(0.02)


def settle(writer: Writer) -> None:
    """Return when only postponed checkpoints are left to be written.

    Because of this call, the writer does not wait for more turns before it writes.
    """
    writer.finish(lambda: not writer.n_tasks, 60.0)
    assert not writer.n_tasks


def hold(writer: Writer) -> threading.Event:
    """Stop a store's writer until the returned event is set.

    The writer has stopped when this returns: tasks submitted next stay in its queue.
    """
    may_go_on, holds = threading.Event(), threading.Event()

    def wait() -> None:
        holds.set()
        may_go_on.wait(60)

    writer.submit(wait)
    assert holds.wait(60)
    return may_go_on


@contextmanager
def writer_held(store: BlockStore) -> Iterator[None]:
    """Stop the store's writer inside the block. Afterwards it writes the waiting tasks."""
    may_go_on = hold(store.writer)
    try:
        yield
    finally:
        may_go_on.set()
        store.drain()
