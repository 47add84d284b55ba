"""The last part of a reply waits while a kill would lose more tokens than allowed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.block import Checkpoint
from mlx_lm_kvpersist.cache.blocks import BLOCK_TOKENS
from mlx_lm_kvpersist.host.hooks import REPLY, ClientRequest
from mlx_lm_kvpersist.request import serving as module
from mlx_lm_kvpersist.request.saver import RunningSequence
from mlx_lm_kvpersist.request.serving import RequestState, ServedRequest, Serving
from mlx_lm_kvpersist.store.block_store import BlockStore
from mlx_lm_kvpersist.store.records import Commit
from tests.store.conftest import ROOT, chain
from tests.support import wait_until

from .conftest import store_in

LONG_S = 30.0


class SlowStore:
    """A store whose writer is blocked until it is released."""

    def __init__(self, folder: Path) -> None:
        self.store: BlockStore = store_in(folder)
        self.may_write, self._holds = threading.Event(), threading.Event()
        self.finishing: threading.Thread | None = None

    def _hold(self) -> None:
        self._holds.set()
        self.may_write.wait(LONG_S)

    def hold_again(self) -> None:
        """Stop the writer again."""
        self.may_write.clear()
        self._holds.clear()
        self.store.writer.submit(self._hold)
        assert self._holds.wait(LONG_S)

    def finishes(self, serving: Serving, state: RequestState) -> bool:
        """Tell whether a client gets the last part of its reply while the writer is blocked."""
        with mock.patch.object(module, "LAST_PART_S", LONG_S):
            self.finishing = threading.Thread(target=serving.finish, args=(state,))
            self.finishing.start()
            wait_until(lambda: self._is_waiting() or not self._is_finishing(), "the last part")
        assert not self.may_write.is_set()
        return not self._is_finishing()

    def _is_finishing(self) -> bool:
        return self.finishing is not None and self.finishing.is_alive()

    def _is_waiting(self) -> bool:
        with self.store.writer._changed:  # threads check the need to wait under this lock
            return self.store.writer._n_waiting > 0

    def saved(self, n_saved: int, n_prompt: int, n_all: int, first: int = 0) -> RequestState:
        """Return a turn that has ended; its first `n_saved` blocks are on disk."""
        starts = range(0, n_all, BLOCK_TOKENS)
        ends = [min(start + BLOCK_TOKENS, n_all) for start in starts]
        ids = [[first + n for n in range(*both)] for both in zip(starts, ends, strict=True)]
        blocks = chain(*ids)
        new = [(block, {"0.k": mx.zeros((1, 1, block.n_tokens, 4))}) for block in blocks]
        mx.eval([arrays for _, arrays in new])
        if n_saved:
            self.store.commit(Commit(ROOT, tuple(blocks[:n_saved])), new[:n_saved])
            self.store.drain()
        if not self._holds.is_set():
            self.hold_again()
        state = RequestState(root=ROOT, is_saved=threading.Event())
        sequence = RunningSequence(ROOT, n_prompt, chain=blocks)
        self.store.commit(Commit(ROOT, tuple(blocks), sequence.leaf(blocks)), new[n_saved:])
        state.sequence = sequence
        assert state.is_saved is not None
        state.is_saved.set()
        return state


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowStore]:
    slow = SlowStore(tmp_path)
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
        (3, 500, 1020, False),
        (3, 500, 1024, True),
        (3, 500, 1030, True),
        (3, 768, 1030, True),
        (3, 769, 1030, False),
    ],
)
def test_the_last_part_waits_if_a_kill_would_lose_too_much(
    slow: SlowStore, n_saved: int, n_prompt: int, n_all: int, waits: bool
) -> None:
    state = slow.saved(n_saved, n_prompt, n_all)
    keys = [block.key for block in state.sequence.chain]  # type: ignore[union-attr]
    assert slow.finishes(serving_of(slow.store), state) != waits
    slow.may_write.set()
    assert slow.finishing is not None
    slow.finishing.join(LONG_S)
    assert not slow.finishing.is_alive()
    if waits:
        assert not slow.store.writer.unwritten().intersection(keys)


def test_the_last_part_waits_for_a_limited_time(slow: SlowStore) -> None:
    serving, state = serving_of(slow.store), slow.saved(0, 600, 610)
    began_s = time.monotonic()
    with mock.patch.object(module, "LAST_PART_S", 0.1):
        serving.finish(state)
    assert time.monotonic() - began_s > 0.09 and slow.store.writer.n_tasks


def test_the_last_part_does_not_wait_for_other_conversations(slow: SlowStore) -> None:
    state = slow.saved(0, 100, 110)
    slow.saved(0, 1000, 1010)
    assert slow.finishes(serving_of(slow.store), state)


@pytest.mark.parametrize(("n_all", "waits"), [(355, False), (356, True)])
def test_the_last_part_of_a_long_reply_waits_for_its_ids(
    slow: SlowStore, n_all: int, waits: bool
) -> None:
    """All blocks of the reply are on disk, but its text alone would not find them."""
    state = slow.saved(0, 100, n_all)
    slow.may_write.set()
    slow.store.drain()
    slow.hold_again()
    slow.store.commit(Commit(ROOT, (), replies={b"reply": b"ids"}), [])
    slow.store.commit(Commit(ROOT, (), replies={b"another": b"ids"}), [])
    state.remembered = frozenset((b"reply",))
    assert slow.finishes(serving_of(slow.store), state) != waits


def test_the_last_part_waits_for_the_blocks_of_the_draft_model(slow: SlowStore) -> None:
    target = slow.saved(4, 1100, 1120)
    draft = slow.saved(0, 1101, 1121, first=7).sequence
    assert target.sequence is not None and draft is not None
    target.sequence.draft, draft.is_draft = draft, True
    assert not slow.finishes(serving_of(slow.store), target)


@pytest.mark.parametrize("n_unwritten", [0, 20])
def test_with_checkpoints_the_last_part_waits_for_its_turn(
    slow: SlowStore, n_unwritten: int
) -> None:
    """The last part waits for its own turn, but not for postponed checkpoints."""
    serving, state = serving_of(slow.store, any_prefix=False), slow.saved(0, 10, 20)
    if not n_unwritten:
        slow.may_write.set()
        slow.store.drain()
        slow.hold_again()
        slow.saved(0, 1000, 1010)
        last = state.sequence.chain[-1]  # type: ignore[union-attr]
        later = Commit(ROOT, (), checkpoints=(Checkpoint.at(last.key, "state", 0),))
        slow.store.writer.postpone(last.key, mock.MagicMock(commit=later, sizes={}), has_ended=True)
    assert slow.finishes(serving, state) == (not n_unwritten)
    slow.store.writer.withdraw([block.key for block in chain(list(range(20)))])


@pytest.mark.parametrize("kept", [True, False])
def test_the_last_part_of_a_request_not_kept_does_not_wait(slow: SlowStore, kept: bool) -> None:
    """The request sets `is_saved` at its end."""
    serving, state = serving_of(slow.store), slow.saved(0, 600, 610)
    request = object.__new__(ServedRequest)
    request._state, request._serving = state, serving
    request._request = ClientRequest(SimpleNamespace(request_type="text", prompt="", messages=[]))
    state.is_kept, state.is_saved = kept, threading.Event()
    with mock.patch.object(serving, "save"):
        request.insert([], [], REPLY)
    assert state.is_saved.is_set()
    assert slow.finishes(serving, state) != kept
