"""The last part of a reply waits while a kill would lose more than a block of its prompt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.block import Checkpoint
from mlx_lm_kvpersist.cache.blocks.cut_join import BLOCK_TOKENS
from mlx_lm_kvpersist.request import serving as module
from mlx_lm_kvpersist.request.serving import RequestState, RunningSequence, Serving
from mlx_lm_kvpersist.store.block_store import BlockStore
from mlx_lm_kvpersist.store.records import Commit
from tests.store.conftest import ROOT, chain

from .conftest import store_in

LONG_S = 30.0


class Slow:
    """A store whose writer does nothing until it is let go."""

    def __init__(self, folder: Path) -> None:
        self.store: BlockStore = store_in(folder)
        self.may_write, self._holds = threading.Event(), threading.Event()

    def _hold(self) -> None:
        self._holds.set()
        self.may_write.wait(LONG_S)

    def saved(self, n_saved: int, n_prompt: int, n_all: int) -> RequestState:
        """Return a turn that has ended, the first `n_saved` of whose blocks are on disk."""
        starts = range(0, n_all, BLOCK_TOKENS)
        blocks = chain(*(list(range(n, min(n + BLOCK_TOKENS, n_all))) for n in starts))
        new = [(block, {"0.k": mx.zeros((1, 1, block.n_tokens, 4))}) for block in blocks]
        mx.eval([arrays for _, arrays in new])
        if n_saved:
            self.store.commit(Commit(ROOT, tuple(blocks[:n_saved])), new[:n_saved])
            self.store.drain()
        if not self._holds.is_set():
            self.store.writer.submit(self._hold)
            assert self._holds.wait(LONG_S)
        state = RequestState(root=ROOT, is_saved=threading.Event())
        sequence = RunningSequence(state, n_prompt, chain=blocks)
        self.store.commit(Commit(ROOT, tuple(blocks), sequence.leaf(blocks)), new[n_saved:])
        state.ended = sequence
        assert state.is_saved is not None
        state.is_saved.set()
        return state


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    slow = Slow(tmp_path)
    yield slow
    slow.may_write.set()
    slow.store.close()


def serving_of(store: BlockStore, *, any_prefix: bool = True) -> Serving:
    model: Any = SimpleNamespace(spec=SimpleNamespace(any_prefix=any_prefix))
    memory = mock.MagicMock()
    return Serving(store, model, lambda *_: None, False, 0.1, memory)


@pytest.mark.parametrize(
    ("n_saved", "n_prompt", "n_all", "waits"),
    [
        (0, 256, 300, False),
        (0, 257, 300, True),
        (0, 100, 511, False),
        (0, 100, 512, True),
        (4, 1100, 1120, False),
        (4, 1280, 1300, False),
        (4, 1281, 1300, True),
        (4, 1100, 1540, True),
        (5, 1281, 1300, False),
    ],
)
def test_a_client_waits_where_a_kill_would_lose_more_than_it_may(
    slow: Slow, n_saved: int, n_prompt: int, n_all: int, waits: bool
) -> None:
    serving, state = serving_of(slow.store), slow.saved(n_saved, n_prompt, n_all)
    with mock.patch.object(module, "LAST_PART_S", LONG_S if waits else 0.0):
        finishing = threading.Thread(target=serving.finish, args=(state,))
        finishing.start()
        finishing.join(0.1 if waits else LONG_S)
        assert finishing.is_alive() == waits
        slow.may_write.set()
        finishing.join(LONG_S)
    assert not finishing.is_alive()
    if waits:
        assert not any(slow.store.writer.will_write(block.key) for block in state.ended.chain)  # type: ignore[union-attr]


def test_it_is_kept_waiting_for_a_limited_time(slow: Slow) -> None:
    serving, state = serving_of(slow.store), slow.saved(0, 600, 610)
    with mock.patch.object(module, "LAST_PART_S", 0.05):
        serving.finish(state)
    assert slow.store.writer.n_tasks


def test_other_conversations_are_not_waited_for(slow: Slow) -> None:
    state = slow.saved(0, 100, 110)
    slow.saved(0, 1000, 1010)
    serving_of(slow.store).finish(state)
    assert slow.store.writer.n_tasks


def test_a_model_that_needs_its_checkpoint_has_it_before_the_last_part(slow: Slow) -> None:
    serving, state = serving_of(slow.store, any_prefix=False), slow.saved(0, 10, 20)
    assert serving._is_at_risk(state)
    slow.may_write.set()
    serving.finish(state)
    assert not slow.store.writer.n_tasks
    last = state.ended.chain[-1]  # type: ignore[union-attr]
    later = Commit(ROOT, (), checkpoints=(Checkpoint.at(last.key, "state", 0),))
    slow.store.writer.postpone(last.key, mock.MagicMock(commit=later, sizes={}), has_ended=True)
    assert not serving._is_at_risk(state)  # what is postponed may be lost
    slow.store.writer.withdraw([last.key])
