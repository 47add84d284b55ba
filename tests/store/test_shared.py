"""The shared tier: a store fetches objects of other stores, and refuses wrong objects."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.block import Block, Checkpoint, Record, Root
from mlx_lm_kvpersist.errors import ConfigError, StoreError
from mlx_lm_kvpersist.store import shared, shared_objects
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.encryption import Cipher
from mlx_lm_kvpersist.store.folder import Encryption, Plain
from mlx_lm_kvpersist.store.objects import ListedObject, Objects, surplus
from mlx_lm_kvpersist.store.records import Leaf
from mlx_lm_kvpersist.store.shared import Plan, SharedTier, Wanted
from mlx_lm_kvpersist.store.shared_objects import Conversation, conversation_key, opening_of
from tests.support import settle, wait_until
from tests.support.clock import Clock

from . import conftest
from .conftest import ROOT, chain, save_turn, state

MESSAGES = ({"role": "user", "content": "Hello"},)
IDS = [list(range(n * 256, n * 256 + 256)) for n in range(3)]
NODES = chain(*IDS, [5, 6, 7])
LIMITS = StoreLimits(max_ram_bytes=64 << 20, max_disk_bytes=64 << 20)
KEY = bytes(range(32))

OpenStore = Callable[..., BlockStore]


@pytest.fixture(autouse=True)
def small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the arrays of whole blocks small: 64 KiB."""

    def arrays_of(node: Block) -> dict[str, mx.array]:
        key = mx.random.key(int.from_bytes(node.key[:4], "little"))
        arrays = {
            "0.k.weights": mx.random.randint(0, 1 << 30, (1, 1, node.n_tokens, 64), mx.uint32),
            "0.k.scales": mx.random.normal((1, 1, node.n_tokens, 1), mx.bfloat16, key=key),
        }
        mx.eval(arrays)
        return arrays

    monkeypatch.setattr(conftest, "arrays_of", arrays_of)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    """A function that opens stores, all of which share one folder."""
    stores: list[BlockStore] = []

    def open_next(
        encryption: Encryption | None = None, objects: Any = None, max_bytes: int | None = None
    ) -> BlockStore:
        store = BlockStore(tmp_path / f"store-{len(stores)}", LIMITS)
        store.share(
            objects or Objects(str(tmp_path / "bucket")), encryption or Cipher(KEY), max_bytes
        )
        stores.append(store)
        return store

    yield open_next
    for store in stores:
        store.close()


def tier_of(store: BlockStore) -> SharedTier:
    assert store.shared is not None
    return store.shared


def counts(store: BlockStore) -> dict[str, int]:
    return tier_of(store).objects.counts


def put_all(store: BlockStore) -> None:
    """Wait until each waiting object is put or has failed."""
    settle(store.writer)
    wait_until(lambda: tier_of(store).putting.has_done_all, "all is put")


def wanted(nodes: Sequence[Block] = NODES, root: Root = ROOT, **changed: Any) -> Wanted:
    """Return the request of a prompt that has the ids of these blocks and one more token."""
    fields = {
        "plan": lambda conversation: Plan(),
        "compute_s": lambda position, n_tokens: n_tokens / 100,
        "learn": lambda replies: wanted(nodes, root, **changed),
        "max_bytes": 8 << 20,
        "chain": (),
        "messages": MESSAGES,
        "ids": [i for node in nodes for i in node.ids] + [1],
        **changed,
    }
    return Wanted(root, **fields)


def plan_whole(conversation: Conversation) -> Plan:
    """Return a plan to restore a whole conversation."""
    needed: list[Record] = [*conversation.chain, *conversation.checkpoints]
    n_tokens = sum(block.n_tokens for block in conversation.chain)
    return Plan(conversation.chain, [(record, 1 << 16) for record in needed], n_tokens)


def put(store: BlockStore, nodes: list[Block] = NODES, **turn: Any) -> dict[bytes, Any]:
    content = save_turn(store, nodes, "s", messages=MESSAGES, **turn)
    put_all(store)
    return content


def keys_in_store(store: BlockStore) -> set[bytes]:
    return {node.key for node in NODES if node.key in store}


def objects_in(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "bucket").rglob("*") if path.is_file()]


@pytest.mark.parametrize("encryption", [Plain(), Cipher(KEY)], ids=["plain", "encrypted"])
def test_store_fetches_by_ids_the_blocks_of_another_store(
    open_store: OpenStore, encryption: Encryption
) -> None:
    content = put(open_store(encryption))
    other = open_store(encryption)
    assert tier_of(other).fetch(wanted()) == ""
    assert keys_in_store(other) == {node.key for node in NODES[:3]}
    for node in NODES[:3]:
        entry = other.pool.get(node.key)
        assert entry is not None and entry.tier == "shared" and entry.block == node
        assert entry.block.text == node.text
        for name, array in content[node.key].items():
            assert mx.array_equal(entry.arrays[name], array)
    other.drain()
    assert {node.key for node in NODES[:3]} <= other.index.keys()
    assert counts(other)["written"] == 0


def test_conversation_is_found_by_its_first_messages(open_store: OpenStore) -> None:
    put(open_store(), checkpoints=[state(NODES[3])])
    other = open_store()
    seen: list[Block] = []

    def plan(conversation: Conversation) -> Plan:
        seen.extend(conversation.chain)
        return plan_whole(conversation)

    prompt = wanted(ids=[9] * 2000, plan=plan)
    assert tier_of(other).fetch(prompt) == ""
    assert seen == NODES and [block.text for block in seen] == [block.text for block in NODES]
    assert keys_in_store(other) == {node.key for node in NODES}
    assert other.checkpoints([NODES[3].key]) == {NODES[3].key: [state(NODES[3])]}


def test_model_with_checkpoints_fetches_only_whole_conversations(open_store: OpenStore) -> None:
    put(open_store(), checkpoints=[state(NODES[3])])
    other = open_store()
    tier_of(other).fetch(wanted(any_prefix=False))
    assert not keys_in_store(other)
    tier_of(other).fetch(wanted(any_prefix=False, plan=plan_whole))
    assert keys_in_store(other) == {node.key for node in NODES}


def test_note_names_the_stored_precision_if_the_layout_differs(open_store: OpenStore) -> None:
    put(open_store())
    note = tier_of(open_store()).fetch(wanted(root=Root("fingerprint", "8b64")))
    assert "another KV precision (4b64)" in note


def test_store_with_another_key_finds_no_objects(open_store: OpenStore, tmp_path: Path) -> None:
    put(open_store())
    before = {path: path.read_bytes() for path in objects_in(tmp_path)}
    assert all(node.key.hex() not in str(path) for path in before for node in NODES)
    assert not any(b"safetensors" in data or b"root" in data for data in before.values())
    other = open_store(Cipher(bytes(32)))
    assert tier_of(other).fetch(wanted()) == "" and not keys_in_store(other)
    assert counts(other)["refused"] == 0


def test_each_object_is_put_once(open_store: OpenStore) -> None:
    first, second = open_store(), open_store()
    put(first)
    put(second)
    assert counts(first)["written"] == 6  # four blocks, the chain, its layout
    assert counts(second)["written"] == 1
    put(first)
    assert counts(first)["written"] == 7


def test_two_stores_may_put_the_same_conversation_at_once(open_store: OpenStore) -> None:
    stores = [open_store(), open_store()]
    threads = [threading.Thread(target=put, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    third = open_store()
    tier_of(third).fetch(wanted())
    assert keys_in_store(third) == {node.key for node in NODES[:3]}
    assert counts(third)["refused"] == 0


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def _huge_header(data: bytes) -> bytes:
    return (1 << 62).to_bytes(8, "little") + data[8:]


def _deep(data: bytes) -> bytes:
    header = b"[" * 100_000
    return len(header).to_bytes(8, "little") + header


def _renamed(data: bytes) -> bytes:
    return data.replace(b"0.k.scales", b"../../etc/")


def _larger(data: bytes) -> bytes:
    return data + bytes(9 << 20)


HOSTILE = [
    *((Cipher(KEY), change) for change in (_cut, _flipped, _larger, lambda data: b"")),
    *((Plain(), change) for change in (_cut, _flipped, _huge_header, _deep, _renamed, _larger)),
]


@pytest.mark.parametrize(("encryption", "change"), HOSTILE)
def test_changed_objects_are_refused_and_replaced(
    open_store: OpenStore, tmp_path: Path, encryption: Encryption, change: Callable[[bytes], bytes]
) -> None:
    put(open_store(encryption))
    for path in objects_in(tmp_path):
        path.write_bytes(change(path.read_bytes()))
    other = open_store(encryption)
    tier_of(other).fetch(wanted(plan=plan_whole))
    assert not keys_in_store(other) and counts(other)["refused"] > 0
    put(other)
    third = open_store(encryption)
    tier_of(third).fetch(wanted())
    assert NODES[0].key in third


@pytest.mark.parametrize("encryption", [Plain(), Cipher(KEY)], ids=["plain", "encrypted"])
def test_objects_with_swapped_names_are_refused(
    open_store: OpenStore, tmp_path: Path, encryption: Encryption
) -> None:
    first = open_store(encryption)
    put(first)
    names = [tmp_path / "bucket" / tier_of(first).objects.path(node.key) for node in NODES[:2]]
    contents = [name.read_bytes() for name in names]
    for name, content in zip(names, reversed(contents), strict=True):
        name.write_bytes(content)
    other = open_store(encryption)
    tier_of(other).fetch(wanted())
    assert not keys_in_store(other) and counts(other)["refused"] >= 1


class SimulatedThreads:
    """Threads whose tasks take time by a simulated clock, and that share one network line.

    Tasks run one at a time, when they are submitted, so they use the line in this order.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._line_free_s = self._now_s = 0.0

    def take(self, latency_s: float, on_line_s: float) -> None:
        """Let the running task take some seconds alone, and some on the shared line."""
        self._now_s = max(self._now_s + latency_s, self._line_free_s) + on_line_s
        self._line_free_s = self._now_s

    def submit(self, task: Callable[[], Any]) -> SimulatedFuture:
        self._now_s = self.clock.monotonic()
        future = SimulatedFuture(self.clock)
        try:
            future.set_result(task())
        except Exception as error:
            future.set_exception(error)
        future.done_s = self._now_s
        return future

    def close(self, timeout_s: float) -> bool:
        return True


class SimulatedFuture(Future[Any]):
    """The result of a task, and the time at which it is done."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock, self.done_s = clock, 0.0

    def result(self, timeout: float | None = None) -> Any:
        left_s = max(0.0, self.done_s - self._clock.monotonic())
        if timeout is not None and left_s > timeout:
            self._clock.sleep(timeout)
            raise TooLate
        self._clock.sleep(left_s)
        return super().result(0)


@pytest.fixture
def simulated(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> SimulatedThreads:
    """Simulated threads for the fetches of stores that are opened later."""
    made = SimulatedThreads(clock)
    monkeypatch.setattr("mlx_lm_kvpersist.store.shared.Threads", lambda n_threads, name: made)
    return made


class UnreliableObjects:
    """Objects that are slow on simulated threads, or that fail, perhaps after some requests."""

    url = "test"

    def __init__(
        self,
        folder: Path,
        bytes_per_s: float = 1e12,
        latency_s: float = 0.0,
        simulated: SimulatedThreads | None = None,
    ) -> None:
        self.objects = Objects(str(folder))
        self.bytes_per_s, self.latency_s, self.simulated = bytes_per_s, latency_s, simulated
        self.fails: Exception | None = None
        self.fails_after = 0
        self.puts_fail: Exception | None = None
        self.n_asked = 0

    def _wait(self, n_bytes: int) -> None:
        self.n_asked += 1
        if self.fails is not None and self.n_asked > self.fails_after:
            raise self.fails
        if self.simulated is not None:
            self.simulated.take(self.latency_s, n_bytes / self.bytes_per_s)

    def open(self) -> None:
        self.objects.open()

    def get(self, name: str, max_bytes: int) -> bytes:
        content = self.objects.get(name, max_bytes)
        self._wait(len(content))
        return content

    def age_s(self, name: str) -> float | None:
        self._wait(0)
        return self.objects.age_s(name)

    def put(self, name: str, content: bytes) -> None:
        if self.puts_fail is not None:
            raise self.puts_fail
        self._wait(len(content))
        self.objects.put(name, content)

    def list(self) -> Iterator[ListedObject]:
        return self.objects.list()

    def delete(self, names: Sequence[str]) -> None:
        self.objects.delete(names)


def test_slow_store_delays_requests_only_briefly(
    open_store: OpenStore,
    tmp_path: Path,
    simulated: SimulatedThreads,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put(open_store())
    slow = UnreliableObjects(tmp_path / "bucket", bytes_per_s=100e3, simulated=simulated)
    other = open_store(objects=slow)
    began_s = simulated.clock.monotonic()
    notes = {tier_of(other).fetch(wanted(compute_s=lambda at, n: n / 1000)) for _ in range(5)}
    assert 0 < simulated.clock.monotonic() - began_s < 0.1 * 0.772
    assert notes == {"the shared store is slower than computing"}
    assert len(caplog.records) == 1


def test_blocks_fetched_before_the_store_becomes_slow_are_used(
    open_store: OpenStore, tmp_path: Path, simulated: SimulatedThreads
) -> None:
    put(open_store())
    slow = UnreliableObjects(tmp_path / "bucket")
    other = open_store(objects=slow)
    get = slow.get

    def get_first(name: str, max_bytes: int) -> bytes:
        if name == tier_of(other).objects.path(NODES[2].key):
            simulated.take(3, 0)
        return get(name, max_bytes)

    slow.get = get_first  # type: ignore[method-assign]
    began_s = simulated.clock.monotonic()
    tier_of(other).fetch(wanted(compute_s=lambda at, n: n / 1000))
    assert keys_in_store(other) == {node.key for node in NODES[:2]}
    assert simulated.clock.monotonic() - began_s < 1


def fast_compute_s(position: int, n_tokens: int) -> float:
    """Return the seconds that a fast model takes to compute `n_tokens`."""
    return n_tokens / 100_000


def test_store_too_slow_for_cheap_prompts_is_used_for_expensive_prompts(
    open_store: OpenStore,
    tmp_path: Path,
    simulated: SimulatedThreads,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put(open_store())
    other = open_store(
        objects=UnreliableObjects(tmp_path / "bucket", latency_s=0.03, simulated=simulated)
    )
    notes = [tier_of(other).fetch(wanted(compute_s=fast_compute_s)) for _ in range(2)]
    assert set(notes) == {"the shared store is slower than computing"} and not keys_in_store(other)
    assert tier_of(other).fetch(wanted()) == "" and NODES[2].key in other
    assert len(caplog.records) == 1


@pytest.mark.parametrize("any_prefix", [True, False])
@pytest.mark.parametrize("bytes_per_s", [50e6, 5e6, 1e6, 250e3])
def test_fetch_loses_at_most_eight_percent_of_the_computing_time(
    open_store: OpenStore,
    tmp_path: Path,
    simulated: SimulatedThreads,
    bytes_per_s: float,
    any_prefix: bool,
) -> None:
    """A block takes 1, 13, 67 or 268 ms to fetch, and 102 ms to compute."""
    put(open_store(), checkpoints=[state(NODES[3])])
    other = open_store(
        objects=UnreliableObjects(tmp_path / "bucket", bytes_per_s, simulated=simulated)
    )
    prompt = wanted(
        compute_s=lambda at, n: n / 2500, plan=plan_whole, any_prefix=any_prefix, ids=range(5000)
    )
    began_s = simulated.clock.monotonic()
    tier_of(other).fetch(prompt)
    took_s, fetched = simulated.clock.monotonic() - began_s, keys_in_store(other)
    saved_s = sum(node.n_tokens for node in NODES if node.key in fetched) / 2500
    if bytes_per_s > 250e3:
        assert fetched == {node.key for node in NODES}
        assert any_prefix or other.checkpoints([NODES[3].key])
    assert took_s < saved_s + 0.08 * 5000 / 2500


@pytest.mark.parametrize("any_prefix", [True, False])
def test_fetch_reports_a_store_that_fails_midway(
    open_store: OpenStore, tmp_path: Path, any_prefix: bool, caplog: pytest.LogCaptureFixture
) -> None:
    put(open_store(), checkpoints=[state(NODES[3])])
    dying = UnreliableObjects(tmp_path / "bucket")
    dying.fails, dying.fails_after = OSError("connection reset"), 3
    other = open_store(objects=dying)
    note = tier_of(other).fetch(wanted(plan=plan_whole, any_prefix=any_prefix))
    assert "connection reset" in note
    assert keys_in_store(other) == {node.key for node in NODES[:2]}
    assert len(caplog.records) == 1
    dying.fails = None


def test_etimedout_counts_as_a_failure_of_the_store(open_store: OpenStore, tmp_path: Path) -> None:
    """A soft mount raises ETIMEDOUT, which Python turns into a TimeoutError."""
    dead = UnreliableObjects(tmp_path / "bucket")
    put(open_store())
    other = open_store(objects=dead)
    dead.fails = OSError(errno.ETIMEDOUT, "timed out")
    assert "timed out" in tier_of(other).fetch(wanted())
    assert "timed out" in tier_of(other).stats()["failed_with"]
    dead.fails = None


def test_wrong_system_clock_does_not_affect_sharing(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    for skew_s in (-400 * 86400, 400 * 86400):
        monkeypatch.setattr(time, "time", lambda skew_s=skew_s: now() + skew_s)
        store = open_store()
        put(store)
        other = open_store()
        assert tier_of(other).fetch(wanted()) == "" and NODES[2].key in other
        assert counts(other)["refused"] == 0


def test_failed_store_is_logged_once_and_used_after_it_recovers(
    open_store: OpenStore,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "PROBE_S", 0.05)
    put(open_store())
    dead = UnreliableObjects(tmp_path / "bucket")
    other = open_store(objects=dead)
    dead.fails = OSError("connection refused")
    for _ in range(3):
        assert "connection refused" in tier_of(other).fetch(wanted())
    assert len(caplog.records) == 1
    save_turn(other, chain([1, 2]), "s", messages=MESSAGES)
    assert not counts(other)["written"]
    dead.fails = None
    stats = tier_of(other).stats
    wait_until(lambda: not (stats()["failed_with"] or stats()["waiting"]), "all is put")
    assert tier_of(other).fetch(wanted()) == "" and NODES[0].key in other
    assert counts(other)["written"] == 2


def test_shared_store_that_refuses_writes_is_still_read(
    open_store: OpenStore, tmp_path: Path
) -> None:
    put(open_store())
    full = UnreliableObjects(tmp_path / "bucket")
    full.puts_fail = OSError("no space left")
    other = open_store(objects=full)
    save_turn(other, chain([1, 2]), "s", messages=MESSAGES)
    put_all(other)
    assert tier_of(other).stats()["failed_with"] == "no space left"
    assert tier_of(other).fetch(wanted()) == "" and NODES[0].key in other


def test_number_of_waiting_objects_is_bounded(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "MAX_WAITING", 6)
    full = UnreliableObjects(tmp_path / "bucket")
    full.puts_fail = OSError("no space left")
    store = open_store(objects=full)
    for n in range(4):
        save_turn(store, chain([n, 2]), "s", messages=MESSAGES)
    stats = tier_of(store).stats()
    assert stats["waiting"] == 6 and stats["not_written"] == 2


def test_commits_before_the_end_of_a_turn_are_not_shared(open_store: OpenStore) -> None:
    store = open_store()
    save_turn(store, NODES[:1], "s", messages=MESSAGES)
    put_all(store)
    before = counts(store)["written"]
    (block,) = chain([1, 2, 3])
    store.commit(Commit(ROOT, (block,)), [(block, conftest.arrays_of(block))])
    store.drain()
    put_all(store)
    assert counts(store)["written"] == before


def test_next_turn_puts_blocks_that_were_stored_before_sharing_began(
    tmp_path: Path, open_store: OpenStore
) -> None:
    """A commit contains only its new blocks; the index has the earlier blocks."""
    with closing(BlockStore(tmp_path / "early", LIMITS)) as store:
        save_turn(store, NODES[:2], "s", messages=MESSAGES)
        store.share(Objects(str(tmp_path / "bucket")), Cipher(KEY), None)
        leaf = Leaf("s", NODES[2].key, NODES[2].stop, messages=MESSAGES)
        new = [(NODES[2], conftest.arrays_of(NODES[2]))]
        store.commit(Commit(ROOT, (NODES[2],), leaf), new)
        store.drain()
        put_all(store)
    other = open_store()
    tier_of(other).fetch(wanted(plan=plan_whole))
    assert keys_in_store(other) == {node.key for node in NODES[:3]}


def test_shared_store_that_cannot_be_listed_is_still_written(
    open_store: OpenStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unlisted(UnreliableObjects):
        def list(self) -> Iterator[ListedObject]:
            raise OSError("access denied")

    store = open_store(objects=Unlisted(tmp_path / "bucket"), max_bytes=1 << 10)
    put(store)
    assert counts(store)["written"] == 6 and len(caplog.records) == 1


def test_unpacked_conversation_equals_the_packed_conversation() -> None:
    packed = Conversation(tuple(NODES), (state(NODES[0]),), {b"digest": b"ids"}).packed()
    unpacked = Conversation.unpacked(packed, ROOT)
    assert unpacked.chain == tuple(NODES) and unpacked.checkpoints == (state(NODES[0]),)
    assert unpacked.replies == {b"digest": b"ids"}
    assert all(isinstance(record, Checkpoint) for record in unpacked.checkpoints)


def save_reply(store: BlockStore, n: int) -> None:
    """Save the ids of a reply of the conversation."""
    store.commit(Commit(ROOT, (), replies={b"%d" % n: b"ids"}, messages=MESSAGES), [])
    store.drain()
    put_all(store)


def test_fetch_learns_the_replies_of_all_servers(open_store: OpenStore) -> None:
    first, second, third = open_store(), open_store(), open_store()
    save_reply(first, 1)
    put(first)
    save_reply(second, 2)
    learned: list[set[bytes]] = []

    def learn(replies: Mapping[bytes, bytes]) -> Wanted:
        learned.append(set(replies))
        return wanted()

    tier_of(third).fetch(wanted(learn=learn))
    assert learned == [{b"1", b"2"}] and NODES[2].key in third


def test_used_objects_are_put_again_before_they_are_pruned(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(open_store())
    for n, path in enumerate(objects_in(tmp_path)):
        then_s = time.time() - (10 + n) * 86400
        os.utime(path, (then_s, then_s))
    other = open_store()
    put(other)
    assert counts(other)["written"] == 6
    assert not surplus(Objects(str(tmp_path / "bucket")).list(), 86400, None)
    for path in objects_in(tmp_path):
        path.unlink()
    put(other)
    assert counts(other)["written"] == 7  # the store assumes that they exist
    monkeypatch.setattr(shared_objects, "ASK_AGAIN_S", 0.0)
    put(other)
    assert counts(other)["written"] == 13


def test_two_servers_keep_the_shared_store_near_its_limit(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "PRUNE_S", 0.0)
    max_bytes = 300 << 10
    stores = [open_store(max_bytes=max_bytes) for _ in range(2)]
    for n in range(8):
        put(stores[n % 2], chain([n] * 256))
    put(stores[0], chain([9]))
    sizes = [path.stat().st_size for path in objects_in(tmp_path)]
    assert max_bytes - (80 << 10) < sum(sizes) <= max_bytes + (80 << 10)
    newest, oldest = (tier_of(stores[0]).objects.path(chain([n] * 256)[0].key) for n in (7, 0))
    assert (tmp_path / "bucket" / newest).exists()
    assert not (tmp_path / "bucket" / oldest).exists()


HOSTILE_CONVERSATIONS = [
    {},
    [],
    {"format": 2},
    {"format": 1, "blocks": 5, "checkpoints": [], "replies": []},
    {"format": 1, "blocks": [["00" * 1024, "\ud800", ""]], "checkpoints": [], "replies": []},
    {"format": 1, "blocks": [["0", "", ""]], "checkpoints": [], "replies": []},
    {"format": 1, "blocks": [["000000", "", ""]], "checkpoints": [[0, 5, 5]], "replies": []},
    {"format": 1, "blocks": [], "checkpoints": [[0, "state", 0]], "replies": []},
    {"format": 1, "blocks": [["", "", ""]], "checkpoints": [[0, "x", 1 << 40]], "replies": []},
    {"format": 1, "blocks": [["", "", ""]] * 3, "checkpoints": [], "replies": [["x", "y"]]},
    {"format": 1, "blocks": [["", "", ""]] * 3, "checkpoints": [], "replies": [[1, 2, 3]]},
]


@pytest.mark.parametrize("content", HOSTILE_CONVERSATIONS)
def test_hostile_conversation_is_replaced_by_the_next_put(
    open_store: OpenStore, tmp_path: Path, content: Any
) -> None:
    put(open_store(Plain()))
    other = open_store(Plain())
    key = conversation_key(ROOT, opening_of(MESSAGES))
    path = tmp_path / "bucket" / tier_of(other).objects.path(key)
    path.write_bytes(zlib.compress(json.dumps(content).encode()))
    tier_of(other).fetch(wanted(plan=plan_whole))
    assert keys_in_store(other) == {node.key for node in NODES[:3]}  # found by the prompt's ids
    put(other)
    assert Conversation.unpacked(path.read_bytes(), ROOT).chain == tuple(NODES)


def test_unknown_url_scheme_or_missing_obstore_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        Objects("nothing://bucket")
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'mlx-lm-kvpersist\[shared\]'"):
        Objects(str(tmp_path))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "names no folder (is a variable unset?)"),
        ("  ", "names no folder (is a variable unset?)"),
        ("file://", "names no folder (is a variable unset?)"),
        ("file://nas/x", "it names the machine nas, but only folders of this machine can be used"),
        ("//nas/x", "it names the machine nas, but only folders of this machine can be used"),
        ("~nobody-of-that-name/x", "home directory"),
        ("file:~nobody-of-that-name/x", "home directory"),
    ],
)
def test_url_that_names_no_local_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="give a folder, or a URL such as s3://") as error:
        Objects(url)
    assert message in str(error.value)
    assert not list(tmp_path.iterdir())


def test_file_url_is_decoded_to_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a b#c"
    for url in (f"file://{tmp_path}/a%20b%23c", f"file://localhost{tmp_path}/a%20b%23c"):
        Objects(url).put("kvpersist/00/x", b"content")
        assert (folder / "kvpersist/00/x").read_bytes() == b"content"


def test_only_own_object_names_are_listed_and_deleted() -> None:
    objects = Objects("memory:///")
    own, foreign = f"kvpersist/ab/ab{'0' * 30}", f"kvpersist/ab/ab{'0' * 30}.tmp"
    others = [foreign, f"kvpersist/AB/AB{'0' * 30}", "kvpersist/index.sqlite", f"ab/ab{'0' * 30}"]
    for name in (own, *others):
        objects.put(name, b"content")
    assert [item.name for item in objects.list()] == [own]
    objects.delete([own, *others])
    assert not list(objects.list())
    for name in others:
        assert objects.get(name, 100) == b"content"


FOREIGN: dict[str, Callable[[Path, Path], object]] = {
    "a link to a file": lambda path, outside: path.symlink_to(outside / "letter"),
    "a link to nothing": lambda path, outside: path.symlink_to(outside / "nothing"),
    "a pipe": lambda path, outside: os.mkfifo(path),
    "a folder": lambda path, outside: path.mkdir(),
}


@pytest.mark.parametrize("put_foreign", FOREIGN.values(), ids=list(FOREIGN))
def test_foreign_file_at_the_path_of_an_object_stays_and_is_a_miss(
    open_store: OpenStore, tmp_path: Path, put_foreign: Callable[[Path, Path], object]
) -> None:
    """A read does not wait for a pipe, either."""
    put(open_store())
    (tmp_path / "letter").write_bytes(b"letter")
    other = open_store()
    path = tmp_path / "bucket" / tier_of(other).objects.path(NODES[0].key)
    path.unlink()
    put_foreign(path, tmp_path)
    before = path.lstat()
    assert tier_of(other).fetch(wanted()) == "" and NODES[0].key not in other
    put(other)
    assert path.lstat() == before and (tmp_path / "letter").read_bytes() == b"letter"
    assert not (tmp_path / "nothing").exists()
    assert counts(other)["not_written"] == 1 and tier_of(other).stats()["waiting"] == 0


def test_no_object_is_put_through_a_link(
    open_store: OpenStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    store = open_store()
    (tmp_path / "bucket" / "kvpersist").symlink_to(tmp_path / "elsewhere")
    put(store)
    assert not list((tmp_path / "elsewhere").iterdir()) and not counts(store)["written"]
    assert "is reached through a link or is not" in caplog.text


class RefusingObjects(UnreliableObjects):
    """Objects, one of which cannot be put."""

    bad = ""
    n_tried = 0

    def put(self, name: str, content: bytes) -> None:
        if name == self.bad:
            self.n_tried += 1
            raise OSError("403 Forbidden")
        super().put(name, content)


@pytest.mark.parametrize("bad", range(5), ids=[*(f"block {n}" for n in range(4)), "conversation"])
def test_object_that_cannot_be_put_does_not_block_other_objects(
    open_store: OpenStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: int
) -> None:
    store = open_store(objects=(refusing := RefusingObjects(tmp_path / "bucket")))
    keys = [*(node.key for node in NODES), conversation_key(ROOT, opening_of(MESSAGES))]
    refusing.bad = tier_of(store).objects.path(keys[bad])
    put(store)
    put(store, chain([8] * 256))
    stats = tier_of(store).stats()
    assert stats["waiting"] == 0 and stats["failed_with"] == ""
    assert len(objects_in(tmp_path)) >= 5
    assert refusing.n_tried % shared.MOST_ATTEMPTS == 0 and stats["not_written"] >= 1
    logged = [record.getMessage() for record in caplog.records]
    assert logged == ["kvpersist: an object cannot be put into the shared store: 403 Forbidden"]


def test_no_object_is_dropped_while_the_store_does_not_answer(
    open_store: OpenStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(shared, "PROBE_S", 0.01)
    dead = UnreliableObjects(tmp_path / "bucket")
    dead.fails = OSError("connection refused")
    store = open_store(objects=dead)
    save_turn(store, NODES, "s", messages=MESSAGES)
    # Each attempt is counted, and only the first is logged.
    wait_until(lambda: sum(store.stats()["failed"].values()) >= 20, "attempts")
    assert tier_of(store).stats()["waiting"] == 5 and counts(store)["not_written"] == 0
    assert len(caplog.records) == len(store.stats()["failed"]) == 1
    dead.fails = None
    wait_until(lambda: not tier_of(store).stats()["waiting"], "all is put")
    assert counts(store)["written"] == 6


class HangingObjects(UnreliableObjects):
    """Objects of a folder that hangs, as NFS can: an operation does not return."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder)
        self._monkeypatch = monkeypatch
        self.may_answer = threading.Event()
        self.answer()
        self.hangs_at: str | None = None
        """The name of the object that hangs; None: all objects hang."""

    def hang(self, answer_s: float = 0.05) -> None:
        """Stop answering; a store waits `answer_s` for an answer."""
        self._monkeypatch.setattr("mlx_lm_kvpersist.store.objects.ANSWER_S", answer_s)
        self.may_answer.clear()

    def answer(self) -> None:
        """Answer again; stores wait longer, because the machine may be busy."""
        self._monkeypatch.setattr("mlx_lm_kvpersist.store.objects.ANSWER_S", 60.0)
        self.may_answer.set()

    def _wait(self, n_bytes: int) -> None:
        super()._wait(n_bytes)
        if self.hangs_at is None:
            self.may_answer.wait()

    def put(self, name: str, content: bytes) -> None:
        if name == self.hangs_at:
            self.may_answer.wait()
        super().put(name, content)

    def open(self) -> None:
        self.may_answer.wait()
        super().open()

    def list(self) -> Iterator[ListedObject]:
        self.may_answer.wait()
        return super().list()


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingObjects]:
    monkeypatch.setattr(shared, "PROBE_S", 0.02)
    monkeypatch.setattr(shared, "CLOSING_S", 0.1)
    objects = HangingObjects(tmp_path / "bucket", monkeypatch)
    yield objects
    objects.may_answer.set()


def wait_for_attempts(store: BlockStore, n: int) -> None:
    """Return after the put thread has failed `n` more times."""

    def n_failed() -> int:
        return sum(store.stats()["failed"].values())

    before = n_failed()
    wait_until(lambda: n_failed() >= before + n, "attempts of the thread that puts")


def check_close(store: BlockStore) -> None:
    """Close a store, and check that this does not take long."""
    closing_thread = threading.Thread(target=store.close, args=(300.0,))
    closing_thread.start()
    closing_thread.join(60)
    assert not closing_thread.is_alive()


def hang(store: BlockStore, operation: str) -> None:
    """Begin an operation that does not end."""
    if operation == "get":
        tier_of(store).fetch(wanted())
    else:
        save_turn(store, NODES, "s", messages=MESSAGES)


@pytest.mark.parametrize("max_bytes", [None, 1 << 30], ids=["", "size"])
@pytest.mark.parametrize("operation", ["get", "put"])
def test_hanging_folder_is_logged_once_and_does_not_delay_shutdown(
    open_store: OpenStore,
    hanging: HangingObjects,
    caplog: pytest.LogCaptureFixture,
    operation: str,
    max_bytes: int | None,
) -> None:
    put(open_store())
    store = open_store(objects=hanging, max_bytes=max_bytes)
    hanging.hang()
    hang(store, operation)
    wait_until(lambda: bool(tier_of(store).stats()["failed_with"]), "the failure is noticed")
    n_threads = threading.active_count()
    for _ in range(20):
        assert "has not answered" in tier_of(store).fetch(wanted())
    wait_for_attempts(store, 3)
    assert threading.active_count() <= n_threads
    logged = [r.getMessage() for r in caplog.records if "shared store" in r.getMessage()]
    assert len([line for line in logged if "has not answered" in line]) == 1
    check_close(store)


def test_folder_that_has_just_begun_to_hang_does_not_delay_shutdown(
    open_store: OpenStore, hanging: HangingObjects
) -> None:
    store = open_store(objects=hanging)
    hanging.hang(answer_s=300.0)
    hang(store, "put")
    check_close(store)


def test_folder_that_hangs_at_the_start_is_used_when_it_answers(
    open_store: OpenStore, hanging: HangingObjects, caplog: pytest.LogCaptureFixture
) -> None:
    put(open_store())
    hanging.hang()
    store = open_store(objects=hanging)
    for _ in range(20):
        assert "is not used now" in tier_of(store).fetch(wanted())
    wait_for_attempts(store, 3)
    logged = [r.getMessage() for r in caplog.records if "shared store" in r.getMessage()]
    assert logged == [
        "kvpersist: the shared store cannot be read: it does not answer; serving continues"
    ]
    hanging.answer()
    wait_until(lambda: not tier_of(store).stats()["failed_with"], "it answers")
    assert tier_of(store).fetch(wanted()) == "" and keys_in_store(store)


def test_folder_that_hung_is_used_again(open_store: OpenStore, hanging: HangingObjects) -> None:
    store = open_store(objects=hanging)
    hanging.hang()
    hang(store, "put")
    wait_until(lambda: bool(tier_of(store).stats()["failed_with"]), "the failure is noticed")
    hanging.answer()
    wait_until(lambda: not tier_of(store).stats()["waiting"], "all is put")
    assert tier_of(store).stats()["failed_with"] == "" and counts(store)["not_written"] == 0
    assert tier_of(open_store()).fetch(wanted()) == ""


def test_hanging_object_does_not_block_other_objects(
    open_store: OpenStore, hanging: HangingObjects
) -> None:
    store = open_store(objects=hanging)
    hanging.hangs_at = tier_of(store).objects.path(NODES[1].key)
    hanging.hang(answer_s=0.5)
    save_turn(store, NODES, "s", messages=MESSAGES)
    wait_until(lambda: not tier_of(store).stats()["waiting"], "all others are put")
    assert counts(store)["not_written"] == 1 and tier_of(store).stats()["failed_with"] == ""


def test_no_object_is_put_while_the_share_is_unmounted(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, mounted = tmp_path.resolve() / "share", [True]
    is_mount = Path.is_mount
    monkeypatch.setattr(
        Path, "is_mount", lambda path: mounted[0] if path == share else is_mount(path)
    )
    monkeypatch.setattr(shared, "PROBE_S", 0.05)
    store = open_store(objects=Objects(str(share / "kv")))
    put(store, NODES[:1])
    mounted[0] = False
    shutil.rmtree(share / "kv")
    save_turn(store, NODES, "s", messages=MESSAGES)
    reason = f"{share} is no longer mounted"
    wait_until(
        lambda: reason in (tier_of(store).stats()["failed_with"] or ""), "the failure is noticed"
    )
    assert reason in tier_of(store).fetch(wanted()) and not (share / "kv").exists()
    mounted[0] = True
    stats = tier_of(store).stats
    wait_until(lambda: not (stats()["failed_with"] or stats()["waiting"]), "all is put")
    assert (share / "kv").exists()


def test_damaged_objects_are_logged_once_and_counted(
    open_store: OpenStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(open_store())
    for path in objects_in(tmp_path):
        path.write_bytes(b"damaged")
    other = open_store()
    for _ in range(3):
        tier_of(other).fetch(wanted())
    assert len(caplog.records) == 1 and "has a damaged object" in caplog.text
    failed = other.stats()["failed"]
    assert failed == {"the shared store has a damaged object: …": counts(other)["refused"]}
    assert counts(other)["refused"] > 3


def test_records_of_seen_and_bad_objects_are_bounded(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_objects, "_MAX_KEYS", 10)
    objects = tier_of(open_store()).objects
    for n in range(100):
        objects.saw(n.to_bytes(16, "big"))
        objects.forget((1000 + n).to_bytes(16, "big"), is_bad=True)
        assert objects.is_seen(n.to_bytes(16, "big"))
        assert len(objects._bad) <= 10 and len(objects.seen_s) <= 10


@pytest.mark.parametrize("seconds", [2 * 86400.0, -3600.0], ids=["slept", "set back"])
def test_object_is_checked_again_after_the_system_clock_jumps(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """A Mac's monotonic clock stops during sleep, while other servers may remove objects."""
    objects, now_s = tier_of(open_store()).objects, time.time()
    objects.saw(bytes(16))
    assert objects.is_seen(bytes(16))
    monkeypatch.setattr(time, "time", lambda: now_s + seconds)
    assert not objects.is_seen(bytes(16)) and objects.lacks(bytes(16))


def test_temporary_file_of_a_killed_server_is_pruned(tmp_path: Path) -> None:
    """obstore writes NAME#1 and then renames it; a kill leaves this file, which is no object."""
    bucket = tmp_path / "bucket"
    url = str(bucket)
    code = (
        "from mlx_lm_kvpersist.store.objects import Objects\n"
        f"objects, content = Objects({url!r}), bytes(64 << 20)\n"
        f"while True: objects.put('kvpersist/00/{'0' * 64}', content)"
    )
    left: list[Path] = []
    for _ in range(20):
        with subprocess.Popen([sys.executable, "-c", code]) as process:
            wait_until(lambda: any(bucket.rglob("*#*")), "an object that is being written")
            process.kill()
        if left := list(bucket.rglob("*#*")):
            break
    assert left
    assert not any("#" in item.name for item in Objects(url).list()), "it may be being put"
    for path in left:
        os.utime(path, (0, 0))
    old = surplus(Objects(url).list(), 3600.0, None)
    Objects(url).delete([item.name for item in old])
    assert not any(bucket.rglob("*#*"))


def test_conversation_with_too_many_replies_is_packed_with_the_newest() -> None:
    """The JSON of 256 replies of 18,000 tokens is longer than readers accept."""
    ids = json.dumps(list(range(100_000, 118_000))).encode()
    replies = {n.to_bytes(16, "big"): ids for n in range(256)}
    packed = Conversation(tuple(NODES), (), replies).packed()
    unpacked = Conversation.unpacked(packed, ROOT)
    assert unpacked.chain == tuple(NODES)
    assert unpacked.replies and list(unpacked.replies) == list(replies)[-len(unpacked.replies) :]


def test_conversation_that_no_reader_accepts_cannot_be_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_objects, "MAX_BYTES", 1000)
    with pytest.raises(StoreError, match="too long"):
        Conversation(tuple(NODES)).packed()
