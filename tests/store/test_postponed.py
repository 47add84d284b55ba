"""Checkpoints that the next turn may supersede: when they are written, and when not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from mlx_lm_kvpersist.block import Block, Checkpoint, Record
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.disk import DiskStore
from mlx_lm_kvpersist.store.files import Arrays
from mlx_lm_kvpersist.store.records import Leaf
from mlx_lm_kvpersist.store.session_file import SessionFile
from mlx_lm_kvpersist.store.stored_sessions import StoredSessions
from mlx_lm_kvpersist.store.verify import find_problems
from mlx_lm_kvpersist.store.writer import ABANDON_S, POSTPONE_S
from tests.support import hold, settle

from .conftest import (
    ROOT,
    arrays_of,
    arrays_of_checkpoint,
    chain,
    checkpoint_files,
    names,
    state,
)

LIMITS = StoreLimits(64 << 20, 1 << 30, max_loss_s=2.0)


class Talk:
    """A conversation in a store that postpones its states."""

    def __init__(self, folder: Path, max_ram_bytes: int = 64 << 20) -> None:
        self.store = BlockStore(folder, replace(LIMITS, max_ram_bytes=max_ram_bytes))
        self.now_s = 100.0
        self.store.writer.now = lambda: self.now_s
        self.nodes: list[Block] = []

    def turn(self, *, loss_s: float = 1.0, has_ended: bool = True) -> Checkpoint:
        """Add a block with a state at its end."""
        self.nodes = chain(*([n] for n in range(len(self.nodes) + 1)))
        end, keys = state(self.nodes[-1]), tuple(node.key for node in self.nodes)
        leaf = Leaf("s", keys[-1], len(keys)) if has_ended else None
        new: list[tuple[Record, Arrays]] = [
            (self.nodes[-1], arrays_of(self.nodes[-1])),
            (end, arrays_of_checkpoint(end)),
        ]
        turn = Commit(ROOT, tuple(self.nodes), leaf, checkpoints=(end,))
        self.store.commit(turn, new, loss_s)
        self.settle()
        return end

    def after(self, seconds: float) -> set[str]:
        """Return the files of checkpoints that exist `seconds` later."""
        self.now_s += seconds
        self.store.writer.submit(lambda: None)
        self.settle()
        return checkpoint_files(self.store.folder)

    def settle(self) -> None:
        """Return when only postponed checkpoints are left to be written."""
        settle(self.store.writer)


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    talk = Talk(tmp_path / "store")
    yield talk
    talk.store.close()


def test_a_state_is_written_when_its_conversation_rests(talk: Talk) -> None:
    first = talk.turn()
    assert talk.after(POSTPONE_S - 1) == set()
    second = talk.turn()
    assert talk.store.writer.n_postponed_bytes > 0
    assert talk.after(POSTPONE_S - 1) == set()
    assert talk.after(1) == names(second)
    assert talk.store.writer.n_postponed_bytes == 0
    assert [talk.store.is_safe(one.key) for one in (first, second)] == [False, True]
    assert talk.store.index.totals().n_blocks == 2
    assert talk.store.checkpoints([first.block]) == {first.block: [first]}  # in RAM, unpinned


def test_a_state_that_costs_much_is_written_at_once(talk: Talk) -> None:
    talk.turn()
    assert checkpoint_files(talk.store.folder) == set()
    dear = talk.turn(loss_s=2.1)
    assert checkpoint_files(talk.store.folder) == names(dear)
    talk.turn()
    assert checkpoint_files(talk.store.folder) == names(dear)


def test_a_prompt_whose_reply_runs_does_not_rest(talk: Talk) -> None:
    talk.turn(has_ended=False)
    assert talk.after(ABANDON_S - 1) == set()
    end = talk.turn()
    assert talk.after(POSTPONE_S) == names(end)


def test_a_prompt_that_was_given_up_does_not_wait_for_ever(talk: Talk) -> None:
    given_up = talk.turn(has_ended=False)
    assert talk.after(ABANDON_S) == names(given_up)


def test_what_is_postponed_keeps_no_blocks_on_a_full_disk(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, replace(LIMITS, max_disk_bytes=3 << 20))
    for first in range(4):  # each takes about half of the disk
        nodes = chain(*([first, n] for n in range(12)))
        end, keys = state(nodes[-1]), tuple(node.key for node in nodes)
        leaf = Leaf(f"s{first}", nodes[-1].key, nodes[-1].stop) if first else None
        new: list[tuple[Record, Arrays]] = [(node, arrays_of(node)) for node in nodes]
        new.append((end, arrays_of_checkpoint(end)))
        store.commit(Commit(ROOT, tuple(nodes), leaf, checkpoints=(end,)), new, loss_s=1.0)
        settle(store.writer)
    assert store.stats()["failures"] == [] and store.turns_not_saved == 0
    assert keys[-1] in store.index
    store.close()


def test_what_writes_nothing_is_no_turn_that_is_saved(talk: Talk) -> None:
    """Nor does it prove that the disk works again."""
    talk.turn()
    n_saved = talk.store.turns_saved
    with closing(DiskStore(talk.store.folder, LIMITS)) as disk:
        (session,) = disk.index.sessions()
        disk.remove_session(session)
    talk.store._failures.add("save a turn: disk")
    talk.after(POSTPONE_S)
    assert (talk.store.turns_saved, talk.store._failures) == (n_saved, {"save a turn: disk"})


def test_what_is_due_is_written_also_while_there_is_always_work(talk: Talk) -> None:
    end = talk.turn()
    writer, is_begun, release = talk.store.writer, Event(), Event()
    tries: list[int] = []

    def work() -> None:
        is_begun.set()
        release.wait()
        if checkpoint_files(talk.store.folder) == set() and len(tries) < 20:
            tries.append(1)
            writer.submit(work)

    writer.submit(work)
    is_begun.wait()
    writer.submit(work)
    talk.now_s += POSTPONE_S
    release.set()
    talk.settle()
    assert checkpoint_files(talk.store.folder) == names(end) and len(tries) < 20


@pytest.mark.parametrize("end", [BlockStore.drain, BlockStore.close])
def test_an_end_writes_what_is_postponed(talk: Talk, end: Callable[[BlockStore], None]) -> None:
    for _ in range(3):
        last = talk.turn(has_ended=False)
    end(talk.store)
    assert checkpoint_files(talk.store.folder) == names(last)


@pytest.mark.parametrize("becomes", [False, True], ids=["little RAM", "less RAM"])
def test_what_has_no_room_in_ram_is_written(tmp_path: Path, becomes: bool) -> None:
    little = 1 << 20  # a quarter of it may be postponed
    talk = Talk(tmp_path, max_ram_bytes=64 << 20 if becomes else little)
    ends = []
    for n in range(12):
        (node,) = chain([n])
        ends.append(state(node))
        new: list[tuple[Record, Arrays]] = [
            (node, arrays_of(node)),
            (ends[-1], arrays_of_checkpoint(ends[-1])),
        ]
        talk.store.commit(Commit(ROOT, (node,), checkpoints=(ends[-1],)), new, loss_s=1.0)
        talk.settle()
    if becomes:
        assert checkpoint_files(tmp_path) == set()
        talk.store.resize(little)
        talk.settle()
    written = checkpoint_files(tmp_path)
    assert 0 < len(written) < 12 and written == names(*ends[: len(written)])
    assert talk.store.writer.n_postponed_bytes <= 1 << 18 <= 2 * talk.store.writer.n_postponed_bytes
    talk.store.close()
    assert checkpoint_files(tmp_path) == names(*ends)


def test_a_turn_without_a_state_leaves_the_one_before_postponed(talk: Talk) -> None:
    end = talk.turn()
    talk.nodes = chain([0], [1])
    leaf = Leaf("s", talk.nodes[-1].key, 2)
    new = [(talk.nodes[-1], arrays_of(talk.nodes[-1]))]
    talk.store.commit(Commit(ROOT, tuple(talk.nodes), leaf), new, loss_s=1.0)
    talk.settle()
    assert talk.after(POSTPONE_S) == names(end)


def test_what_fell_out_of_ram_alone_is_not_safe(talk: Talk) -> None:
    """Another thread may evict a checkpoint after it was found."""
    first, second = talk.turn(), talk.turn()
    talk.store.pool.remove(first.key)
    assert not talk.store.is_safe(first.key)
    talk.after(POSTPONE_S)
    assert talk.store.is_safe(second.key)
    # Another process may, too.
    with closing(DiskStore(talk.store.disk.folder, talk.store.limits)) as other:
        other.forget(second.key)
    assert second.key in talk.store.pool and not talk.store.is_safe(second.key)


def test_where_other_sessions_end_is_known_before_it_is_written(talk: Talk) -> None:
    talk.turn()
    release = hold(talk.store.writer)
    first, second = chain([0], [1])
    leaf = Leaf("another", second.key, 2)
    new = [(second, arrays_of(second))]
    talk.store.commit(Commit(ROOT, (first, second), leaf), new)
    for _ in range(2):
        ends = [talk.store.ends([first, second], name) for name in ("s", "another", None)]
        assert ends == [{second.key}, {first.key}, {first.key, second.key}]
        release.set()
        talk.settle()


def test_another_server_finds_what_rested(talk: Talk) -> None:
    with closing(BlockStore(talk.store.folder, LIMITS)) as other:
        end = talk.turn()
        assert other.checkpoints([end.block]) == {}
        talk.after(POSTPONE_S)
        assert other.checkpoints([end.block]) == {end.block: [end]}


def test_a_session_that_was_removed_takes_what_is_postponed_along(talk: Talk) -> None:
    talk.turn()
    with closing(DiskStore(talk.store.folder, LIMITS)) as disk:
        (session,) = disk.index.sessions()
        disk.remove_session(session)
    assert talk.after(POSTPONE_S) == set()
    assert find_problems(talk.store.folder, talk.store.index) == []


def save_another(talk: Talk) -> Checkpoint:
    """Save a turn of another conversation, and postpone its state."""
    (node,) = chain([99])
    end, leaf = state(node), Leaf("another", node.key, 1)
    new: list[tuple[Record, Arrays]] = [
        (node, arrays_of(node)),
        (end, arrays_of_checkpoint(end)),
    ]
    talk.store.commit(Commit(ROOT, (node,), leaf, checkpoints=(end,)), new, loss_s=1.0)
    return end


def test_an_evicted_session_alone_has_what_is_postponed_written(talk: Talk) -> None:
    end = talk.turn()
    save_another(talk)
    talk.settle()
    (session,) = talk.store.index.sessions_named("s")
    assert StoredSessions(talk.store).evict(session.id)["ram_bytes_freed"] > 0
    assert checkpoint_files(talk.store.folder) == names(end)
    assert talk.store.writer.n_postponed_bytes > 0


def test_an_export_has_what_is_postponed(talk: Talk, tmp_path: Path) -> None:
    end = talk.turn()
    (session,) = talk.store.index.sessions()
    n_bytes, parts = StoredSessions(talk.store).export(session.id)
    path = tmp_path / "exported"
    path.write_bytes(b"".join(parts))
    with closing(SessionFile(path)) as exported:
        assert exported.checkpoints == (end,) and path.stat().st_size == n_bytes


def test_a_deleted_session_lets_go_of_what_is_postponed(talk: Talk) -> None:
    talk.turn()
    (session,) = talk.store.index.sessions()
    StoredSessions(talk.store).delete(session.id)
    assert talk.store.writer.n_postponed_bytes == talk.store.pool.n_bytes == 0


def test_what_is_postponed_is_written_where_ram_gets_short(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    with closing(talk.store):
        talk.turn()
        assert not talk.after(0)
        talk.store.resize(100)
        assert talk.after(0)
        assert talk.store.pool.n_bytes <= 100
