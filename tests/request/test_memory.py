"""The account of memory: what is promised to whom, what the pool gets, what the device offers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.block import Block
from mlx_lm_kvpersist.cache.geometry.precision import PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec
from mlx_lm_kvpersist.cache.live.quantized import batch_of
from mlx_lm_kvpersist.cache.measuring.prefill_memory import PrefillMemory
from mlx_lm_kvpersist.request import memory as accounts
from mlx_lm_kvpersist.request.memory import (
    GROWTH,
    MOST_PASSED,
    ROOM,
    Claim,
    Memory,
    Pressure,
    cgroup_bytes,
    total_bytes,
)
from mlx_lm_kvpersist.round_trip import tiny_model
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from mlx_lm_kvpersist.store.pool import KVBlock

MIB = 1 << 20


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def loaded(model: Any) -> Any:
    spec = ModelCacheSpec.probe(model, PrecisionChoice(6, 4))
    speed = SimpleNamespace(memory=PrefillMemory.of(spec, 8 * MIB, (1000.0, 0.0)))
    return SimpleNamespace(model=model, spec=spec, speed=speed)


@pytest.fixture(autouse=True)
def nothing_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "_INDEX_BYTES", 0)
    monkeypatch.setattr(accounts, "_RECORD_BYTES", 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    store = BlockStore(tmp_path / "store", StoreLimits(64 * MIB, 1 << 30))
    yield store
    store.close()


def account(loaded: Any, store: BlockStore, **more: Any) -> Memory:
    """Return an account with room for five sequences of 4,000 tokens."""
    memory = Memory(1, 0, store, Pressure(), **more)
    memory.serve(loaded)
    lengths = [4000] * 5
    needed = memory.caches_bytes((), lengths, ROOM + GROWTH) + memory.step_bytes((), lengths)
    memory.total_bytes = int(needed * 8 / 7) + 8
    memory.changed()
    return memory


def claim(order: int, n_tokens: int = 4000) -> Claim:
    return Claim(order, n_tokens, lambda: False)


def test_as_many_begin_as_fit(loaded: Any, store: BlockStore) -> None:
    memory = account(loaded, store)
    claims = [claim(i) for i in range(8)]
    assert [memory.admits(one) for one in claims] == [True] * 5 + [False] * 3
    assert [one.order for one in memory.waiting] == [5, 6, 7]
    for one in claims[:5]:
        memory.enters(one)
    assert memory.weigh((), [4000] * 5, 0) and not memory.admits(claims[5])
    assert memory.weigh([4000] * 4, (), 0) and memory.admits(claims[5])
    assert not memory.admits(claims[6])


def test_alone_what_is_too_long_begins(loaded: Any, store: BlockStore) -> None:
    memory = account(loaded, store)
    long = claim(0, 1 << 20)
    assert not memory.admits(long)
    memory.enters(long)
    assert not memory.waiting and store.pool.max_bytes == memory.pool_bytes
    assert not memory.admits(claim(1, 10))
    memory.weigh((), [1 << 20], 0)
    memory.ended()
    assert memory.admits(claim(2))


def test_shorter_ones_pass_but_the_oldest_gets_its_turn(loaded: Any, store: BlockStore) -> None:
    memory = account(loaded, store)
    memory.weigh([4000] * 2, (), 0)
    long = claim(0, 15_000)
    assert not memory.admits(long)
    n_passed = 0
    for order in range(1, 100):
        short = claim(order, 100)
        if not memory.admits(short):
            break
        n_passed += 1
        short.is_over = lambda: True  # it has ended
    assert n_passed == MOST_PASSED
    memory.ended()
    assert memory.admits(long)


def test_who_gives_up_stands_in_nobodys_way(loaded: Any, store: BlockStore) -> None:
    memory = account(loaded, store)
    memory.weigh([4000] * 5, (), 0)
    first = claim(0)
    assert not memory.admits(first)
    first.n_passed, first.is_over = MOST_PASSED, lambda: True
    memory.weigh([4000] * 3, (), 0)
    assert memory.admits(claim(1))


def test_the_pool_gets_what_is_left_but_a_share_at_least(loaded: Any, store: BlockStore) -> None:
    memory = account(loaded, store)
    before = store.pool.max_bytes
    assert memory.pool_bytes < before <= 64 * MIB
    for key in range(300):
        arrays = {"k": mx.zeros((1 << 16,), mx.uint8)}
        store.pool.put(
            KVBlock.of(Block(bytes([key // 256, key % 256]), b"", 0, b"ids", ""), arrays)
        )
    assert store.pool.n_bytes > memory.pool_bytes
    for order in range(5):
        assert memory.admits(claim(order))
    assert store.pool.n_bytes <= store.pool.max_bytes < before
    assert memory.parts()["pool"] == store.pool.n_bytes


def test_a_device_that_has_few_buffers_keeps_few_blocks(
    loaded: Any, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metal ends a process with more than 499,000."""
    monkeypatch.setattr(mx, "device_info", lambda: {"resource_limit": 1000})
    memory = account(loaded, store)
    for key in range(300):
        arrays = {"k": mx.zeros((1 << 10,), mx.uint8)}
        block = Block(bytes([key // 256, key % 256]), b"", 0, b"ids", "")
        store.pool.put(KVBlock.of(block, arrays))
    memory.changed()
    n_arrays = 6 * len(loaded.spec.groups)
    assert 100 < len(store.pool) <= 750 // n_arrays + 1


def test_pressure_takes_a_share_away(loaded: Any, store: BlockStore) -> None:
    memory = account(loaded, store)
    memory._pressure.level = 4
    memory.idle()
    assert memory.parts()["pressure"] == 4
    claims = [claim(i) for i in range(4)]
    assert [memory.admits(one) for one in claims] == [True, True, False, False]
    for one in claims:
        memory.enters(one)
    assert not memory.weigh([4000] * 4, (), 0)
    memory._pressure.level = 1
    assert memory.weigh([4000] * 4, (), 0)


def test_a_signal_raises_the_pressure_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "RAISED_S", 0.05)
    pressure = Pressure()
    pressure.raised()
    assert pressure.level == 4
    for _ in range(100):
        if pressure.level == 1:
            return
        time.sleep(0.05)
    raise AssertionError(pressure.level)


@pytest.mark.parametrize("lengths", [[300], [40, 1500, 700]])
def test_no_batch_takes_more_than_was_counted(
    loaded: Any, model: Any, store: BlockStore, lengths: list[int]
) -> None:
    """By the shapes of its arrays, and by what MLX has given out for them."""
    memory = account(loaded, store)
    before = mx.get_active_memory()
    rows = []
    for n_tokens in lengths:
        caches = loaded.spec.make_cache()
        for start in range(0, n_tokens, 256):
            ids = [5] * min(256, n_tokens - start)
            model(mx.array([ids]), cache=caches)
            mx.eval([cache.state for cache in caches])
        rows.append(caches)
    batch: list[Any] = [batch_of(layer) for layer in zip(*rows, strict=True)]
    del rows, caches
    for _ in range(3):
        mx.eval(model(mx.array([[5]] * len(lengths)), cache=batch))
        mx.eval([cache.state for cache in batch])
    shapes = sum(cache.nbytes for cache in batch)
    counted = memory.caches_bytes(lengths, (), ROOM)
    assert shapes <= counted <= 3 * shapes
    assert abs(mx.get_active_memory() - before - shapes) < 0.02 * shapes + 65536


def test_the_default_is_what_the_device_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"max_recommended_working_set_size": 16 << 30}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert total_bytes(None, 6 << 30) == 8 << 30
    assert total_bytes(None, 40 << 30) == accounts.LEAST_BYTES
    assert total_bytes(123, 40 << 30) == 123


def test_limits_of_control_groups_count(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert list(cgroup_bytes(tmp_path)) == []
    write("proc/self/cgroup", "0::/a/b\n4:cpu,memory:/c\n1:pids:/\n")
    write("sys/fs/cgroup/memory.max", "max\n")
    write("sys/fs/cgroup/a/memory.max", "1000\n")
    write("sys/fs/cgroup/a/memory.stat", "file 900\nanon 300\n")
    write("sys/fs/cgroup/a/b/memory.max", "5000\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "7000\n")
    assert list(cgroup_bytes(tmp_path)) == [5000, 700, 7000]
