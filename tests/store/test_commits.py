"""Commits: their cost, the transactions that they share, and commits that fail."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import pytest

from mlx_lm_kvpersist.block import Block, Record, Root
from mlx_lm_kvpersist.store import disk_tier, folder
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.database import Database
from mlx_lm_kvpersist.store.disk import DiskStore
from mlx_lm_kvpersist.store.disk_tier import Saving
from mlx_lm_kvpersist.store.files import write_block
from mlx_lm_kvpersist.store.folder import OwnFiles, StoreLock
from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.store.records import Leaf, NewFile, Saved, Session
from mlx_lm_kvpersist.store.small_state import SmallState
from tests.support import writer_held
from tests.support.store_files import block_path

from .conftest import ROOT, arrays_of, arrays_of_checkpoint, chain, save_turn, state


class QueryLog:
    """The statements of all connections, and a count of every tenth instruction of SQLite."""

    def __init__(self) -> None:
        self.statements: list[str] = []
        self.n_steps = 0

    def step(self) -> int:
        self.n_steps += 1
        return 0

    def clear(self) -> None:
        self.statements.clear()
        self.n_steps = 0


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> QueryLog:
    """Record the statements of indexes that are opened from now on."""
    queries, connect = QueryLog(), Database._connect

    def counted(database: Database) -> sqlite3.Connection:
        db = connect(database)
        db.set_trace_callback(queries.statements.append)
        db.set_progress_handler(queries.step, 10)
        return db

    monkeypatch.setattr(Database, "_connect", counted)
    return queries


def submit(
    store: BlockStore, nodes: list[Block], name: str | None = None, *, ended: bool = True
) -> None:
    """Commit new blocks; if the reply has `ended`, also its leaf."""
    leaf = Leaf(name, nodes[-1].key, nodes[-1].stop) if ended else None
    store.commit(Commit(ROOT, tuple(nodes), leaf), [(node, arrays_of(node)) for node in nodes])


@pytest.mark.parametrize("name", ["s", None])
def test_cost_of_a_commit_is_independent_of_earlier_blocks(
    tmp_path: Path, limits: StoreLimits, queries: QueryLog, name: str | None
) -> None:
    n_statements, n_steps, n_pool_uses = [], [], []
    for n_blocks in (8, 128):
        large = replace(limits, max_ram_bytes=1 << 30, max_disk_bytes=1 << 30)
        with closing(BlockStore(tmp_path / f"{n_blocks}", large)) as store:
            nodes = chain(*([n] for n in range(n_blocks + 1)))
            submit(store, nodes[:-1], name)
            store.drain()
            queries.clear()
            uses_before = store.pool._n_uses
            submit(store, nodes[-1:], name)
            store.drain()
            n_pool_uses.append(store.pool._n_uses - uses_before)
            n_statements.append(len(queries.statements))
            n_steps.append(queries.n_steps)
            assert [session.n_tokens for session in store.index.sessions()] == [n_blocks + 1]
    assert n_statements[0] == n_statements[1] > 0 and n_pool_uses[0] == n_pool_uses[1] > 0
    assert n_steps[1] <= n_steps[0] + 5, n_steps


@contextmanager
def counted_locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StoreLock]]:
    """Record each time that the lock of a store is taken."""
    taken: list[StoreLock] = []
    wait = StoreLock._wait

    def counted(lock: StoreLock, descriptor: int) -> None:
        taken.append(lock)
        wait(lock, descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(StoreLock, "_wait", counted)
        yield taken


def test_turns_that_end_together_share_a_transaction(
    tmp_path: Path, limits: StoreLimits, queries: QueryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_commits, n_locks = [], []
    with closing(BlockStore(tmp_path / "store", limits)) as store:
        store.drain()
        for turns in ([[1]], [[n] for n in range(10, 15)]):
            queries.clear()
            with counted_locks(monkeypatch) as taken, writer_held(store):
                for ids in turns:
                    submit(store, chain(ids))
            n_commits.append(queries.statements.count("COMMIT"))
            n_locks.append(len(taken))
        assert store.turns_saved == store.index.n_sessions() == 6
    assert n_commits[0] == n_commits[1] and n_locks == [2, 2]


def test_a_turn_is_saved_by_one_transaction(queries: QueryLog, tmp_path: Path) -> None:
    with closing(BlockStore(tmp_path, StoreLimits(1 << 20, 1 << 30))) as store:
        save_turn(store, chain([1]), "first")
        queries.clear()
        save_turn(store, chain([2]), "second")
        assert queries.statements.count("BEGIN IMMEDIATE") == 1
        assert store.index.state.written_last_hour() == store.disk.n_written_bytes > 0


def test_waiting_turns_of_a_conversation_are_saved_in_order(store: BlockStore) -> None:
    nodes = chain([1], [2], [3])
    with writer_held(store):
        for node in nodes:
            submit(store, [node], "s")
    (session,) = store.index.sessions()
    assert (session.leaf, session.n_tokens) == (nodes[-1].key, 3)
    assert store.turns_saved == 3 and store.disk.sweep() == 0


@pytest.mark.parametrize("kind", ["block", "checkpoint"])
def test_record_removed_by_a_waiting_turn_is_written_for_the_next(
    store: BlockStore, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A prompt gets a short reply, a longer reply, and the short reply again."""
    (short,), (longer,) = chain([1, 2]), chain([1, 2, 3])
    checkpoints = (state(short),) if kind == "checkpoint" else ()
    replaced = () if checkpoints else ((short.key, longer.key),)
    first = Commit(ROOT, (short,), Leaf("s", short.key, 2), checkpoints=checkpoints)
    second = Commit(ROOT, (longer,), Leaf("s", longer.key, 3, replaced), superseded=checkpoints)
    with writer_held(store):
        for commit in (first, second, first):
            new = [(block, arrays_of(block)) for block in commit.blocks]
            states = [
                (checkpoint, arrays_of_checkpoint(checkpoint)) for checkpoint in commit.checkpoints
            ]
            store.commit(commit, [*new, *states])
    assert (store.turns_saved, store.turns_not_saved) == (3, 0), caplog.text
    assert store.disk.has(short.key) and all(
        store.disk.has(checkpoint.key, checkpoint.folder) for checkpoint in checkpoints
    )
    assert store.disk.sweep() == 0


def test_turn_is_saved_if_a_superseded_file_cannot_be_removed(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes, "s", [state(nodes[1])])
    real = OwnFiles.remove

    def remove(files: OwnFiles, path: Path) -> bool:
        return raise_no_space() if path.parts[-3] == "checkpoints" else real(files, path)

    longer = chain([1], [2], [3])
    end = Leaf("s", longer[-1].key, 3)
    turn = Commit(ROOT, tuple(longer), end, superseded=(state(nodes[1]),))
    with monkeypatch.context() as patch, writer_held(store):
        patch.setattr(OwnFiles, "remove", remove)
        store.commit(turn, [(longer[2], arrays_of(longer[2]))])
        submit(store, chain([4]), "other")
    assert store.turns_saved == 3 and store.turns_not_saved == 0
    assert "kvpersist: cannot remove a file: " in caplog.text
    assert store.pool.unwritten(longer[2].key) == [] and store.disk.sweep() == 1


def test_evicted_block_counts_as_unwritten_if_its_file_remains(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node,) = chain([1])
    save_turn(store, [node], "s")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(OwnFiles, "remove", lambda *args: raise_no_space())
        store.disk.forget(node.key)
    assert store.pool.unwritten(node.key) == [node]


def test_failed_rollback_of_a_turn_leaves_no_files_of_other_turns(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction fails, and then the first turn's sidecar cannot be restored."""
    save_turn(store, chain([1]), "s")

    def fail(state: SmallState, n_bytes: int) -> None:
        patch.setattr(disk_tier, "write_sidecar", lambda *args: raise_no_space())
        raise_no_space()

    with monkeypatch.context() as patch, writer_held(store):
        patch.setattr(
            SmallState, "count_write", failing_on_nth_call(2, SmallState.count_write, fail)
        )
        submit(store, chain([1], [2])[1:], "s")
        submit(store, chain([3]), "other")
    assert store.turns_not_saved == 2
    assert not list((store.folder / "blocks").glob(f"*/{chain([3])[0].key.hex()}*"))
    assert store.disk.sweep() == 0


def test_block_of_a_failed_turn_is_written_with_the_next_turn(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.drain()
    real = folder.new_file

    @contextmanager
    def fail_once(path: Path) -> Iterator[BinaryIO]:
        monkeypatch.setattr(folder, "new_file", real)
        with real(path) as file:
            yield file
            raise_no_space()

    def new_file_or_fail(path: Path) -> Any:
        return fail_once(path) if path.suffix == ".safetensors" else real(path)

    with writer_held(store):
        for number in (2, 3):
            submit(store, chain([1], [number]), f"s{number}")
        monkeypatch.setattr(folder, "new_file", new_file_or_fail)
    assert store.turns_saved == 1 and store.turns_not_saved == 1
    assert store.disk.sweep() == 0


def raise_no_space() -> NoReturn:
    raise OSError(28, "no space left on device")


def raise_integrity_error() -> None:
    raise sqlite3.IntegrityError("a row is refused")


@pytest.mark.parametrize("failing_step", ["file", "row", "room"])
def test_failed_commit_does_not_affect_other_commits(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch, failing_step: str
) -> None:
    store.drain()
    turns = [chain([1]), chain([2]), chain([3])]
    failing_block = turns[1][-1]
    if failing_step == "file":
        monkeypatch.setattr(
            f"{DiskStore.__module__}.write_block", failing_for_block(failing_block, raise_no_space)
        )
    elif failing_step == "row":
        put_session, n_put = Index.put_session, []

        def put(index: Index, session: Session, n_bytes: int) -> None:
            n_put.append(session)
            put_session(index, session, n_bytes)
            if len(n_put) == 2:
                raise_integrity_error()

        monkeypatch.setattr(Index, "put_session", put)
    else:
        monkeypatch.setattr(DiskStore, "make_room", failing_on_second_call(DiskStore.make_room))
    with writer_held(store):
        for number, nodes in enumerate(turns):
            submit(store, nodes, f"s{number}")
    assert store.turns_saved == 2 and store.turns_not_saved == 1
    assert {session.name for session in store.index.sessions()} == {"s0", "s2"}
    assert [nodes[0].key in store.index for nodes in turns] == [True, False, True]
    assert store.disk.sweep() == 0 and store.index.faults() == []
    assert len(list((store.folder / "sessions").iterdir())) == 2
    monkeypatch.undo()
    submit(store, chain([2], [9])[1:], "s1")  # the next turn writes both blocks
    store.drain()
    assert failing_block.key in store.index and store.turns_saved == 3


def failing_for_block(failing_block: Block, fail: Callable[[], None]) -> object:
    """Return a `write_block` that fails for one block."""

    def write(path: Path, block: Block, **named: object) -> int:
        if block == failing_block:
            fail()
        return write_block(path, block=block, **named)  # type: ignore[arg-type]

    return write


def failing_on_second_call(real: Callable[..., object]) -> object:
    """Return a method that fails on its second call."""
    calls: list[object] = []

    def call(*args: object) -> object:
        calls.append(args)
        if len(calls) == 2:
            raise_no_space()
        return real(*args)

    return call


def test_failed_transaction_leaves_no_files(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.drain()

    def fail(state: SmallState, n_bytes: int) -> None:
        assert n_bytes
        raise_no_space()

    with monkeypatch.context() as patch, writer_held(store):
        patch.setattr(
            SmallState, "count_write", failing_on_nth_call(2, SmallState.count_write, fail)
        )
        for number in range(3):
            submit(store, chain([number]), f"s{number}")
    assert store.turns_not_saved == 3 and store.index.keys() == set()
    assert store.disk.sweep() == 0 and store.index.n_sessions() == 0
    assert not list((store.folder / "sessions").iterdir())


def test_other_turns_are_saved_after_sqlite_rolls_back_the_transaction(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite rolls back a whole transaction if the disk fails within it."""
    store.drain()

    def fail(index: Index, *args: object) -> None:
        index.database.connection.execute("ROLLBACK")
        raise_no_space()

    with monkeypatch.context() as patch, writer_held(store):
        patch.setattr(Index, "put_session", failing_on_nth_call(3, Index.put_session, fail))
        for number in range(3):
            submit(store, chain([number]), f"s{number}")
    assert store.turns_not_saved == 1 and store.disk.sweep() == 0
    assert {session.name for session in store.index.sessions()} == {"s0", "s1"}
    assert len(list((store.folder / "sessions").iterdir())) == 2 and not store.index.faults()


@pytest.mark.parametrize("is_first", [True, False])
def test_failed_commit_keeps_plan_and_reserved_space_of_other_commits(
    is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget has room for the other commit's file once, but not twice."""
    real, large, small = Index.commit, *chain([1]), *chain([2])
    sizes = {large.key: 3 << 20, small.key: 1000}

    def commit(index: Index, new: Commit, *args: Any) -> object:
        if new.replies:
            raise_no_space()
        return real(index, new, *args)

    def file_of(_root: object, block: Record) -> NewFile:
        size = sizes[block.key]
        return NewFile(block, size, lambda path: path.write_bytes(bytes(size)))

    refused = Commit(ROOT, () if is_first else (small,), replies={b"digest": b"ids"})
    saved = Commit(ROOT, (large,))
    commits = [refused, saved] if is_first else [saved, refused]
    monkeypatch.setattr(Index, "commit", commit)
    with closing(DiskStore(tmp_path, StoreLimits(1 << 30, 6 << 20))) as disk:
        results = Saving(disk, file_of).save([partial(replace, each) for each in commits])
        assert sorted(isinstance(result, Saved) for result in results) == [False, True]
        assert disk.index.keys() == {large.key} and disk.n_evicted == 0


@pytest.mark.parametrize("n_failing", range(3))
def test_commit_that_cannot_be_planned_does_not_affect_other_commits(
    store: BlockStore, n_failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other commits are planned before room is made, so their blocks are not evicted."""
    nodes, disk = [*chain([1]), *chain([2]), *chain([3])], store.disk
    make_room = DiskStore.make_room
    arrays, kept = arrays_of(nodes[0]), list[set[bytes]]()

    def record_and_make_room(disk: DiskStore, n_bytes: int, keep: set[bytes], root: Root) -> bool:
        kept.append(keep)
        return make_room(disk, n_bytes, keep, root)

    def file_of(root: Root, block: Record) -> NewFile:
        return raise_no_space() if block is nodes[n_failing] else disk.new_file(root, block, arrays)

    store.drain()
    monkeypatch.setattr(DiskStore, "make_room", record_and_make_room)
    commits = [Commit(ROOT, (node,), replies={node.key: b"ids"}) for node in nodes]
    results = Saving(disk, file_of).save([partial(replace, each) for each in commits])
    saved = {nodes[n].key for n, result in enumerate(results) if isinstance(result, Saved)}
    assert saved == disk.index.keys() == {node.key for node in nodes} - {nodes[n_failing].key}
    assert isinstance(results[n_failing], OSError) and all(keep == saved for keep in kept)


def failing_on_nth_call(n: int, real: Callable[..., None], fail: Callable[..., None]) -> object:
    """Return a method that fails on its nth call."""
    calls: list[object] = []

    def call(*args: object) -> None:
        calls.append(args)
        (fail if len(calls) == n else real)(*args)

    return call


@pytest.mark.parametrize("is_in_ram", [True, False])
def test_blocks_evicted_by_another_process_are_rewritten_if_in_ram(
    store: BlockStore, is_in_ram: bool, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = chain([1], [2], [3])
    save_turn(store, nodes[:2], "s")
    with closing(DiskStore(store.folder, store.limits)) as other:
        for node in reversed(nodes[:2]):
            other.forget(node.key)
    if not is_in_ram:
        store.pool.clear()
    submit(store, nodes[2:], "s")
    store.drain()
    assert store.index.keys() == ({node.key for node in nodes} if is_in_ram else set())
    assert store.turns_not_saved == (not is_in_ram)
    assert ("which it needs" in caplog.text) == (not is_in_ram)


def test_bytes_of_waiting_turns_count_once_in_two_transactions(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first turn is committed while the file of the second turn's parent is written again."""
    first, second = chain([1], [2]), chain([5], [6])
    save_turn(store, second[:1], "second")
    removed: list[bytes] = []

    def remove_parent() -> None:
        if not removed:
            removed.append(second[0].key)
            with closing(DiskStore(store.folder, store.limits)) as other:
                other.forget(second[0].key)

    monkeypatch.setattr(store.writer, "rest", remove_parent)
    transactions: list[int] = []
    count_write = SmallState.count_write

    def counted(state: SmallState, n_bytes: int) -> None:
        transactions.append(n_bytes)
        count_write(state, n_bytes)

    monkeypatch.setattr(SmallState, "count_write", counted)
    with writer_held(store):
        submit(store, first, "first")
        submit(store, second[1:], "second")
    assert removed and len(list(filter(None, transactions))) == 2
    assert store.turns_saved == 3 and store.index.totals().n_blocks == 4
    stats = store.stats()
    assert stats["written_last_hour_bytes"] == stats["tiers"]["disk"]["written_bytes"]


@pytest.mark.parametrize("is_in_ram", [True, False])
def test_block_quarantined_by_another_process_is_rewritten_if_in_ram(
    store: BlockStore, is_in_ram: bool
) -> None:
    """The block is in the middle of a chain, so its children are still on disk."""
    nodes = chain([1], [2], [3], [4], [5])
    save_turn(store, nodes[:3], "s")
    save_turn(store, chain([7]), "another")
    with closing(DiskStore(store.folder, store.limits)) as other:
        other.quarantine(nodes[1].key, "it is damaged")
    if not is_in_ram:
        store.pool.clear()
    save_turn(store, chain([8], parent=chain([7])[0].key), "another")
    submit(store, nodes[3:4], "s")
    submit(store, nodes[4:], "s")
    store.drain()
    (session,) = store.index.sessions_named("s")
    blocks = [block for block, _ in store.index.chain(session.leaf)]
    assert blocks == (nodes if is_in_ram else [])
    assert store.turns_not_saved == 2 * (not is_in_ram)


def test_quarantined_block_is_written_with_the_next_turn(store: BlockStore) -> None:
    nodes = chain([1], [2], [3], [4])
    save_turn(store, nodes[:3], "s")
    store.writer.submit(partial(store.disk.quarantine, nodes[0].key, "it is damaged"))
    store.drain()
    submit(store, nodes[3:], "s")
    store.drain()
    assert [block for block, _ in store.index.chain(nodes[3].key)] == nodes


def test_chain_is_checked_for_gaps_only_after_another_process_wrote(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked_leaves: list[bytes] = []
    gap = Index.gap

    def counted(index: Index, leaf: bytes, root: bytes) -> bytes | None:
        checked_leaves.append(leaf)
        return gap(index, leaf, root)

    monkeypatch.setattr(Index, "gap", counted)
    nodes = chain([1], [2], [3], [4])
    for n in range(2):
        submit(store, nodes[n : n + 1], "s")
        store.drain()
    submit(store, chain([9], parent=nodes[0].key), "branch")
    store.drain()
    assert checked_leaves == []
    with closing(DiskStore(store.folder, store.limits)) as other, other.lock.held():
        other.index.touch(nodes[0].key)
    for n in range(2, 4):
        submit(store, nodes[n : n + 1], "s")
        store.drain()
    assert checked_leaves == [nodes[1].key]


@pytest.mark.parametrize("name", ["s", None])
def test_turn_continues_its_session_after_separately_committed_chunks(
    store: BlockStore, name: str | None
) -> None:
    """Chunks of the prompt are committed between the two turns."""
    nodes = chain([1], [2], [3], [4])
    save_turn(store, nodes[:1], name)
    save_turn(store, chain([7]), "another")
    for node in nodes[1:3]:
        submit(store, [node], ended=False)
    submit(store, nodes[3:], name)
    store.drain()
    ends = {session.name: session.leaf for session in store.index.sessions()}
    assert ends == {name: nodes[3].key, "another": chain([7])[0].key}
    submit(store, chain([5], parent=nodes[1].key), "third")  # a branch is another session
    store.drain()
    assert store.index.n_sessions() == 3


@pytest.mark.parametrize("name", ["s", None])
def test_repeated_turn_continues_the_session_that_its_interrupted_prompt_passed(
    store: BlockStore, name: str | None
) -> None:
    """The interrupted prompt has completed the block in which the session ends."""
    nodes, (tail,) = chain([1], [2, 3], [4]), chain([1], [2])[1:]
    save_turn(store, [nodes[0], tail], name)
    (session,) = store.index.sessions()
    submit(store, nodes[1:2], ended=False)
    submit(store, nodes[2:], name)
    store.drain()
    assert [(s.id, s.leaf) for s in store.index.sessions()] == [(session.id, nodes[2].key)]
    assert store.index.keys() == {node.key for node in nodes}
    assert not block_path(store.folder, tail.key).exists()


def test_inner_transaction_is_rolled_back_with_the_outer_transaction(tmp_path: Path) -> None:
    with closing(Index(tmp_path / "index.sqlite")) as index:
        first, second = chain([1], [2])
        with pytest.raises(OSError), index.database.transaction():
            index.add_blocks(ROOT, [(first, 7)])
            with index.database.transaction():
                index.add_blocks(ROOT, [(second, 7)])
            raise_no_space()
        assert index.keys() == set() and index.faults() == []


def test_blocks_of_a_dropped_turn_are_written_with_the_next_turn(store: BlockStore) -> None:
    """The dropped blocks wait in RAM, and the next turn continues them."""
    nodes = chain([1], [2], [3])
    with writer_held(store):
        for node in nodes[:2]:
            submit(store, [node], ended=False)
        for task in list(store.writer._tasks)[:1]:
            store.writer._tasks.remove(task)
            task.let_go()
        submit(store, nodes[2:])
        waiting = [store.pool.get(node.key) for node in nodes]
        assert store.writer.n_bytes == sum(entry.n_bytes for entry in waiting if entry)
    assert store.index.keys() == {node.key for node in nodes}


def test_remembered_reply_causes_no_second_match_of_prompts(store: BlockStore) -> None:
    n_changes = store.n_changes
    store.commit(Commit(ROOT, (), replies={b"digest": b"ids"}), [])
    assert store.n_changes == n_changes
    submit(store, chain([1]), "s")
    assert store.n_changes > n_changes
