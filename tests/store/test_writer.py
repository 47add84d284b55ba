"""The writer thread: its pauses, its queue, other processes, and budgets."""

from __future__ import annotations

import math
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.block import Block, Root
from mlx_lm_kvpersist.store import writer as writer_module
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.disk import DiskStore
from mlx_lm_kvpersist.store.folder import Staging, StoreLock
from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.store.records import Leaf
from mlx_lm_kvpersist.store.verify import find_problems
from mlx_lm_kvpersist.store.writer import Task, Writer
from tests.support import hold, wait_until
from tests.support.clock import Clock

from .conftest import ROOT, arrays_of, chain, save_turn


@pytest.fixture
def writer() -> Iterator[Writer]:
    writer = Writer(100, lambda tasks: [task.run() for task in tasks])
    yield writer
    writer.close(60)


@pytest.fixture
def clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the writers' pauses. Request this fixture before `writer`."""
    named = {"Condition": clock.condition, "Thread": threading.Thread, "TIMEOUT_MAX": math.inf}
    monkeypatch.setattr(writer_module, "threading", SimpleNamespace(**named))
    return clock


def wait_for_pause(clock: Clock, seconds: float) -> None:
    """Wait until the writer pauses for this many seconds."""
    wait_until(lambda: pauses_s(clock) == pytest.approx([seconds]), f"a pause of {seconds} s")


def pauses_s(clock: Clock) -> list[float]:
    return [seconds for seconds in clock.waits_s() if seconds < math.inf]


def submit(
    writer: Writer,
    n_bytes: int,
    save: Callable[[], Any] = lambda: None,
    abandon: Callable[[], None] = lambda: None,
    key: bytes | None = None,
) -> None:
    sizes = {key or uuid.uuid4().bytes: n_bytes}
    writer.submit_commit(Task(save, Commit(ROOT, ()), abandon, sizes))


def save(
    writer: Writer, nodes: list[Block], run: Callable[[], Any] = lambda: None, *, ended: bool = True
) -> None:
    """Save the computed part of a conversation, as a turn if its reply has `ended`."""
    leaf = Leaf(None, nodes[-1].key, nodes[-1].stop) if ended else None
    writer.submit_commit(Task(run, Commit(ROOT, tuple(nodes), leaf)))


def serve(writer: Writer, rest_factor: float = 1e12) -> None:
    """Set one running reply; the default factor makes pauses endless."""
    writer.rest_factor = rest_factor
    writer.set_n_replies(1)


def pausing(writer: Writer, work: Callable[[], Any] = lambda: None) -> threading.Event:
    """Let the writer work and pause; return an event that is set after the pause."""
    ended = threading.Event()

    def run() -> None:
        work()
        writer.rest()
        ended.set()

    writer.submit(run)
    return ended


def test_pause_takes_the_factor_times_the_work(clock: Clock, writer: Writer) -> None:
    serve(writer, 6)
    ended = pausing(writer, partial(clock.sleep, 0.05))
    wait_for_pause(clock, 6 * 0.05)
    clock.advance(5.9 * 0.05)
    wait_for_pause(clock, 0.1 * 0.05)
    assert not ended.is_set()
    clock.advance(0.2 * 0.05)
    assert ended.wait(60)


def test_skipped_pause_is_added_to_the_next_pause(clock: Clock, writer: Writer) -> None:
    serve(writer, 6)
    writer.submit(partial(clock.sleep, 0.05))
    writer.drain()
    assert not pauses_s(clock), "nothing waits for the pause"
    clock.advance(0.1)
    ended = pausing(writer)
    wait_for_pause(clock, 6 * 0.05 - 0.1)
    clock.advance(1.0)
    assert ended.wait(60)


def test_writer_does_not_pause_while_no_reply_runs(writer: Writer) -> None:
    assert pausing(writer).wait(60)


@pytest.fixture
def gathering(clock: Clock) -> Iterator[tuple[Writer, list[int]]]:
    """A writer with a stopped clock, and the number of tasks in each save."""
    sizes: list[int] = []
    writer = Writer(100, lambda tasks: sizes.append(len(tasks)))
    yield writer, sizes
    writer.close(60)


def test_turns_and_notes_are_gathered_and_saved_together(
    clock: Clock, gathering: tuple[Writer, list[int]]
) -> None:
    writer, sizes = gathering
    for n in range(3):
        save(writer, chain([n]))
        writer.submit(lambda: None, is_note=True)
    wait_for_pause(clock, writer_module.GATHER_S)
    assert not sizes
    clock.advance(writer_module.GATHER_S)
    wait_until(lambda: not writer.n_tasks, "all being saved")
    assert sizes == [3, 3]


@pytest.mark.parametrize(
    "end",
    [
        lambda writer: submit(writer, 51),
        lambda writer: writer.submit(lambda: None),
        lambda writer: writer.finish(lambda: not writer.n_tasks, 60),
        lambda writer: writer.drain(),
        lambda writer: writer.close(60),
    ],
    ids=["half full", "other task", "waited for", "drained", "closed"],
)
def test_gathering_of_turns_ends_early(
    clock: Clock, gathering: tuple[Writer, list[int]], end: Callable[[Writer], Any]
) -> None:
    """The clock is stopped, so the time for gathering never passes."""
    writer, sizes = gathering
    save(writer, chain([1]))
    wait_for_pause(clock, writer_module.GATHER_S)
    end(writer)
    wait_until(lambda: bool(sizes) and not writer.n_tasks, "the turn being saved", 20)


def test_failed_note_does_not_affect_other_notes(store: BlockStore) -> None:
    def add(name: str, index: Index) -> None:
        if name == "second":
            raise OSError("no")
        index.state.add_note(name, words="some")

    for name in ("first", "second", "third"):
        store.change_index(f"add {name}", partial(add, name))
    store.drain()
    notes = [store.index.state.note(name) for name in ("first", "second", "third")]
    assert [bool(note) for note in notes] == [True, False, True]


def test_finish_waits_no_longer_than_its_timeout(clock: Clock, writer: Writer) -> None:
    may_end = threading.Event()
    save(writer, chain([1]), ended=False)
    save(writer, chain([2]), partial(may_end.wait, 60), ended=False)
    writer.finish(lambda: writer.n_tasks <= 1, 5)
    waiting = threading.Thread(target=writer.finish, args=(lambda: not writer.n_tasks, 0.1))
    waiting.start()
    wait_for_pause(clock, 0.1)
    clock.advance(0.1)
    waiting.join(60)
    assert not waiting.is_alive() and writer.n_tasks == 1
    may_end.set()


def test_ended_turn_is_saved_before_unfinished_prompts(writer: Writer) -> None:
    """The turn's own prompt is saved before the turn, so dropped blocks are not written later."""
    may_continue, may_end = hold(writer), threading.Event()
    saved: list[str] = []
    turn = chain([1], [2], [3])
    save(writer, chain([7], [8]), lambda: saved.append("a long prompt"), ended=False)
    writer.submit(partial(may_end.wait, 60))
    save(writer, turn[:2], lambda: saved.append("its prompt"), ended=False)
    save(writer, chain([9]), lambda: saved.append("another turn"))
    save(writer, turn, lambda: saved.append("its turn"))
    may_continue.set()
    writer.finish(lambda: len(saved) >= 3, 10)
    assert saved[:3] == ["another turn", "its prompt", "its turn"]
    may_end.set()
    writer.drain()
    assert saved[3:] == ["a long prompt"]


def test_drain_waits_for_tasks_that_are_submitted_during_it(writer: Writer) -> None:
    done: list[str] = []

    def run() -> None:
        writer.submit(lambda: done.append("second"))
        done.append("first")

    writer.submit(run)
    writer.drain()
    assert done == ["first", "second"]


@pytest.mark.parametrize(
    "end",
    [
        lambda writer: writer.set_n_replies(0),
        lambda writer: submit(writer, 51),
        lambda writer: writer.finish(lambda: not writer.n_tasks, 10),
        lambda writer: writer.drain(),
        lambda writer: writer.close(60),
    ],
    ids=["no replies", "half full", "waited for", "drained", "closed"],
)
def test_pause_ends_early(clock: Clock, writer: Writer, end: Callable[[Writer], Any]) -> None:
    serve(writer)
    ended = pausing(writer, partial(clock.sleep, 0.01))
    wait_for_pause(clock, writer_module.MAX_AGE_S)
    submit(writer, 50)
    assert not ended.wait(0.02)  # a waiting turn does not end the pause
    end(writer)
    assert ended.wait(60)


def test_turn_is_committed_after_a_pause_for_each_file(store: BlockStore) -> None:
    nodes = chain([1], [2], [3])
    store.drain()
    n_pauses = 0
    may_continue = threading.Event()

    def rest() -> None:
        nonlocal n_pauses
        n_pauses += 1
        may_continue.wait(60)

    store.writer.rest = rest  # type: ignore[method-assign]
    store.commit(Commit(ROOT, tuple(nodes)), [(node, arrays_of(node)) for node in nodes])
    wait_until(lambda: n_pauses == 1, "the first pause")
    assert store.index.totals().n_blocks == 0
    may_continue.set()
    store.drain()
    assert n_pauses == 3
    assert store.index.totals().n_blocks == 3


def test_newest_reply_is_found_before_and_after_an_older_reply_is_saved(
    store: BlockStore,
) -> None:
    begin, is_saved, may_continue = hold(store.writer), threading.Event(), threading.Event()
    store.commit(Commit(ROOT, (), None, {b"digest": b"old!"}), [])
    store.writer.submit(is_saved.set)
    store.writer.submit(may_continue.wait)
    store.commit(Commit(ROOT, (), None, {b"digest": b"new!"}), [])
    try:
        assert store.replies(ROOT.key, [b"digest"]) == {b"digest": b"new!"}
        begin.set()
        assert is_saved.wait(60)
        assert store.replies(ROOT.key, [b"digest"]) == {b"digest": b"new!"}
    finally:
        may_continue.set()
    store.drain()
    assert store.replies(ROOT.key, [b"digest"]) == {b"digest": b"new!"}


# The queue: its size, and the age of turns.


def test_skipped_pauses_add_up_to_a_limited_pause(clock: Clock, writer: Writer) -> None:
    serve(writer)
    for _ in range(3):
        writer.submit(partial(clock.sleep, 0.01))
        writer.drain()
    pausing(writer)
    wait_for_pause(clock, writer_module.MAX_AGE_S)


def test_writer_does_not_pause_while_an_old_turn_waits(
    clock: Clock, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "GATHER_S", 0.0)
    serve(writer)
    times_s: list[float] = []

    def save() -> None:
        for _ in range(3):
            clock.sleep(0.5)
            writer.rest()
            times_s.append(clock.monotonic())

    began_s = clock.monotonic()
    task = Task(save, Commit(ROOT, ()), sizes={b"key": 1}, since_s=began_s)
    writer.submit_commit(task)
    wait_for_pause(clock, writer_module.MAX_AGE_S - 0.5)
    clock.advance(writer_module.MAX_AGE_S - 0.5)
    wait_until(lambda: len(times_s) == 3, "three pauses")
    expected_s = [writer_module.MAX_AGE_S + late_s for late_s in (0.0, 0.5, 1.0)]
    assert [time_s - began_s for time_s in times_s] == pytest.approx(expected_s)


def test_turn_being_written_counts_toward_the_limit_of_waiting_bytes(writer: Writer) -> None:
    may_continue = threading.Event()
    dropped: list[str] = []

    def wait(name: str, n_bytes: int, key: bytes | None = None) -> None:
        submit(writer, n_bytes, partial(may_continue.wait, 60), partial(dropped.append, name), key)

    wait("running", 60, b"running")
    wait_until(lambda: not writer._tasks, "the first turn being written")
    assert writer.n_bytes == 60
    wait("waiting", 30, b"waiting")
    assert (writer.n_bytes, dropped) == (90, [])
    wait("same", 60, b"running")
    assert (writer.n_bytes, dropped) == (90, [])  # the block is in RAM only once
    wait("newest", 30)
    assert (writer.n_bytes, dropped) == (90, ["waiting"])
    wait("much", 140)
    assert (writer.n_bytes, dropped) == (200, ["waiting", "same", "newest"])
    wait("too much", 141)
    assert (writer.n_bytes, dropped[3:]) == (60, ["much", "too much"])
    may_continue.set()
    writer.drain()
    assert writer.n_bytes == 0
    may_continue.clear()
    wait("alone", 1000)
    wait_until(lambda: not writer._tasks, "the big turn being written")
    wait("behind it", 100)
    assert (writer.n_bytes, dropped[5:]) == (1100, [])
    may_continue.set()


def test_turn_of_any_size_may_wait_behind_other_tasks(writer: Writer) -> None:
    """Another task is, for example, the sweep of a server that has just started."""
    may_continue, dropped = hold(writer), list[str]()
    submit(writer, 1000, abandon=partial(dropped.append, "big"))
    assert (writer.n_bytes, dropped) == (1000, [])
    submit(writer, 1000, abandon=partial(dropped.append, "bigger"))
    assert (writer.n_bytes, dropped) == (1000, ["big"])
    may_continue.set()
    writer.drain()
    assert dropped == ["big"]


@pytest.mark.parametrize("is_running", [False, True])
def test_big_turn_is_dropped_if_a_waiting_prompt_contains_it(
    writer: Writer, is_running: bool
) -> None:
    """The prompt's commit has the turn's blocks, and replaces the turn in the queue."""
    dropped, n_lost, nodes = list[str](), 0, chain([1], [2], [3])
    may_continue = hold(writer) if is_running else threading.Event()
    with writer._changed:  # now the writer takes no task
        for name, n_blocks, n_bytes in (("prompt", 3, 90), ("turn", 2, 1000)):
            keys = tuple(node.key for node in nodes[:n_blocks])
            leaf = Leaf(None, keys[-1], nodes[n_blocks - 1].stop) if name == "turn" else None
            abandon, sizes = partial(dropped.append, name), {name.encode(): n_bytes}
            commit = Commit(ROOT, tuple(nodes[:n_blocks]), leaf)
            n_lost += writer.submit_commit(Task(lambda: None, commit, abandon, sizes))
        assert (writer.n_bytes, dropped, n_lost) == (90, ["turn"], 0)
    may_continue.set()
    writer.drain()


def test_turn_that_is_dropped_for_another_conversation_counts_as_lost(writer: Writer) -> None:
    n_lost = []
    with writer._changed:  # now the writer takes no task
        for (node,) in (chain([1]), chain([2])):
            commit = Commit(ROOT, (node,), Leaf(None, node.key, node.stop))
            n_lost.append(writer.submit_commit(Task(commit=commit, sizes={node.key: 1000})))
    assert n_lost == [0, 1]


@pytest.mark.slow
def test_at_most_five_percent_of_blocks_of_four_clients_are_lost(tmp_path: Path) -> None:
    """Replies run all the time, so the writer pauses as long as it may.

    Writing without pauses takes a third of the time. With a pause after each file it took twice the
    available time.
    """
    limits = StoreLimits(max_ram_bytes=1 << 20, max_disk_bytes=1 << 30)
    store = BlockStore(tmp_path / "store", limits)
    store.drain()
    started = time.monotonic()
    for number in range(5):
        save_turn(store, chain([2000, number]))
    pause_s = 4 * 3 * (time.monotonic() - started) / 5
    serve(store.writer, 6)
    ends = time.monotonic() + 8
    peaks: list[int] = []
    generation_thread = threading.Lock()
    chains: dict[int, list[bytes]] = {}

    def client(number: int) -> None:
        ids = [[1000 + number]]
        while time.monotonic() < ends:
            ids.append([len(ids)])
            nodes = chain(*ids)
            keys = tuple(node.key for node in nodes)
            leaf = Leaf(f"c{number}", keys[-1], nodes[-1].stop)
            with generation_thread:
                new = [(node, arrays_of(node)) for node in nodes if node.key not in store]
                store.commit(Commit(ROOT, tuple(nodes), leaf), new)
                peaks.append(store.pool.n_bytes)
            chains[number] = list(keys)
            time.sleep(pause_s)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    # All blocks that wait or are being written are in RAM. The newest turn and the turn that is
    # being written may together take twice `max_bytes`.
    queue = store.stats()["queue"]
    assert queue["bytes"] <= max(peaks) <= limits.max_ram_bytes == 2 * queue["max_bytes"]
    store.close()
    disk = DiskStore(tmp_path / "store", limits)
    blocks = [key for keys in chains.values() for key in keys]
    assert len(chains) == 4 and len(blocks) > 8
    n_lost = sum(key not in disk.index for key in blocks)
    assert n_lost <= len(blocks) // 20, f"{n_lost} of {len(blocks)}"
    disk.close()


def test_close_logs_the_number_of_unwritten_turns(
    store: BlockStore, caplog: pytest.LogCaptureFixture
) -> None:
    release = hold(store.writer)
    for number in range(3):
        nodes = chain([number])
        store.commit(Commit(ROOT, tuple(nodes)), [(nodes[0], arrays_of(nodes[0]))])
    store.close(0.3)
    assert store.writer.is_alive(), "close did not wait for the task"
    release.set()
    logged = [r.getMessage() for r in caplog.records if "written" in r.getMessage()]
    assert len(logged) == 1 and "\n" not in logged[0]
    assert logged[0].startswith(
        "kvpersist: 3 turns or checkpoints (192.0 KiB) were not written within 0 s"
    )


# Other processes.


def hold_at_pauses(store: BlockStore) -> threading.Semaphore:
    """Let the writer wait at each pause until the returned semaphore is released."""
    store.drain()
    released = threading.Semaphore(0)

    def rest() -> None:
        released.acquire(timeout=60)

    store.writer.rest = rest  # type: ignore[method-assign]
    return released


def commit_blocks(store: BlockStore, n_blocks: int) -> None:
    nodes = chain(*([n] for n in range(n_blocks)))
    store.commit(Commit(ROOT, tuple(nodes)), [(node, arrays_of(node)) for node in nodes])


def test_other_process_can_take_the_lock_during_a_pause(store: BlockStore) -> None:
    store.drain()
    n_pauses, lock = 0, StoreLock(store.folder / "lock")

    def rest() -> None:
        nonlocal n_pauses
        with lock.held():  # raises if another process has it for two seconds
            n_pauses += 1

    store.writer.rest = rest  # type: ignore[method-assign]
    commit_blocks(store, 20)
    store.drain()
    assert n_pauses >= 20 and store.index.totals().n_blocks == 20


def test_other_process_can_sweep_and_evict_while_a_turn_is_written(
    store: BlockStore, limits: StoreLimits
) -> None:
    other = DiskStore(store.folder, limits)
    before = other.used_bytes()
    pauses = hold_at_pauses(store)
    commit_blocks(store, 10)
    wait_until(lambda: other.used_bytes() > before + 600_000, "the announcement of 10 blocks")
    for _ in range(8):
        assert other.index.totals().n_blocks == 0
        assert other.sweep() == 0
        assert other.make_room(100_000) and not other.make_room(1 << 22)
        pauses.release()
    pauses.release(10)
    store.drain()
    assert other.index.totals().n_blocks == 10 and other.sweep() == 0
    assert find_problems(other.folder, other.index) == []
    assert not list((other.folder / "writing").iterdir())
    other.close()


def test_block_removed_while_a_turn_is_written_is_written_again(
    store: BlockStore, limits: StoreLimits
) -> None:
    """Another process evicts the beginning of the conversation that is being written."""
    (first,) = save_turn(store, chain([0]))
    other = DiskStore(store.folder, limits)
    pauses = hold_at_pauses(store)
    commit_blocks(store, 10)
    wait_until(lambda: any((other.folder / "writing").glob("*.lock")), "writing")
    other.forget(first)
    pauses.release(100)
    store.drain()
    assert store.turns_not_saved == 0
    assert other.index.totals().n_blocks == 10 and other.sweep() == 0
    other.close()


def test_sweep_removes_unfinished_files_of_a_killed_process(store: BlockStore) -> None:
    store.drain()
    (store.folder / "writing").mkdir()
    for name in ("0badcafe.lock", f"0badcafe-{'ab' * 16}.safetensors"):
        (store.folder / "writing" / name).write_bytes(b"1000")
    assert store.disk.sweep() == 2
    assert not list((store.folder / "writing").iterdir())


# Budgets.


def whole_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_metadata_with_a_long_namespace_stays_within_the_budget(tmp_path: Path) -> None:
    """The files' metadata counts before the files are written."""
    limits = StoreLimits(4 << 20, 2 << 20)
    for n_chars, n_saved in ((10, 25), (100_000, 0)):
        root = Root("fingerprint", "4b64", namespace="n" * n_chars)
        store = BlockStore(tmp_path / f"store{n_chars}", limits)
        nodes = chain(*([n] for n in range(25)), parent=root.key)
        store.commit(Commit(root, tuple(nodes)), [(node, {}) for node in nodes])
        store.drain()
        assert store.index.totals().n_blocks == n_saved
        assert whole_bytes(store.folder) <= limits.max_disk_bytes
        store.close()


def test_rows_of_the_index_count_toward_the_budget(tmp_path: Path) -> None:
    """The blocks have much text, so the index and its log are larger than the files."""
    limits = StoreLimits(4 << 20, 4 << 20)
    store = BlockStore(tmp_path / "store", limits)
    for start in range(0, 2000, 200):
        nodes = [
            replace(node, text="€" * 1000) for node in chain(*([start + n] for n in range(200)))
        ]
        store.commit(Commit(ROOT, tuple(nodes)), [(node, {}) for node in nodes])
        store.drain()
        assert whole_bytes(store.folder) <= limits.max_disk_bytes
    store.close()


def test_store_as_text_has_its_size_and_limits(store: BlockStore, limits: StoreLimits) -> None:
    text = str(store.disk)
    assert text.startswith(f"{store.folder} (") and "of 4.0 MiB, " in text
    assert "min-free" not in text
    store.disk.limits = replace(limits, min_free_bytes=1 << 60)
    assert "less than the 1048576.0 TiB of --kvpersist-min-free" in str(store.disk)
    assert "\n" not in str(store.disk)


@pytest.mark.parametrize("has_min_free", [False, True])
def test_bytes_announced_by_another_process_count(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch, has_min_free: bool
) -> None:
    """One process has announced a turn and written nothing; the other leaves room for it."""
    save_turn(store, chain([1], [2]), "old")
    used = store.disk.used_bytes()
    limits = replace(store.limits, max_disk_bytes=used + (8 << 20))
    if has_min_free:
        free = SimpleNamespace(free=12 << 20)
        monkeypatch.setattr("shutil.disk_usage", lambda folder: free)
        limits = replace(store.limits, min_free_bytes=1 << 20)
    other = DiskStore(store.folder, limits)
    try:
        assert other.make_room(2 << 20) and len(store.index.keys()) == 2
        with closing(Staging(store.disk.files)) as staging:
            with store.disk.lock.held():
                staging.announce(10 << 20 if has_min_free else 7 << 20)
            keys = store.index.keys()
            assert not other.make_room(2 << 20)
            # An empty store would not leave enough free space, either, so nothing is evicted.
            assert store.index.keys() == (keys if has_min_free else set())
            staging.close()
            assert other.used_bytes() <= used
    finally:
        other.close()


def test_turn_without_arrays_is_not_dropped_from_a_full_queue(writer: Writer) -> None:
    """If too many bytes wait, only turns with arrays are dropped."""
    may_continue, dropped = hold(writer), list[str]()
    turns = {"reply": {}, "first": {b"1": 6}, "second": {b"2": 6}}
    writer.max_bytes = 10
    for name, sizes in turns.items():
        abandon = partial(dropped.append, name)
        writer.submit_commit(Task(lambda: None, Commit(ROOT, ()), abandon, sizes))
    may_continue.set()
    writer.drain()
    assert dropped == ["first"]


def test_idle_writer_writes_a_postponed_checkpoint_when_it_is_due(
    clock: Clock, writer: Writer
) -> None:
    writer.drain()
    is_run = threading.Event()
    writer.postpone(b"end", Task(is_run.set, Commit(ROOT, ())), has_ended=True)
    wait_for_pause(clock, writer_module.POSTPONE_S)
    assert not is_run.is_set()
    clock.advance(writer_module.POSTPONE_S)
    wait_for_pause(clock, writer_module.GATHER_S)
    clock.advance(writer_module.GATHER_S)
    assert is_run.wait(60)


def test_idle_writer_frees_the_finished_task(writer: Writer) -> None:
    """The task's arrays must not stay in RAM until the next task."""
    event = threading.Event()
    event_or_none = weakref.ref(event)
    writer.submit(event.set)
    writer.drain()
    del event
    wait_until(lambda: event_or_none() is None, "the release of the finished task")


def test_waiting_notes_are_bounded_and_other_tasks_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may hold the store's lock for hours."""
    monkeypatch.setattr(writer_module, "MOST_TASKS", 10)
    done = list[str]()

    def note(name: str, index: object) -> None:
        done.append(name)

    with closing(BlockStore(tmp_path / "store", StoreLimits(4 << 20, 4 << 20))) as store:
        store.drain()
        release = hold(store.writer)
        for n in range(100):
            store.change_index("note", partial(note, f"note {n}"))
            store.touch([chain([1])[0].key])
        assert store.writer.n_tasks <= 11
        store.writer.submit(lambda: done.append("a task"))
        release.set()
        store.drain()
    assert done == [*(f"note {n}" for n in range(5)), "a task"]
