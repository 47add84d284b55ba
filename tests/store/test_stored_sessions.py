"""The sessions of a store as an operator sees and changes them, without a server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.block import Block, Record, Root
from mlx_lm_kvpersist.errors import RequestRefused, StoreError
from mlx_lm_kvpersist.request.outcome import Kind, Outcome, RequestLog
from mlx_lm_kvpersist.request.serving import RequestState
from mlx_lm_kvpersist.store import stored_sessions
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.disk import DiskStore, rebuild_index
from mlx_lm_kvpersist.store.folder import OwnFiles, StoreLock
from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.store.records import KVBlock, Leaf, Session
from mlx_lm_kvpersist.store.stored_sessions import SHOWN, StoredSessions
from tests.support import writer_held

from .conftest import ROOT, arrays_of, chain, save_turn, state, window


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    store = BlockStore(tmp_path / "store", StoreLimits(1 << 20, 1 << 30))
    store.drain()  # the sweep of rows without files has run
    yield store
    store.close()


def add(store: BlockStore, session_id: str, blocks: Sequence[Record], used: float = 1.0) -> None:
    """Add a session to the index, as if its blocks of 10 bytes had files."""
    store.index.add_blocks(ROOT, [(block, 10) for block in blocks if block.key not in store.index])
    leaf = next(block for block in reversed(blocks) if isinstance(block, Block))
    store.index.put_session(
        Session(session_id, ROOT.key, None, leaf.key, leaf.stop, False, 1.0, used)
    )


def add_five_sessions(store: BlockStore) -> list[Block]:
    """Add sessions, of which four share two blocks and two are equal; return the shared blocks."""
    trunk = chain([1], [2])
    longer, other = chain([1], [2], [3], [4]), chain([1], [2], [5, 6])
    add(store, "trunk", trunk)
    add(store, "longer", [*longer, window(longer[-1])])
    add(store, "other", other)
    add(store, "twin", other)
    add(store, "apart", chain([9]))
    return trunk


def test_sessions_are_described_with_their_tiers_and_sizes(store: BlockStore) -> None:
    trunk = add_five_sessions(store)
    answer = StoredSessions(store).describe()
    sizes = {session["id"]: (session["blocks"], session["bytes"]) for session in answer["sessions"]}
    assert {session["tier"] for session in answer["sessions"]} == {"disk"}
    for block in trunk:
        store.pool.put(KVBlock(block, None, 1))
    tiers = {
        session["id"]: session["tier"] for session in StoredSessions(store).describe()["sessions"]
    }
    assert tiers["trunk"] == "ram" and tiers["longer"] == "disk"
    assert sizes["longer"] == (4, 50) and sizes["twin"] == (3, 30) and sizes["apart"] == (1, 10)


def test_sessions_can_be_sorted_by_size(store: BlockStore) -> None:
    sessions = StoredSessions(store)
    for n in range(SHOWN + 10):
        add(store, f"s{n:02}", chain(*([n * 100 + i] for i in range(1 + n % 7))), used=float(n))
    sizes: list[int] = []
    for skip in (0, SHOWN):
        answer = sessions.describe(skip=skip, by_size=True)
        sizes += [session["bytes"] for session in answer["sessions"]]
        assert answer["total"] == SHOWN + 10
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == SHOWN + 10
    matches = sessions.describe("s0", by_size=True)
    assert matches["total"] == 10 and matches["sessions"][0]["id"] == "s06"
    add(store, "large", chain(*([9000 + i] for i in range(9))))  # the order is updated
    assert sessions.describe(by_size=True)["sessions"][0]["id"] == "large"


def test_selection_reports_the_bytes_that_deleting_it_frees(store: BlockStore) -> None:
    sessions = StoredSessions(store)
    add_five_sessions(store)
    everything = {"trunk", "longer", "other", "twin", "apart"}
    for chosen, n_bytes in (
        (["trunk"], 0),
        (["longer"], 30),  # two blocks and a checkpoint
        (["other"], 0),
        (["other", "twin"], 10),
        (["longer", "other", "twin"], 40),
        (["longer", "other", "twin", "trunk"], 60),
        (["apart", "no-such"], 10),
        ([], 0),
    ):
        selection = sessions.select(chosen)
        assert selection["disk_bytes"] == n_bytes, chosen
        assert set(selection["ids"]) == set(chosen) & everything
    selection = sessions.select(find="")
    assert set(selection["ids"]) == everything and selection["disk_bytes"] == 70
    assert set(sessions.select(find="T")["ids"]) == {"trunk", "other", "twin", "apart"}
    store.index.state.add_note("longer", words="parser")
    assert sessions.select(find="parser")["ids"] == []
    assert sessions.select(find="parser", with_text=True)["ids"] == ["longer"]


def test_request_records_get_the_titles_and_words_of_their_sessions(store: BlockStore) -> None:
    """Two tenants may use the same name. Words are hidden if text must not be shown."""
    tenant = Root(ROOT.fingerprint, ROOT.layout, "tenant")
    for n, root in enumerate((ROOT, tenant, tenant)):
        leaf = chain([n], parent=root.key)[0]
        store.index.add_blocks(root, [(leaf, 10)])
        session = Session(f"s{n}", root.key, "same", leaf.key, leaf.stop, False, 1.0, float(n))
        store.index.put_session(session)
        store.index.state.add_note(session.id, title=f"title {n}", words=f"words {n}")
    asked = [("same", ""), ("same", "tenant"), ("same", "another"), ("other", ""), (None, "")]
    records = [
        RequestState(name, namespace).record("m", Outcome(Kind.MISS, 1))
        for name, namespace in asked
    ]
    named = StoredSessions(store).add_names(records, with_text=True)
    nothing = (None, None)
    own = [("title 0", "words 0"), ("title 2", "words 2"), nothing, nothing, nothing]
    assert [(record.pop("title"), record.pop("words")) for record in named] == own
    assert named == records
    quiet = StoredSessions(store).add_names(records, with_text=False)
    assert [(record["title"], record["words"]) for record in quiet] == [
        (title, None) for title, _ in own
    ]
    store.index.database.close()  # the records are then shown without titles
    broken = StoredSessions(store).add_names(records, with_text=True)
    assert {record["title"] for record in broken} == {None}


def test_selection_may_exceed_the_sessions_of_one_query(store: BlockStore) -> None:
    """The store has more sessions than one query of the index accepts."""
    blocks = [chain([1], [n + 2]) for n in range(1200)]
    store.index.add_blocks(ROOT, [(blocks[0][0], 10), *((block, 10) for _, block in blocks)])
    with store.index.database.transaction():
        for n, (_, block) in enumerate(blocks):
            session = Session(f"s{n}", ROOT.key, None, block.key, block.stop, False, 1.0, 1.0)
            store.index.put_session(session)
    selection = StoredSessions(store).select(find="")
    assert len(selection["ids"]) == 1200 and selection["disk_bytes"] == 12_010
    assert StoredSessions(store).select(selection["ids"][1:])["disk_bytes"] == 11_990


def test_described_sessions_are_paged_and_follow_the_store(store: BlockStore) -> None:
    sessions = StoredSessions(store)
    empty = sessions.describe()
    assert empty["is_all"] and not empty["sessions"] and not empty["total"]
    for n in range(SHOWN):
        add(store, f"s{n}", chain([n]), used=float(n))
    first = sessions.describe()
    assert first["is_all"] and len(first["sessions"]) == SHOWN
    add(store, "0123456789abcdef", chain([999]), used=1000.0)
    then = sessions.describe()
    assert not then["is_all"] and len(then["sessions"]) == SHOWN
    assert then["sessions"][0]["id"] == "0123456789abcdef"
    assert then["total"] == SHOWN + 1
    assert [session["id"] for session in sessions.describe(skip=SHOWN)["sessions"]] == ["s0"]
    assert sessions.pin("0123456789abcdef", True) == {"id": "0123456789abcdef", "pinned": True}
    assert sessions.describe()["sessions"][0]["pinned"]


def test_sessions_are_found_by_their_client_title_id_or_words(store: BlockStore) -> None:
    sessions = StoredSessions(store)
    for n in range(3):
        add(store, f"s{n}", chain([n]))
    note = store.disk.index.state.add_note
    note("s0", client="curl", words="Größe of it")
    assert sessions.rename("s1", "A title") == {"id": "s1", "title": "A title"}

    def ids_of(find: str, **how: bool) -> list[str]:
        return sorted(session["id"] for session in sessions.describe(find, **how)["sessions"])

    assert ids_of("CURL") == ["s0"] and ids_of("a title") == ["s1"] and ids_of("S2") == ["s2"]
    assert ids_of("GRÖSSE") == [] and ids_of("GRÖSSE", with_text=True) == ["s0"]
    assert sessions.rename("s1", "")["title"] is None and ids_of("title") == []
    sessions.delete("s0")
    assert store.disk.index.state.note("s0") == {}


def test_unchanged_store_is_not_read_again_for_a_description(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_asked, outline = 0, Index.outline

    def counted(index: Index, leaves: Sequence[bytes]) -> Any:
        nonlocal n_asked
        n_asked += 1
        return outline(index, leaves)

    monkeypatch.setattr(Index, "outline", counted)
    add(store, "one", chain([1]))
    sessions = StoredSessions(store)
    assert sessions.describe() == sessions.describe()
    assert n_asked == 1
    store.pool.put(KVBlock(chain([1])[0], None, 1))
    assert sessions.describe()["sessions"][0]["tier"] == "ram"


def test_pin_keeps_changes_of_another_process(store: BlockStore) -> None:
    add(store, "fedcba9876543210", chain([1]))
    add(store, "removed", chain([2]))
    moved, removed = (store.index.session(each) for each in ("fedcba9876543210", "removed"))
    assert moved is not None and removed is not None
    add(store, "fedcba9876543210", chain([1], [3]))
    store.index.remove_session("removed")
    pinned = store.disk.set_pinned(moved, True)
    assert pinned == store.index.session("fedcba9876543210")
    assert pinned.pinned and pinned.leaf == chain([1], [3])[-1].key
    with pytest.raises(StoreError, match="removed at the same time"):
        store.disk.set_pinned(removed, True)


def test_changes_are_made_in_an_index_that_another_process_replaced(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s")
    save_turn(store, chain([3]), "gone")
    sessions = StoredSessions(store)
    ids = {session.name: session.id for session in store.index.sessions()}
    replace_index(store)
    sessions.pin(ids["s"], True)
    replace_index(store)
    sessions.delete(ids["gone"])
    with closing(DiskStore(store.folder, store.limits)) as disk:
        assert [(session.name, session.pinned) for session in disk.index.sessions()] == [
            ("s", True)
        ]


def test_deleting_a_session_keeps_request_records_of_other_namespaces(store: BlockStore) -> None:
    """Two tenants may give their sessions the same name."""
    save_turn(store, chain([1], [2]), "same")
    (session,) = store.index.sessions()
    own = store.index.namespace(session)
    log = RequestLog()
    for namespace in (own, "another's"):
        state = RequestState("same", str(namespace))
        record = log.add(state.record("m", Outcome(Kind.MISS, 9)))
        store.index.state.add_request(record)
    deleted, namespace, _ = StoredSessions(store).delete(session.id)
    log.forget(deleted.name, namespace)
    for records in (store.index.state.requests(), log.records()):
        assert [record["namespace"] for record in records] == ["another's"]


def replace_index(store: BlockStore) -> None:
    """Remove the index and rebuild it, as another process does if it is damaged."""
    store.index.path.unlink()
    with store.disk.lock.held():
        rebuild_index(OwnFiles(store.folder))


def test_session_with_missing_blocks_can_be_evicted_and_deleted(store: BlockStore) -> None:
    add(store, "lost", chain([1], [2]))
    store.disk.forget(chain([1])[0].key)
    sessions = StoredSessions(store)
    sessions.evict("lost")
    assert sessions.delete("lost")[0].id == "lost"
    with pytest.raises(RequestRefused, match="no session has the id") as refused:
        sessions.delete("lost")
    assert refused.value.status == 404


def test_session_id_that_is_not_valid_text_is_not_found(store: BlockStore) -> None:
    sessions = StoredSessions(store)
    for change in (sessions.delete, sessions.evict, sessions.export):
        with pytest.raises(RequestRefused, match="no session has the id"):
            change("\ud800")


def test_unreadable_store_is_refused_with_status_503(store: BlockStore) -> None:
    store.close()
    with pytest.raises(RequestRefused, match="the store cannot be used") as refused:
        StoredSessions(store).describe()
    assert refused.value.status == 503


def test_deleting_a_session_removes_its_records_and_its_blocks_in_ram(store: BlockStore) -> None:
    nodes = chain([1], [2, 3])
    (beginning,) = chain([2], parent=nodes[0].key)
    store.put([(beginning, arrays_of(beginning))])
    end = state(nodes[1])
    save_turn(store, nodes, "gone", [end])
    store.pool.touch([end.key, beginning.key])
    store.pool.release(1)  # the session's block is evicted; the session stays
    assert end.key in store.pool and nodes[1].key not in store.pool
    for name in ("gone", "stays"):
        store.index.state.add_request({"session": name, "sentence": "s", "divergence": None})
    (session,) = store.index.sessions()
    StoredSessions(store).delete(session.id)
    assert [record["session"] for record in store.index.state.requests()] == ["stays"]
    assert len(store.pool) == 0


def test_change_that_times_out_in_the_queue_is_withdrawn(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_turn(store, chain([1]), "s")
    (session,) = store.index.sessions()
    monkeypatch.setattr(stored_sessions, "_TIMEOUT_S", 0.1)
    with writer_held(store), pytest.raises(RequestRefused, match="nothing was changed"):
        StoredSessions(store).pin(session.id, True)
    assert not store.index.sessions()[0].pinned


def test_request_times_out_while_another_process_has_the_lock(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change has begun, so it cannot be withdrawn."""
    save_turn(store, chain([1]), "s")
    (session,) = store.index.sessions()
    monkeypatch.setattr(stored_sessions, "_TIMEOUT_S", 0.1)
    with (
        StoreLock(store.folder / "lock").held(),
        pytest.raises(RequestRefused, match="may still be made") as refused,
    ):
        StoredSessions(store).pin(session.id, True)
    assert refused.value.status == 503
    store.drain()
    assert store.index.sessions()[0].pinned


def packed_reply(prompt: Sequence[int], ids: Sequence[int]) -> bytes:
    """Return a stored reply with the ids `ids` to a prompt."""
    text = "".join(f"<{i}>" for i in prompt).encode()
    digest = blake2b(text, digest_size=16).hexdigest()
    reply = {"n_prompt_bytes": len(text), "prompt_digest": digest, "ids": ids}
    return json.dumps(reply).encode()


def test_deleting_a_session_deletes_only_its_own_replies(store: BlockStore) -> None:
    shared, own = [1, 2, 3, 4], [5, 6, 7, 8]
    add(store, "stays", chain(shared, [9]))
    add(store, "gone", chain(shared, own))
    another = Root("another", "4b64")
    stays = {
        b"shared": packed_reply([1], [2, 3]),
        b"shared to its end": packed_reply([1, 2], [3, 4]),
        b"of the other session": packed_reply([1, 2, 3], [4, 9]),
        b"of the other session, after the shared block": packed_reply(shared, [9]),
        b"equal ids, another prompt": packed_reply([2], [6, 7]),
        b"damaged": b"{",
        b"without a prompt": b"{}",
        b"not ids": b'{"n_prompt_bytes": 3, "prompt_digest": "", "ids": ["5"]}',
    }
    gone = {
        b"over the boundary": packed_reply([1, 2, 3], [4, 5]),
        b"own": packed_reply([*shared, 5], [6, 7]),
        b"changed by its client": packed_reply([*shared, 5], [9]),
        b"with an id that was not read": packed_reply([*shared, 5, 6], [7, 8, 1]),
        b"over the boundary, with such an id": packed_reply([1, 2, 3], [4, 5, 6, 7, 8, 1]),
    }
    for root in (ROOT, another):
        store.commit(Commit(root, (), replies={**stays, **gone}), [])
    store.drain()
    StoredSessions(store).delete("gone")
    assert store.index.state.replies(ROOT.key, [*stays, *gone]) == stays
    assert store.index.state.replies(another.key, list(gone)) == gone


def test_deleting_a_session_that_shares_all_blocks_deletes_no_reply(store: BlockStore) -> None:
    add(store, "short", chain([1, 2]))
    add(store, "long", chain([1, 2], [3, 4]))
    replies = {b"reply": packed_reply([1], [2])}
    store.commit(Commit(ROOT, (), replies=replies), [])
    store.drain()
    StoredSessions(store).delete("short")
    assert store.index.state.replies(ROOT.key, list(replies)) == replies


def test_a_session_whose_file_cannot_be_removed_stays_and_can_be_deleted_later(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = chain([1], [2], [3])
    save_turn(store, nodes, "named")
    replies = {b"reply": packed_reply([1, 2], [3])}
    store.commit(Commit(ROOT, (), replies=replies), [])
    store.drain()
    (session,) = store.index.sessions()
    refused, remove = store.disk.files.path_of(nodes[0].key, Block.folder), OwnFiles.remove

    def failing(files: OwnFiles, path: Path) -> bool:
        if path == refused:
            raise PermissionError(f"cannot remove {path}")
        return remove(files, path)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="cannot remove"):
        patch.setattr(OwnFiles, "remove", failing)
        store.disk.remove_session(session)
    assert store.index.sessions() == [session]
    assert store.index.state.replies(ROOT.key, list(replies)) == replies
    store.disk.remove_session(session)
    assert store.index.sessions() == [] and store.index.keys("blocks") == set()
    assert store.index.state.replies(ROOT.key, list(replies)) == {}


def test_draft_model_blocks_are_deleted_with_the_session_of_their_tokens(
    store: BlockStore,
) -> None:
    draft, tenant = Root("draft", "4b64"), Root("draft", "4b64", namespace="another")

    def save(root: Root, *ids: list[int], replaced: Sequence[Block] = ()) -> list[Block]:
        nodes = chain(*ids, parent=root.key)
        end = nodes[-1]
        over = tuple((old.key, end.key) for old in replaced)
        leaf = Leaf(None, end.key, end.stop, over, is_session=root == ROOT)
        new = [(node, arrays_of(node)) for node in nodes if node.key not in store]
        store.commit(Commit(root, tuple(nodes), leaf), new)
        store.drain()
        return nodes

    first, second = [save(ROOT, [1, 2], [3, 4], tail) for tail in ([5, 6, 7], [8, 9])]
    before = save(draft, [1, 2], [3, 4], [5])
    *shared, draft_tail = save(draft, [1, 2], [3, 4], [5, 6], replaced=before[2:])
    others = [*save(tenant, [1, 2], [3, 4], [5, 6]), save(draft, [1, 2], [3, 4], [8])[-1]]
    assert before[2].key not in store.index and draft_tail.key in store.index
    sessions = StoredSessions(store)
    ids = {session.leaf: session.id for session in store.index.sessions()}
    assert ids.keys() == {first[-1].key, second[-1].key}
    sessions.delete(ids[first[-1].key])
    assert draft_tail.key not in store and all(
        block.key in store.index for block in (*shared, *others)
    )
    sessions.delete(ids[second[-1].key])
    assert store.index.keys("blocks") == {block.key for block in others[:-1]}
    assert not any(block.key in store for block in (*shared, others[-1]))
