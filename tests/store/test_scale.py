"""The cost of an operation must not grow with unrelated content. Steps are counted, not timed."""

from __future__ import annotations

import random
import sqlite3
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_lm_kvpersist.block import Block, Root, block_key, pack_ids, unpack_ids
from mlx_lm_kvpersist.cli import main as cli
from mlx_lm_kvpersist.match import TokenText, common_prefix, match_prompt
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from mlx_lm_kvpersist.store.database import Database
from mlx_lm_kvpersist.store.disk import DiskStore, fill
from mlx_lm_kvpersist.store.folder import OwnFiles, StoreLock
from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.store.pool import BlockPool
from mlx_lm_kvpersist.store.records import Commit, KVBlock, Leaf, Session
from mlx_lm_kvpersist.store.session_file import _session_through
from mlx_lm_kvpersist.store.verify import find_problems

from .conftest import ROOT, chain, save_turn


def steps(index: Index, act: Callable[[], object]) -> int:
    """Return the number of SQLite instructions, in tens, that `act` executes in this thread."""
    n_steps = 0

    def count() -> int:
        nonlocal n_steps
        n_steps += 1
        return 0

    index.database.connection.set_progress_handler(count, 10)
    try:
        act()
    finally:
        index.database.connection.set_progress_handler(None, 10)
    return n_steps


def store_with_sessions(folder: Path, n_sessions: int) -> BlockStore:
    store = BlockStore(folder, StoreLimits(1 << 30, 1 << 30))
    for n in range(n_sessions):
        save_turn(store, chain([1], [10 + n]), f"session {n}")
    return store


def test_cost_of_verifying_is_linear_in_sessions(tmp_path: Path) -> None:
    counts = []
    for n_sessions in (20, 80):
        store = store_with_sessions(tmp_path / str(n_sessions), n_sessions)

        def verify(store: BlockStore = store) -> None:
            assert find_problems(store.folder, store.index) == []

        counts.append(steps(store.index, verify))
        store.close()
    assert counts[1] < 6 * counts[0], counts


def test_cost_of_opening_a_store_does_not_grow_with_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer thread reads the rest of the index before it changes the store."""
    n_read: Counter[threading.Thread] = Counter()
    connect = Database._connect

    def counted(database: Database) -> sqlite3.Connection:
        db = connect(database)
        thread = threading.current_thread()
        db.set_progress_handler(lambda: n_read.update([thread]), 10)
        return db

    monkeypatch.setattr(Database, "_connect", counted)
    at_start, by_writer = [], []
    for n_sessions in (20, 200):
        store = store_with_sessions(tmp_path / str(n_sessions), n_sessions)
        limits = store.limits
        store.close()
        n_read.clear()
        store = BlockStore(store.folder, limits)
        at_start.append(n_read.pop(threading.current_thread()))
        store.close()
        by_writer.append(sum(n_read.values()))
    assert at_start[0] == at_start[1] > 0 and by_writer[1] > 5 * by_writer[0]


@pytest.mark.parametrize("n_sessions", [2, 9])
def test_a_rebuild_is_one_transaction(tmp_path: Path, n_sessions: int) -> None:
    store = store_with_sessions(tmp_path / "store", n_sessions)
    store.close()
    index = Index(tmp_path / "fresh.sqlite", OwnFiles(store.folder))
    statements: list[str] = []
    index.database.connection.set_trace_callback(statements.append)
    fill(index, lambda done, total: None)
    assert statements.count("COMMIT") == 1
    index.close()
    again = Index(tmp_path / "fresh.sqlite")
    assert again.totals().n_blocks == 1 + n_sessions
    again.close()


# Many conversations below one system prompt.

N_BLOCK_TOKENS = 256
OTHER = Root("another", "4b64")
WORDS = [f"{n} " for n in range(500)]
TOKENS = TokenText({n: word.encode() for n, word in enumerate(WORDS)}.get)


def block(parent: Block | None, rng: random.Random) -> Block:
    """Return a block of random tokens below `parent`, or below the root."""
    packed = pack_ids([rng.randrange(len(WORDS)) for _ in range(N_BLOCK_TOKENS)])
    above = parent.key if parent else ROOT.key
    text = TOKENS.decode(unpack_ids(packed))
    return Block(block_key(above, packed), above, parent.stop if parent else 0, packed, text)


class LargeIndex:
    """An index with `n` conversations below one block, and the prompt of a new conversation."""

    def __init__(self, path: Path, n: int) -> None:
        rng = random.Random(3)
        self.index = Index(path)
        self.head = block(None, rng)
        self.siblings = [block(self.head, rng) for _ in range(n)]
        self.index.add_blocks(ROOT, [(node, 7) for node in (self.head, *self.siblings)])
        self.other = chain([1], parent=OTHER.key)[0]
        self.index.add_blocks(OTHER, [(self.other, 7)])
        self.session = Session("id", ROOT.key, "s", b"", 512, False, 1.0, 1.0)
        with self.index.database.transaction():
            for number, node in enumerate(self.siblings):
                self.index.put_session(replace(self.session, id=f"{number}", leaf=node.key))
        self.new = block(self.head, rng)
        beginning = self.siblings[n // 2].ids[:100]
        self.prompt = [*self.head.ids, *beginning, *self.new.ids]


@pytest.fixture(scope="module")
def large_indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, LargeIndex]]:
    folder = tmp_path_factory.mktemp("many")
    indexes = {n: LargeIndex(folder / f"{n}.sqlite", n) for n in (100, 4000)}
    yield indexes
    for case in indexes.values():
        case.index.close()


def look_up_by_text(case: LargeIndex) -> None:
    match = match_prompt(case.index, ROOT.key, TOKENS.decode(case.prompt), TOKENS)
    assert match.n_tokens == N_BLOCK_TOKENS + 100 and not match.at_end


def look_up_by_ids(case: LargeIndex) -> None:
    match = match_prompt(case.index, ROOT.key, pack_ids(case.prompt))
    assert match.n_tokens == N_BLOCK_TOKENS + 100 and not match.at_end


def look_up_the_end(case: LargeIndex) -> None:
    """The whole block matches, and it has children."""
    assert not match_prompt(case.index, ROOT.key, case.head.text, TOKENS).at_end


def ask_whether_a_tail_is_replaced(case: LargeIndex) -> None:
    assert case.new not in case.index.children(case.head.key, case.new.packed_ids)


def find_the_session_of_a_leaf(case: LargeIndex) -> None:
    new = block(case.siblings[0], random.Random(7))
    session = case.index.session_of(Commit(ROOT, (new,), Leaf("s", new.key, new.stop)))
    assert session is not None and session.id == "0"


def find_no_session_for_a_new_conversation(case: LargeIndex) -> None:
    commit = Commit(ROOT, (case.new,), Leaf("s", case.new.key, case.new.stop))
    assert case.index.session_of(commit) is None and case.index.passed_tail(commit) is None


def count_everything(case: LargeIndex) -> None:
    case.index.totals()
    assert [root for root, _ in case.index.roots(64)] == [ROOT, OTHER]


def find_the_first_to_evict(case: LargeIndex) -> None:
    assert next(case.index.unused(ROOT.fingerprint))[-1] in {node.key for node in case.siblings}


def find_the_first_of_a_model_to_evict(case: LargeIndex) -> None:
    """All blocks of the other model would be evicted before this block."""
    ((*_, key),) = case.index.unused(OTHER.fingerprint)
    assert key == case.other.key


def add_a_block_and_remove_it(case: LargeIndex) -> None:
    before = case.index.totals()
    case.index.add_blocks(ROOT, [(case.new, 5)])
    assert case.index.totals() == replace(
        before, n_blocks=before.n_blocks + 1, block_bytes=before.block_bytes + 5
    )
    case.index.forget(case.new.key)
    assert case.index.totals() == before


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(look_up_by_text, id="text"),
        pytest.param(look_up_by_ids, id="ids"),
        pytest.param(look_up_the_end, id="at-end"),
        pytest.param(ask_whether_a_tail_is_replaced, id="tails"),
        pytest.param(find_the_session_of_a_leaf, id="session-at"),
        pytest.param(find_no_session_for_a_new_conversation, id="no-session"),
        pytest.param(count_everything, id="totals"),
        pytest.param(find_the_first_to_evict, id="evict"),
        pytest.param(find_the_first_of_a_model_to_evict, id="evict-model"),
        pytest.param(add_a_block_and_remove_it, id="save"),
    ],
)
def test_cost_of_an_operation_does_not_grow_with_the_index(
    large_indexes: dict[int, LargeIndex], act: Callable[[LargeIndex], None]
) -> None:
    few, more = (steps(case.index, partial(act, case)) for case in large_indexes.values())
    assert more <= 1.5 * few + 10, (few, more)


def test_number_of_queries_for_a_new_session_does_not_grow_with_the_conversation(
    tmp_path: Path,
) -> None:
    """The writer finds the session under the store's lock."""
    counts = []
    for n in (4, 40):
        disk = DiskStore(tmp_path / str(n), StoreLimits(0, 1 << 40))
        *nodes, new = chain(*([number] for number in range(n)))
        (other,) = chain([1000])
        disk.index.add_blocks(ROOT, [(node, 7) for node in (*nodes, other)])
        disk.index.put_session(Session("id", ROOT.key, None, other.key, 1, False, 1.0, 1.0))
        queries: list[str] = []
        disk.index.database.connection.set_trace_callback(queries.append)
        _, session = disk.session_of(Commit(ROOT, (new,), Leaf(None, new.key, new.stop)))
        assert session is not None and session.id != "id"
        counts.append(len(queries))
        disk.close()
    assert counts[0] == counts[1], counts


@settings(max_examples=40)
@given(data=st.data())
def test_pool_and_index_return_the_children_nearest_to_the_prompt(data: Any) -> None:
    """No omitted child has more in common with the prompt than the returned children."""
    contents = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=20))
    contents = [list(ids) for ids in {tuple(ids) for ids in contents}]
    ahead = data.draw(st.lists(st.integers(0, 3), max_size=8))
    nodes = [chain(ids)[0] for ids in contents]
    pool = BlockPool(1 << 40)
    for node in nodes:
        pool.put(KVBlock(node, None, 1))
    with tempfile.TemporaryDirectory() as folder:
        index = Index(Path(folder) / "index.sqlite")
        index.add_blocks(ROOT, [(node, 1) for node in nodes])
        wanted: Any
        for wanted, name in (
            ("".join(f"<{i}>" for i in ahead), "text"),
            (pack_ids(ahead), "packed_ids"),
        ):
            common = {node.key: common_prefix(getattr(node, name), wanted, 0) for node in nodes}
            for children in (pool.children(ROOT.key, wanted), index.children(ROOT.key, wanted)):
                keys = {node.key for node in children}
                whole = {n.key for n in nodes if wanted.startswith(getattr(n, name))}
                assert whole <= keys
                assert max(common[key] for key in keys) == max(common.values())
        index.close()
    for node in data.draw(st.permutations(nodes)):
        pool.remove(node.key)
    assert len(pool) == 0 and pool.children(ROOT.key) == []


@pytest.mark.parametrize("n", [5_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_lookup_in_ram_reads_few_of_thousands_of_siblings(n: int) -> None:
    rng = random.Random(5)
    pool = BlockPool(1 << 40)
    head = block(None, rng)
    nodes = [block(head, rng) for _ in range(n)]
    for node in (head, *nodes):
        pool.put(KVBlock(node, None, 1))
    new = [*nodes[77].ids[:100], *block(head, rng).ids]
    for ahead in (TOKENS.decode(new), pack_ids(new)):
        children = pool.children(head.key, ahead)
        assert nodes[77] in children and len(children) < 100
    match = match_prompt(pool, ROOT.key, pack_ids([*head.ids, *new]))
    assert match.n_tokens == N_BLOCK_TOKENS + 100
    assert len(pool.children(head.key, limit=2)) == 2


class Key(bytes):
    """A key whose comparisons are counted."""

    n_compared = 0

    def __eq__(self, other: object) -> bool:
        Key.n_compared += 1
        return bytes.__eq__(self, other)

    def __lt__(self, other: bytes) -> bool:
        Key.n_compared += 1
        return bytes.__lt__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = bytes.__hash__


@pytest.mark.parametrize("text", ["alike", None])
def test_cost_of_evicting_does_not_grow_with_the_siblings(text: str | None) -> None:
    """The siblings have equal texts, or different texts."""
    counts = []
    for n in (100, 4000):
        pool, rng = BlockPool(1 << 40), random.Random(7)
        for _ in range(n):
            node = block(None, rng)
            node = replace(node, key=Key(node.key), text=text or node.text)
            pool.put(KVBlock(node, None, 1))
        Key.n_compared = 0
        assert pool.release(50) == 50
        counts.append(Key.n_compared)
    assert counts[1] < 3 * counts[0] + 100, counts


# Isolated sessions: each session has its own root.


def isolated_sessions(folder: Path, n: int) -> Index:
    OwnFiles(folder).take_into_use(StoreLock(folder / "lock"))
    index = Index(folder / "index.sqlite")
    with index.database.transaction():
        for number in range(n):
            root = replace(ROOT, session=f"session {number}")
            (node,) = chain([number], parent=root.key)
            index.add_blocks(root, [(node, 7)])
            index.put_session(
                Session(f"{number:016x}", root.key, None, node.key, 1, False, 1.0, 1.0)
            )
    return index


def test_removing_a_session_reads_no_root_of_another_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    from_json = Root.from_json
    for n in (20, 200):
        isolated_sessions(tmp_path / str(n), n).close()
        disk = DiskStore(tmp_path / str(n), StoreLimits(0, 1 << 40))
        n_read = Counter[str]()

        def counted(text: str, n_read: Counter[str] = n_read) -> Root:
            n_read.update(["roots"])
            return from_json(text)

        monkeypatch.setattr(Root, "from_json", staticmethod(counted))
        disk.remove_session(disk.index.sessions(1)[0])
        monkeypatch.undo()
        counts.append(n_read["roots"])
        disk.close()
    assert counts[1] <= counts[0] + 10, counts


def test_removing_all_sessions_flushes_the_log_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each flush waits for the device, while this process has the store's lock."""
    isolated_sessions(tmp_path / "store", 30).close()
    n_emptied: Counter[str] = Counter()
    empty_log = Database.empty_log

    def counted(database: Database) -> bool:
        n_emptied.update(["log"])
        return empty_log(database)

    monkeypatch.setattr(Database, "empty_log", counted)
    options = ["--kvpersist-dir", str(tmp_path / "store")]
    assert cli.main(["sessions", "rm", *options, "--all", "--yes"]) == 0
    assert n_emptied["log"] <= 3


class CountedRoot(bytes):
    n_compared = 0

    def __eq__(self, other: object) -> bool:
        CountedRoot.n_compared += 1
        return bytes.__eq__(self, other)

    __hash__ = bytes.__hash__


def test_cost_of_statistics_is_linear_in_isolated_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a quadratic cost, 20,000 isolated sessions took half a minute of CPU time."""
    sessions, counts = Index.sessions, []

    def compared(index: Index, *page: int) -> list[Session]:
        return [replace(each, root=CountedRoot(each.root)) for each in sessions(index, *page)]

    monkeypatch.setattr(Index, "sessions", compared)
    for n in (20, 200):
        isolated_sessions(tmp_path / str(n), n).close()
        CountedRoot.n_compared = 0
        assert cli.main(["store", "stats", "--kvpersist-dir", str(tmp_path / str(n))]) == 0
        counts.append(CountedRoot.n_compared)
    assert counts[1] <= 20 * max(counts[0], 1), counts


def find_the_session_of_an_import(case: LargeIndex) -> None:
    leaf = Leaf("s", case.new.key, case.new.stop)
    assert _session_through(case.index, ROOT, leaf) is None


def test_import_reads_no_chain_of_another_session(large_indexes: dict[int, LargeIndex]) -> None:
    """The search needs the store's lock, and is repeated for each plan."""
    few, more = (
        steps(case.index, partial(find_the_session_of_an_import, case))
        for case in large_indexes.values()
    )
    assert more <= 1.5 * few + 10, (few, more)


def test_list_with_a_limit_describes_only_the_listed_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolated_sessions(tmp_path / "store", 30).close()
    outline, n_asked = Index.outline, Counter[str]()

    def counted(index: Index, leaves: Any) -> Any:
        n_asked.update(["outline"])
        return outline(index, leaves)

    monkeypatch.setattr(Index, "outline", counted)
    options = ["--kvpersist-dir", str(tmp_path / "store")]
    assert cli.main(["sessions", "list", *options, "--limit", "2"]) == 0
    assert n_asked["outline"] <= 2
