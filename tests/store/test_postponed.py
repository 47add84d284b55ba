"""Postponed checkpoints: when they are written, and when they are not."""

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


class Conversation:
    """A conversation in a store that postpones its checkpoints."""

    def __init__(self, folder: Path, max_ram_bytes: int = 64 << 20) -> None:
        self.store = BlockStore(folder, replace(LIMITS, max_ram_bytes=max_ram_bytes))
        self.now_s = 100.0
        self.store.writer.now = lambda: self.now_s
        self.nodes: list[Block] = []

    def turn(self, *, loss_s: float = 1.0, has_ended: bool = True) -> Checkpoint:
        """Add a block with a checkpoint at its end."""
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
        """Wait until only postponed checkpoints are left to write."""
        settle(self.store.writer)


@pytest.fixture
def conversation(tmp_path: Path) -> Iterator[Conversation]:
    conversation = Conversation(tmp_path / "store")
    yield conversation
    conversation.store.close()


def test_checkpoint_is_written_after_its_conversation_pauses(conversation: Conversation) -> None:
    first = conversation.turn()
    assert conversation.after(POSTPONE_S - 1) == set()
    second = conversation.turn()
    assert conversation.store.writer.n_postponed_bytes > 0
    assert conversation.after(POSTPONE_S - 1) == set()
    assert conversation.after(1) == names(second)
    assert conversation.store.writer.n_postponed_bytes == 0
    store = conversation.store
    assert [store.is_safe(checkpoint.key) for checkpoint in (first, second)] == [False, True]
    assert store.index.totals().n_blocks == 2
    assert store.checkpoints([first.block]) == {first.block: [first]}  # in RAM, unpinned


def test_expensive_checkpoint_is_written_at_once(conversation: Conversation) -> None:
    conversation.turn()
    assert checkpoint_files(conversation.store.folder) == set()
    expensive = conversation.turn(loss_s=2.1)
    assert checkpoint_files(conversation.store.folder) == names(expensive)
    conversation.turn()
    assert checkpoint_files(conversation.store.folder) == names(expensive)


def test_checkpoint_of_a_prompt_is_not_written_while_its_reply_runs(
    conversation: Conversation,
) -> None:
    conversation.turn(has_ended=False)
    assert conversation.after(ABANDON_S - 1) == set()
    end = conversation.turn()
    assert conversation.after(POSTPONE_S) == names(end)


def test_checkpoint_of_an_abandoned_prompt_is_written_after_a_timeout(
    conversation: Conversation,
) -> None:
    abandoned = conversation.turn(has_ended=False)
    assert conversation.after(ABANDON_S) == names(abandoned)


def test_postponed_checkpoints_do_not_prevent_eviction_on_a_full_disk(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, replace(LIMITS, max_disk_bytes=3 << 20))
    for first in range(4):  # each conversation takes about half of the disk
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


def test_writing_nothing_does_not_count_as_a_saved_turn(conversation: Conversation) -> None:
    """It does not clear a failure, either."""
    conversation.turn()
    n_saved = conversation.store.turns_saved
    with closing(DiskStore(conversation.store.folder, LIMITS)) as disk:
        (session,) = disk.index.sessions()
        disk.remove_session(session)
    conversation.store._failures.add("save a turn: disk")
    conversation.after(POSTPONE_S)
    assert (conversation.store.turns_saved, conversation.store._failures) == (
        n_saved,
        {"save a turn: disk"},
    )


def test_due_checkpoint_is_written_while_the_writer_is_busy(conversation: Conversation) -> None:
    end = conversation.turn()
    writer, is_begun, release = conversation.store.writer, Event(), Event()
    attempts: list[int] = []

    def work() -> None:
        is_begun.set()
        release.wait()
        if checkpoint_files(conversation.store.folder) == set() and len(attempts) < 20:
            attempts.append(1)
            writer.submit(work)

    writer.submit(work)
    is_begun.wait()
    writer.submit(work)
    conversation.now_s += POSTPONE_S
    release.set()
    conversation.settle()
    assert checkpoint_files(conversation.store.folder) == names(end) and len(attempts) < 20


@pytest.mark.parametrize("end", [BlockStore.drain, BlockStore.close])
def test_drain_and_close_write_the_last_postponed_checkpoint(
    conversation: Conversation, end: Callable[[BlockStore], None]
) -> None:
    for _ in range(3):
        last = conversation.turn(has_ended=False)
    end(conversation.store)
    assert checkpoint_files(conversation.store.folder) == names(last)


@pytest.mark.parametrize("is_shrunk", [False, True], ids=["small RAM", "shrunk RAM"])
def test_postponed_checkpoints_beyond_the_ram_limit_are_written(
    tmp_path: Path, is_shrunk: bool
) -> None:
    small_bytes = 1 << 20  # a quarter of it may be postponed
    conversation = Conversation(tmp_path, max_ram_bytes=64 << 20 if is_shrunk else small_bytes)
    ends = []
    for n in range(12):
        (node,) = chain([n])
        ends.append(state(node))
        new: list[tuple[Record, Arrays]] = [
            (node, arrays_of(node)),
            (ends[-1], arrays_of_checkpoint(ends[-1])),
        ]
        conversation.store.commit(Commit(ROOT, (node,), checkpoints=(ends[-1],)), new, loss_s=1.0)
        conversation.settle()
    if is_shrunk:
        assert checkpoint_files(tmp_path) == set()
        conversation.store.resize(small_bytes)
        conversation.settle()
    written = checkpoint_files(tmp_path)
    assert 0 < len(written) < 12 and written == names(*ends[: len(written)])
    n_postponed_bytes = conversation.store.writer.n_postponed_bytes
    assert n_postponed_bytes <= 1 << 18 <= 2 * n_postponed_bytes
    conversation.store.close()
    assert checkpoint_files(tmp_path) == names(*ends)


def test_turn_without_a_checkpoint_keeps_the_previous_one_postponed(
    conversation: Conversation,
) -> None:
    end = conversation.turn()
    conversation.nodes = chain([0], [1])
    leaf = Leaf("s", conversation.nodes[-1].key, 2)
    new = [(conversation.nodes[-1], arrays_of(conversation.nodes[-1]))]
    conversation.store.commit(Commit(ROOT, tuple(conversation.nodes), leaf), new, loss_s=1.0)
    conversation.settle()
    assert conversation.after(POSTPONE_S) == names(end)


def test_checkpoint_removed_from_ram_or_disk_is_not_safe(conversation: Conversation) -> None:
    """Another thread or process may evict a checkpoint after a lookup has found it."""
    first, second = conversation.turn(), conversation.turn()
    conversation.store.pool.remove(first.key)
    assert not conversation.store.is_safe(first.key)
    conversation.after(POSTPONE_S)
    assert conversation.store.is_safe(second.key)
    with closing(DiskStore(conversation.store.disk.folder, conversation.store.limits)) as other:
        other.forget(second.key)
    assert second.key in conversation.store.pool and not conversation.store.is_safe(second.key)


def test_ends_of_other_sessions_include_queued_turns(conversation: Conversation) -> None:
    conversation.turn()
    release = hold(conversation.store.writer)
    first, second = chain([0], [1])
    leaf = Leaf("another", second.key, 2)
    new = [(second, arrays_of(second))]
    conversation.store.commit(Commit(ROOT, (first, second), leaf), new)
    for _ in range(2):
        ends = [conversation.store.ends([first, second], name) for name in ("s", "another", None)]
        assert ends == [{second.key}, {first.key}, {first.key, second.key}]
        release.set()
        conversation.settle()


def test_another_server_finds_a_checkpoint_once_it_is_written(conversation: Conversation) -> None:
    with closing(BlockStore(conversation.store.folder, LIMITS)) as other:
        end = conversation.turn()
        assert other.checkpoints([end.block]) == {}
        conversation.after(POSTPONE_S)
        assert other.checkpoints([end.block]) == {end.block: [end]}


def test_removing_a_session_discards_its_postponed_checkpoint(conversation: Conversation) -> None:
    conversation.turn()
    with closing(DiskStore(conversation.store.folder, LIMITS)) as disk:
        (session,) = disk.index.sessions()
        disk.remove_session(session)
    assert conversation.after(POSTPONE_S) == set()
    assert find_problems(conversation.store.folder, conversation.store.index) == []


def save_another(conversation: Conversation) -> Checkpoint:
    """Save a turn of another conversation, and postpone its checkpoint."""
    (node,) = chain([99])
    end, leaf = state(node), Leaf("another", node.key, 1)
    new: list[tuple[Record, Arrays]] = [
        (node, arrays_of(node)),
        (end, arrays_of_checkpoint(end)),
    ]
    conversation.store.commit(Commit(ROOT, (node,), leaf, checkpoints=(end,)), new, loss_s=1.0)
    return end


def test_evicting_a_session_writes_only_its_postponed_checkpoint(
    conversation: Conversation,
) -> None:
    end = conversation.turn()
    save_another(conversation)
    conversation.settle()
    (session,) = conversation.store.index.sessions_named("s")
    assert StoredSessions(conversation.store).evict(session.id)["ram_bytes_freed"] > 0
    assert checkpoint_files(conversation.store.folder) == names(end)
    assert conversation.store.writer.n_postponed_bytes > 0


def test_export_includes_the_postponed_checkpoint(
    conversation: Conversation, tmp_path: Path
) -> None:
    end = conversation.turn()
    (session,) = conversation.store.index.sessions()
    n_bytes, parts = StoredSessions(conversation.store).export(session.id)
    path = tmp_path / "exported"
    path.write_bytes(b"".join(parts))
    with closing(SessionFile(path)) as exported:
        assert exported.checkpoints == (end,) and path.stat().st_size == n_bytes


def test_deleting_a_session_releases_its_postponed_checkpoint(conversation: Conversation) -> None:
    conversation.turn()
    (session,) = conversation.store.index.sessions()
    StoredSessions(conversation.store).delete(session.id)
    assert conversation.store.writer.n_postponed_bytes == conversation.store.pool.n_bytes == 0
