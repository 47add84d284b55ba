"""What a step costs must not grow with what it has nothing to do with. Counted, not timed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.store.rebuild import rebuild
from mlx_lm_kvpersist.store.verify import find_problems

from .conftest import chain, save_turn


def steps(index: Index, act: Callable[[], object]) -> int:
    """Return how many instructions SQLite executes for an act of this thread, in tens."""
    n_steps = 0

    def count() -> int:
        nonlocal n_steps
        n_steps += 1
        return 0

    index._db.set_progress_handler(count, 10)
    try:
        act()
    finally:
        index._db.set_progress_handler(None, 10)
    return n_steps


def filled(folder: Path, n_sessions: int) -> BlockStore:
    store = BlockStore(folder, StoreLimits(1 << 30, 1 << 30))
    for n in range(n_sessions):
        save_turn(store, chain([1], [10 + n]), f"session {n}")
    return store


def test_b3_verifying_is_linear_in_sessions(tmp_path: Path) -> None:
    counts = []
    for n_sessions in (20, 80):
        store = filled(tmp_path / str(n_sessions), n_sessions)

        def verify(store: BlockStore = store) -> None:
            assert find_problems(store.folder, store.index) == []

        counts.append(steps(store.index, verify))
        store.close()
    assert counts[1] < 6 * counts[0], counts


@pytest.mark.parametrize("n_sessions", [2, 9])
def test_b3_a_rebuild_is_one_transaction(tmp_path: Path, n_sessions: int) -> None:
    store = filled(tmp_path / "store", n_sessions)
    store.close()
    index = Index(tmp_path / "fresh.sqlite")
    statements: list[str] = []
    index._db.set_trace_callback(statements.append)
    assert rebuild(store.folder, index) == 1 + n_sessions
    assert statements.count("COMMIT") == 1
    index.close()
    again = Index(tmp_path / "fresh.sqlite")
    assert again.n_blocks() == 1 + n_sessions
    again.close()
