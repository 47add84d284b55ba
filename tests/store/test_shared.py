"""The shared tier: one store fetches what another has put, and nothing wrong."""

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
from mlx_lm_kvpersist.store.objects import ANSWER_S, ListedObject, Objects, surplus
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

Open = Callable[..., BlockStore]


@pytest.fixture(autouse=True)
def small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks of 64 KiB each."""

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
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens stores of their own over one folder."""
    stores: list[BlockStore] = []

    def open_store(
        encryption: Encryption | None = None, objects: Any = None, max_bytes: int | None = None
    ) -> BlockStore:
        store = BlockStore(tmp_path / f"store-{len(stores)}", LIMITS)
        store.share(
            objects or Objects(str(tmp_path / "bucket")), encryption or Cipher(KEY), max_bytes
        )
        stores.append(store)
        return store

    yield open_store
    for store in stores:
        store.close()


def tier_of(store: BlockStore) -> SharedTier:
    assert store.shared is not None
    return store.shared


def counts(store: BlockStore) -> dict[str, int]:
    return tier_of(store).objects.counts


def put_all(store: BlockStore) -> None:
    """Return when all waiting objects are put, or cannot be put."""
    settle(store.writer)
    wait_until(lambda: tier_of(store).putting.has_done_all, "everything is put")


def wanted(nodes: Sequence[Block] = NODES, root: Root = ROOT, **changed: Any) -> Wanted:
    """Return the wanted blocks of a prompt: these blocks, and a token that no block has."""
    known = {
        "plan": lambda found: Plan(),
        "compute_s": lambda position, n_tokens: n_tokens / 100,
        "learn": lambda replies: wanted(nodes, root, **changed),
        "max_bytes": 8 << 20,
        "chain": (),
        "messages": MESSAGES,
        "ids": [i for node in nodes for i in node.ids] + [1],
        **changed,
    }
    return Wanted(root, **known)


def whole(found: Conversation) -> Plan:
    """Return a plan to restore a whole conversation."""
    needed: list[Record] = [*found.chain, *found.checkpoints]
    n_tokens = sum(one.n_tokens for one in found.chain)
    return Plan(found.chain, [(one, 1 << 16) for one in needed], n_tokens)


def put(store: BlockStore, nodes: list[Block] = NODES, **turn: Any) -> dict[bytes, Any]:
    content = save_turn(store, nodes, "s", messages=MESSAGES, **turn)
    put_all(store)
    return content


def in_store(store: BlockStore) -> set[bytes]:
    return {node.key for node in NODES if node.key in store}


def objects_in(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "bucket").rglob("*") if path.is_file()]


@pytest.mark.parametrize("encryption", [Plain(), Cipher(KEY)], ids=["plain", "sealed"])
def test_another_store_fetches_by_ids_what_one_has_put(
    opened: Open, encryption: Encryption
) -> None:
    content = put(opened(encryption))
    other = opened(encryption)
    assert tier_of(other).fetch(wanted()) == ""
    assert in_store(other) == {node.key for node in NODES[:3]}
    for node in NODES[:3]:
        entry = other.pool.get(node.key)
        assert entry is not None and entry.tier == "shared" and entry.block == node
        assert entry.block.text == node.text
        for name, array in content[node.key].items():
            assert mx.array_equal(entry.arrays[name], array)
    other.drain()
    assert {node.key for node in NODES[:3]} <= other.index.keys()
    assert counts(other)["written"] == 0


def test_a_conversation_is_found_by_its_text(opened: Open) -> None:
    put(opened(), checkpoints=[state(NODES[3])])
    other = opened()
    seen: list[Block] = []

    def plan(found: Conversation) -> Plan:
        seen.extend(found.chain)
        return whole(found)

    asked = wanted(ids=[9] * 2000, plan=plan)
    assert tier_of(other).fetch(asked) == ""
    assert seen == NODES and [one.text for one in seen] == [one.text for one in NODES]
    assert in_store(other) == {node.key for node in NODES}
    assert other.checkpoints([NODES[3].key]) == {NODES[3].key: [state(NODES[3])]}


def test_a_model_that_needs_checkpoints_gets_whole_conversations(opened: Open) -> None:
    put(opened(), checkpoints=[state(NODES[3])])
    other = opened()
    tier_of(other).fetch(wanted(any_prefix=False))
    assert not in_store(other)
    tier_of(other).fetch(wanted(any_prefix=False, plan=whole))
    assert in_store(other) == {node.key for node in NODES}


def test_another_layout_is_a_miss_that_says_so(opened: Open) -> None:
    put(opened())
    note = tier_of(opened()).fetch(wanted(root=Root("fingerprint", "8b64")))
    assert "another KV precision (4b64)" in note


def test_another_key_finds_and_reads_nothing(opened: Open, tmp_path: Path) -> None:
    put(opened())
    before = {path: path.read_bytes() for path in objects_in(tmp_path)}
    assert all(node.key.hex() not in str(path) for path in before for node in NODES)
    assert not any(b"safetensors" in data or b"root" in data for data in before.values())
    other = opened(Cipher(bytes(32)))
    assert tier_of(other).fetch(wanted()) == "" and not in_store(other)
    assert counts(other)["refused"] == 0


def test_each_object_is_put_once(opened: Open) -> None:
    first, second = opened(), opened()
    put(first)
    put(second)
    assert counts(first)["written"] == 6  # four blocks, the chain, its layout
    assert counts(second)["written"] == 1
    put(first)
    assert counts(first)["written"] == 7


def test_two_writers_at_once(opened: Open) -> None:
    stores = [opened(), opened()]
    threads = [threading.Thread(target=put, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    third = opened()
    tier_of(third).fetch(wanted())
    assert in_store(third) == {node.key for node in NODES[:3]}
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
def test_objects_that_were_changed_are_misses_and_replaced(
    opened: Open, tmp_path: Path, encryption: Encryption, change: Callable[[bytes], bytes]
) -> None:
    put(opened(encryption))
    for path in objects_in(tmp_path):
        path.write_bytes(change(path.read_bytes()))
    other = opened(encryption)
    tier_of(other).fetch(wanted(plan=whole))
    assert not in_store(other) and counts(other)["refused"] > 0
    put(other)
    third = opened(encryption)
    tier_of(third).fetch(wanted())
    assert NODES[0].key in third


@pytest.mark.parametrize("encryption", [Plain(), Cipher(KEY)], ids=["plain", "sealed"])
def test_objects_under_anothers_name_are_misses(
    opened: Open, tmp_path: Path, encryption: Encryption
) -> None:
    one = opened(encryption)
    put(one)
    names = [tmp_path / "bucket" / tier_of(one).objects.path(node.key) for node in NODES[:2]]
    contents = [name.read_bytes() for name in names]
    for name, content in zip(names, reversed(contents), strict=True):
        name.write_bytes(content)
    other = opened(encryption)
    tier_of(other).fetch(wanted())
    assert not in_store(other) and counts(other)["refused"] >= 1


class SimulatedThreads:
    """Threads whose tasks take time by a simulated clock, and that share one network line.

    A task runs when it is submitted, one at a time, so tasks use the line in this order.
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
    """The result of a task, and its time."""

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
    """The fetching threads of stores that are opened after this."""
    made = SimulatedThreads(clock)
    monkeypatch.setattr("mlx_lm_kvpersist.store.shared.Threads", lambda n_threads, name: made)
    return made


class Hampered:
    """Objects that come slowly on simulated threads, or fail, perhaps after some have come."""

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


def test_a_slow_store_costs_little_and_is_left_alone(
    opened: Open, tmp_path: Path, simulated: SimulatedThreads, caplog: pytest.LogCaptureFixture
) -> None:
    put(opened())
    slow = Hampered(tmp_path / "bucket", bytes_per_s=100e3, simulated=simulated)
    other = opened(objects=slow)
    began_s = simulated.clock.monotonic()
    notes = {tier_of(other).fetch(wanted(compute_s=lambda at, n: n / 1000)) for _ in range(5)}
    assert 0 < simulated.clock.monotonic() - began_s < 0.1 * 0.772
    assert notes == {"the shared store is slower than computing"}
    assert len(caplog.records) == 1


def test_what_has_come_of_a_store_that_becomes_slow_is_used(
    opened: Open, tmp_path: Path, simulated: SimulatedThreads
) -> None:
    put(opened())
    slow = Hampered(tmp_path / "bucket")
    other = opened(objects=slow)
    get = slow.get

    def get_first(name: str, max_bytes: int) -> bytes:
        if name == tier_of(other).objects.path(NODES[2].key):
            simulated.take(3, 0)
        return get(name, max_bytes)

    slow.get = get_first  # type: ignore[method-assign]
    began_s = simulated.clock.monotonic()
    tier_of(other).fetch(wanted(compute_s=lambda at, n: n / 1000))
    assert in_store(other) == {node.key for node in NODES[:2]}
    assert simulated.clock.monotonic() - began_s < 1


def quick(position: int, n_tokens: int) -> float:
    """Return the seconds that a quick model takes."""
    return n_tokens / 100_000


def test_short_prompts_that_gain_nothing_do_not_keep_long_ones_away(
    opened: Open, tmp_path: Path, simulated: SimulatedThreads, caplog: pytest.LogCaptureFixture
) -> None:
    put(opened())
    other = opened(objects=Hampered(tmp_path / "bucket", latency_s=0.03, simulated=simulated))
    notes = [tier_of(other).fetch(wanted(compute_s=quick)) for _ in range(2)]
    assert set(notes) == {"the shared store is slower than computing"} and not in_store(other)
    assert tier_of(other).fetch(wanted()) == "" and NODES[2].key in other
    assert len(caplog.records) == 1


@pytest.mark.parametrize("any_prefix", [True, False])
@pytest.mark.parametrize("bytes_per_s", [50e6, 5e6, 1e6, 250e3])
def test_a_fetch_never_takes_longer_than_computing(
    opened: Open, tmp_path: Path, simulated: SimulatedThreads, bytes_per_s: float, any_prefix: bool
) -> None:
    """A block comes in 1, 13, 67 or 268 ms and takes 102 to compute; the lost time is bounded."""
    put(opened(), checkpoints=[state(NODES[3])])
    other = opened(objects=Hampered(tmp_path / "bucket", bytes_per_s, simulated=simulated))
    asked = wanted(
        compute_s=lambda at, n: n / 2500, plan=whole, any_prefix=any_prefix, ids=range(5000)
    )
    began_s = simulated.clock.monotonic()
    tier_of(other).fetch(asked)
    took_s, found = simulated.clock.monotonic() - began_s, in_store(other)
    saved_s = sum(node.n_tokens for node in NODES if node.key in found) / 2500
    if bytes_per_s > 250e3:
        assert found == {node.key for node in NODES}
        assert any_prefix or other.checkpoints([NODES[3].key])
    assert took_s < saved_s + 0.08 * 5000 / 2500


@pytest.mark.parametrize("any_prefix", [True, False])
def test_what_has_come_of_a_store_that_dies_is_used(
    opened: Open, tmp_path: Path, any_prefix: bool, caplog: pytest.LogCaptureFixture
) -> None:
    put(opened(), checkpoints=[state(NODES[3])])
    dying = Hampered(tmp_path / "bucket")
    dying.fails, dying.fails_after = OSError("connection reset"), 3
    other = opened(objects=dying)
    note = tier_of(other).fetch(wanted(plan=whole, any_prefix=any_prefix))
    assert "connection reset" in note and len(in_store(other)) <= 3
    assert len(caplog.records) == 1
    dying.fails = None


def test_a_share_whose_requests_time_out_has_failed(opened: Open, tmp_path: Path) -> None:
    """A soft mount raises ETIMEDOUT, which is a TimeoutError, too."""
    dead = Hampered(tmp_path / "bucket")
    put(opened())
    other = opened(objects=dead)
    dead.fails = OSError(errno.ETIMEDOUT, "timed out")
    assert "timed out" in tier_of(other).fetch(wanted())
    assert "timed out" in tier_of(other).stats()["failed_with"]
    dead.fails = None


def test_clocks_do_not_matter(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    for skew_s in (-400 * 86400, 400 * 86400):
        monkeypatch.setattr(time, "time", lambda skew_s=skew_s: now() + skew_s)
        store = opened()
        put(store)
        other = opened()
        assert tier_of(other).fetch(wanted()) == "" and NODES[2].key in other
        assert counts(other)["refused"] == 0


def test_a_dead_store_costs_one_line_and_comes_back(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "PROBE_S", 0.05)
    put(opened())
    dead = Hampered(tmp_path / "bucket")
    other = opened(objects=dead)
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


def test_a_store_that_cannot_be_written_is_read_all_the_same(opened: Open, tmp_path: Path) -> None:
    put(opened())
    full = Hampered(tmp_path / "bucket")
    full.puts_fail = OSError("no space left")
    other = opened(objects=full)
    save_turn(other, chain([1, 2]), "s", messages=MESSAGES)
    put_all(other)
    assert tier_of(other).stats()["failed_with"] == "no space left"
    assert tier_of(other).fetch(wanted()) == "" and NODES[0].key in other


def test_what_waits_is_bounded(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "MAX_WAITING", 6)
    full = Hampered(tmp_path / "bucket")
    full.puts_fail = OSError("no space left")
    store = opened(objects=full)
    for n in range(4):
        save_turn(store, chain([n, 2]), "s", messages=MESSAGES)
    stats = tier_of(store).stats()
    assert stats["waiting"] == 6 and stats["not_written"] == 2


def test_parts_of_a_turn_are_not_shared(opened: Open) -> None:
    store = opened()
    save_turn(store, NODES[:1], "s", messages=MESSAGES)
    put_all(store)
    before = counts(store)["written"]
    (part,) = chain([1, 2, 3])
    store.commit(Commit(ROOT, (part,)), [(part, conftest.arrays_of(part))])
    store.drain()
    put_all(store)
    assert counts(store)["written"] == before


def test_blocks_that_were_stored_before_the_tier_was_used_are_put_with_the_next_turn(
    tmp_path: Path, opened: Open
) -> None:
    """A commit has its new blocks alone; the index has the blocks before them."""
    with closing(BlockStore(tmp_path / "early", LIMITS)) as store:
        save_turn(store, NODES[:2], "s", messages=MESSAGES)
        store.share(Objects(str(tmp_path / "bucket")), Cipher(KEY), None)
        leaf = Leaf("s", NODES[2].key, NODES[2].stop, messages=MESSAGES)
        new = [(NODES[2], conftest.arrays_of(NODES[2]))]
        store.commit(Commit(ROOT, (NODES[2],), leaf), new)
        store.drain()
        put_all(store)
    other = opened()
    tier_of(other).fetch(wanted(plan=whole))
    assert in_store(other) == {node.key for node in NODES[:3]}


def test_a_store_that_cannot_be_listed_is_written_all_the_same(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unlisted(Hampered):
        def list(self) -> Iterator[ListedObject]:
            raise OSError("access denied")

    store = opened(objects=Unlisted(tmp_path / "bucket"), max_bytes=1 << 10)
    put(store)
    assert counts(store)["written"] == 6 and len(caplog.records) == 1


def test_a_conversation_is_what_was_packed() -> None:
    packed = Conversation(tuple(NODES), (state(NODES[0]),), {b"digest": b"ids"}).packed()
    found = Conversation.unpacked(packed, ROOT)
    assert found.chain == tuple(NODES) and found.checkpoints == (state(NODES[0]),)
    assert found.replies == {b"digest": b"ids"}
    assert all(isinstance(one, Checkpoint) for one in found.checkpoints)


def reply_of(store: BlockStore, n: int) -> None:
    """Remember a reply of the conversation."""
    store.commit(Commit(ROOT, (), replies={b"%d" % n: b"ids"}, messages=MESSAGES), [])
    store.drain()
    put_all(store)


def test_replies_of_all_servers_come_with_the_conversation(opened: Open) -> None:
    first, second, third = opened(), opened(), opened()
    reply_of(first, 1)
    put(first)
    reply_of(second, 2)
    learned: list[set[bytes]] = []

    def learn(replies: Mapping[bytes, bytes]) -> Wanted:
        learned.append(set(replies))
        return wanted()

    tier_of(third).fetch(wanted(learn=learn))
    assert learned == [{b"1", b"2"}] and NODES[2].key in third


def test_what_is_used_is_put_again_before_it_is_pruned(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(opened())
    for n, path in enumerate(objects_in(tmp_path)):
        then_s = time.time() - (10 + n) * 86400
        os.utime(path, (then_s, then_s))
    other = opened()
    put(other)
    assert counts(other)["written"] == 6
    assert not surplus(Objects(str(tmp_path / "bucket")).list(), 86400, None)
    for path in objects_in(tmp_path):
        path.unlink()
    put(other)
    assert counts(other)["written"] == 7  # it believes that they exist
    monkeypatch.setattr(shared_objects, "ASK_AGAIN_S", 0.0)
    put(other)
    assert counts(other)["written"] == 13


def test_the_size_of_all_servers_is_kept(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "PRUNE_S", 0.0)
    most = 300 << 10
    stores = [opened(max_bytes=most) for _ in range(2)]
    for n in range(8):
        put(stores[n % 2], chain([n] * 256))
    put(stores[0], chain([9]))
    sizes = [path.stat().st_size for path in objects_in(tmp_path)]
    assert most - (80 << 10) < sum(sizes) <= most + (80 << 10)
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
def test_hostile_conversations_are_misses(opened: Open, tmp_path: Path, content: Any) -> None:
    put(opened(Plain()))
    other = opened(Plain())
    key = conversation_key(ROOT, opening_of(MESSAGES))
    path = tmp_path / "bucket" / tier_of(other).objects.path(key)
    path.write_bytes(zlib.compress(json.dumps(content).encode()))
    tier_of(other).fetch(wanted(plan=whole))
    assert in_store(other) <= {node.key for node in NODES}
    put(other)
    assert Conversation.unpacked(path.read_bytes(), ROOT).chain == tuple(NODES)


def test_options_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        Objects("nothing://bucket")
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'mlx-lm-kvpersist\[shared\]'"):
        Objects(str(tmp_path))


@pytest.mark.parametrize(
    ("url", "said"),
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
def test_a_place_that_is_no_folder_of_this_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="give a folder, or a URL such as s3://") as told:
        Objects(url)
    assert said in str(told.value)
    assert not list(tmp_path.iterdir())


def test_a_url_of_a_file_names_the_folder_that_it_says(tmp_path: Path) -> None:
    folder = tmp_path / "a b#c"
    for url in (f"file://{tmp_path}/a%20b%23c", f"file://localhost{tmp_path}/a%20b%23c"):
        Objects(url).put("kvpersist/00/x", b"content")
        assert (folder / "kvpersist/00/x").read_bytes() == b"content"


def test_of_a_bucket_only_own_names_are_listed_and_removed() -> None:
    objects = Objects("memory:///")
    own, foreign = f"kvpersist/ab/ab{'0' * 30}", f"kvpersist/ab/ab{'0' * 30}.tmp"
    others = [foreign, f"kvpersist/AB/AB{'0' * 30}", "kvpersist/index.sqlite", f"ab/ab{'0' * 30}"]
    for name in (own, *others):
        objects.put(name, b"content")
    assert [one.name for one in objects.list()] == [own]
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
def test_what_is_foreign_in_the_place_of_an_object_stays_and_is_a_miss(
    opened: Open, tmp_path: Path, put_foreign: Callable[[Path, Path], object]
) -> None:
    """A pipe is not waited for, either."""
    put(opened())
    (tmp_path / "letter").write_bytes(b"letter")
    other = opened()
    path = tmp_path / "bucket" / tier_of(other).objects.path(NODES[0].key)
    path.unlink()
    put_foreign(path, tmp_path)
    before = path.lstat()
    assert tier_of(other).fetch(wanted()) == "" and NODES[0].key not in other
    put(other)
    assert path.lstat() == before and (tmp_path / "letter").read_bytes() == b"letter"
    assert not (tmp_path / "nothing").exists()
    assert counts(other)["not_written"] == 1 and tier_of(other).stats()["waiting"] == 0


def test_nothing_is_put_behind_a_link(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    store = opened()
    (tmp_path / "bucket" / "kvpersist").symlink_to(tmp_path / "elsewhere")
    put(store)
    assert not list((tmp_path / "elsewhere").iterdir()) and not counts(store)["written"]
    assert "is reached through a link or is not" in caplog.text


class Faulty(Hampered):
    """Objects of which one cannot be put."""

    bad = ""
    n_tried = 0

    def put(self, name: str, content: bytes) -> None:
        if name == self.bad:
            self.n_tried += 1
            raise OSError("403 Forbidden")
        super().put(name, content)


@pytest.mark.parametrize("bad", range(5), ids=[*(f"block {n}" for n in range(4)), "conversation"])
def test_an_object_that_cannot_be_put_is_left_out_and_keeps_no_other_one_waiting(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: int
) -> None:
    store = opened(objects=(faulty := Faulty(tmp_path / "bucket")))
    keys = [*(node.key for node in NODES), conversation_key(ROOT, opening_of(MESSAGES))]
    faulty.bad = tier_of(store).objects.path(keys[bad])
    put(store)
    put(store, chain([8] * 256))
    stats = tier_of(store).stats()
    assert stats["waiting"] == 0 and stats["failed_with"] == ""
    assert len(objects_in(tmp_path)) >= 5
    assert faulty.n_tried % shared.MOST_ATTEMPTS == 0 and stats["not_written"] >= 1
    said = [record.getMessage() for record in caplog.records]
    assert said == ["kvpersist: an object cannot be put into the shared store: 403 Forbidden"]


def test_nothing_is_left_out_while_a_store_does_not_answer(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared, "PROBE_S", 0.01)
    dead = Hampered(tmp_path / "bucket")
    dead.fails = OSError("connection refused")
    store = opened(objects=dead)
    save_turn(store, NODES, "s", messages=MESSAGES)
    # Each attempt is counted, and one is said.
    wait_until(lambda: sum(store.stats()["failed"].values()) >= 20, "attempts")
    assert tier_of(store).stats()["waiting"] == 5 and counts(store)["not_written"] == 0
    assert len(caplog.records) == len(store.stats()["failed"]) == 1
    dead.fails = None
    wait_until(lambda: not tier_of(store).stats()["waiting"], "all is put")
    assert counts(store)["written"] == 6


class Hanging(Hampered):
    """Objects of a folder that hangs, as NFS can: an operation does not return."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder)
        self._monkeypatch = monkeypatch
        self.goes_on = threading.Event()
        self.go_on()
        self.hangs_at: str | None = None
        """The one name that hangs; None: all do."""

    def hang(self, answer_s: float = 0.05) -> None:
        """Answer nothing from now on; a store waits `answer_s` for an answer."""
        self._monkeypatch.setattr("mlx_lm_kvpersist.store.objects.ANSWER_S", answer_s)
        self.goes_on.clear()

    def go_on(self) -> None:
        """Answer; the machine may be busy with other work."""
        self._monkeypatch.setattr("mlx_lm_kvpersist.store.objects.ANSWER_S", 60.0)
        self.goes_on.set()

    def _wait(self, n_bytes: int) -> None:
        super()._wait(n_bytes)
        if self.hangs_at is None:
            self.goes_on.wait()

    def put(self, name: str, content: bytes) -> None:
        if name == self.hangs_at:
            self.goes_on.wait()
        super().put(name, content)

    def open(self) -> None:
        self.goes_on.wait()
        super().open()

    def list(self) -> Iterator[ListedObject]:
        self.goes_on.wait()
        return super().list()


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    monkeypatch.setattr(shared, "PROBE_S", 0.02)
    monkeypatch.setattr(shared, "CLOSING_S", 0.1)
    objects = Hanging(tmp_path / "bucket", monkeypatch)
    yield objects
    objects.goes_on.set()


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


def hang(store: BlockStore, how: str) -> None:
    """Begin an operation that does not end."""
    if how == "get":
        tier_of(store).fetch(wanted())
    else:
        save_turn(store, NODES, "s", messages=MESSAGES)


@pytest.mark.parametrize("max_bytes", [None, 1 << 30], ids=["", "size"])
@pytest.mark.parametrize("how", ["get", "put"])
def test_a_folder_that_hangs_is_noticed_said_once_and_delays_no_shutdown(
    opened: Open,
    hanging: Hanging,
    caplog: pytest.LogCaptureFixture,
    how: str,
    max_bytes: int | None,
) -> None:
    assert ANSWER_S < 10
    put(opened())
    store = opened(objects=hanging, max_bytes=max_bytes)
    hanging.hang()
    hang(store, how)
    wait_until(lambda: bool(tier_of(store).stats()["failed_with"]), "it is noticed")
    n_threads = threading.active_count()
    for _ in range(20):
        assert "has not answered" in tier_of(store).fetch(wanted())
    wait_for_attempts(store, 3)
    assert threading.active_count() <= n_threads
    said = [r.getMessage() for r in caplog.records if "shared store" in r.getMessage()]
    assert len([one for one in said if "has not answered" in one]) == 1
    check_close(store)


def test_a_folder_that_has_just_begun_to_hang_delays_no_shutdown_either(
    opened: Open, hanging: Hanging
) -> None:
    store = opened(objects=hanging)
    hanging.hang(answer_s=300.0)
    hang(store, "put")
    check_close(store)


def test_a_folder_that_hangs_at_the_start_is_said_once_and_used_when_it_answers(
    opened: Open, hanging: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    put(opened())
    hanging.hang()
    store = opened(objects=hanging)
    for _ in range(20):
        assert "is not used now" in tier_of(store).fetch(wanted())
    wait_for_attempts(store, 3)
    said = [r.getMessage() for r in caplog.records if "shared store" in r.getMessage()]
    assert said == [
        "kvpersist: the shared store cannot be read: it does not answer; serving continues"
    ]
    hanging.go_on()
    wait_until(lambda: not tier_of(store).stats()["failed_with"], "it answers")
    assert tier_of(store).fetch(wanted()) == "" and in_store(store)


def test_a_folder_that_hung_is_used_again(opened: Open, hanging: Hanging) -> None:
    store = opened(objects=hanging)
    hanging.hang()
    hang(store, "put")
    wait_until(lambda: bool(tier_of(store).stats()["failed_with"]), "it is noticed")
    hanging.go_on()
    wait_until(lambda: not tier_of(store).stats()["waiting"], "all is put")
    assert tier_of(store).stats()["failed_with"] == "" and counts(store)["not_written"] == 0
    assert tier_of(opened()).fetch(wanted()) == ""


def test_an_object_that_hangs_keeps_no_other_one_waiting(opened: Open, hanging: Hanging) -> None:
    store = opened(objects=hanging)
    hanging.hangs_at = tier_of(store).objects.path(NODES[1].key)
    hanging.hang(answer_s=0.5)
    save_turn(store, NODES, "s", messages=MESSAGES)
    wait_until(lambda: not tier_of(store).stats()["waiting"], "all others are put")
    assert counts(store)["not_written"] == 1 and tier_of(store).stats()["failed_with"] == ""


def test_nothing_is_put_where_a_share_was_mounted(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, mounted = tmp_path.resolve() / "share", [True]
    is_mount = Path.is_mount
    monkeypatch.setattr(
        Path, "is_mount", lambda path: mounted[0] if path == share else is_mount(path)
    )
    monkeypatch.setattr(shared, "PROBE_S", 0.05)
    store = opened(objects=Objects(str(share / "kv")))
    put(store, NODES[:1])
    mounted[0] = False
    shutil.rmtree(share / "kv")
    save_turn(store, NODES, "s", messages=MESSAGES)
    reason = f"{share} is no longer mounted"
    wait_until(lambda: reason in (tier_of(store).stats()["failed_with"] or ""), "it is noticed")
    assert reason in tier_of(store).fetch(wanted()) and not (share / "kv").exists()
    mounted[0] = True
    stats = tier_of(store).stats
    wait_until(lambda: not (stats()["failed_with"] or stats()["waiting"]), "all is put")
    assert (share / "kv").exists()


def test_a_damaged_object_is_one_line_of_many(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(opened())
    for path in objects_in(tmp_path):
        path.write_bytes(b"damaged")
    other = opened()
    for _ in range(3):
        tier_of(other).fetch(wanted())
    assert len(caplog.records) == 1 and "has a damaged object" in caplog.text
    failed = other.stats()["failed"]
    assert failed == {"the shared store has a damaged object: …": counts(other)["refused"]}
    assert counts(other)["refused"] > 3


def test_what_is_remembered_of_objects_is_bounded(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_objects, "_MAX_KEYS", 10)
    objects = tier_of(opened()).objects
    for n in range(100):
        objects.saw(n.to_bytes(16, "big"))
        objects.forget((1000 + n).to_bytes(16, "big"), is_bad=True)
        assert objects.is_seen(n.to_bytes(16, "big"))
        assert len(objects._bad) <= 10 and len(objects.seen_s) <= 10


@pytest.mark.parametrize("seconds", [2 * 86400.0, -3600.0], ids=["slept", "set back"])
def test_an_object_is_asked_for_again_after_a_sleep(
    opened: Open, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """The monotonic clock of a Mac stands still in its sleep, and other servers remove objects."""
    objects, now_s = tier_of(opened()).objects, time.time()
    objects.saw(bytes(16))
    assert objects.is_seen(bytes(16))
    monkeypatch.setattr(time, "time", lambda: now_s + seconds)
    assert not objects.is_seen(bytes(16)) and objects.lacks(bytes(16))


def test_what_a_killed_server_left_in_a_shared_folder_is_pruned(tmp_path: Path) -> None:
    """obstore writes NAME#1 and renames it; a kill leaves that file, which counts as nobody's."""
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


def test_a_conversation_that_is_put_can_be_read() -> None:
    """256 replies of 18,000 tokens: their JSON is longer than what readers accept."""
    ids = json.dumps(list(range(100_000, 118_000))).encode()
    replies = {n.to_bytes(16, "big"): ids for n in range(256)}
    packed = Conversation(tuple(NODES), (), replies).packed()
    unpacked = Conversation.unpacked(packed, ROOT)
    assert unpacked.chain == tuple(NODES)
    assert unpacked.replies and list(unpacked.replies) == list(replies)[-len(unpacked.replies) :]


def test_a_conversation_that_no_reader_accepts_is_not_put(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_objects, "MAX_BYTES", 1000)
    with pytest.raises(StoreError, match="too long"):
        Conversation(tuple(NODES)).packed()
