"""The account of memory: claims of requests, the pool's share, the limits of the device."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.block import Block
from mlx_lm_kvpersist.cache.geometry.precision import PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import probe_model
from mlx_lm_kvpersist.cache.live.caches import batch_of
from mlx_lm_kvpersist.cache.measuring.prefill_memory import PrefillMemory
from mlx_lm_kvpersist.host.scheduling import prefill, prompt_lookup
from mlx_lm_kvpersist.host.scheduling.waiting import WEIGH_EVERY
from mlx_lm_kvpersist.request import memory as accounts
from mlx_lm_kvpersist.request.memory import (
    CRITICAL,
    GROWTH,
    MORE,
    MOST_PASSED,
    NORMAL,
    Claim,
    Memory,
    total_bytes,
)
from mlx_lm_kvpersist.round_trip import tiny_model
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from mlx_lm_kvpersist.store.records import KVBlock

MIB = 1 << 20


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def loaded(model: Any) -> Any:
    spec = probe_model(model, PrecisionChoice())
    key_bytes = PrefillMemory.of(model, spec, MIB).key_bytes
    speed = SimpleNamespace(memory=PrefillMemory(1000.0, 0.0, key_bytes, 8 * MIB))
    return SimpleNamespace(model=model, spec=spec, speed=speed, draft=None)


@pytest.fixture(autouse=True)
def no_estimated_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "_INDEX_BYTES", 0)
    monkeypatch.setattr(accounts, "_RECORD_BYTES", 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    store = BlockStore(tmp_path / "store", StoreLimits(64 * MIB, 1 << 30))
    yield store
    store.close()


@pytest.fixture(autouse=True)
def limit_of_mlx() -> Iterator[None]:
    before = mx.set_memory_limit(1 << 40)
    yield
    mx.set_memory_limit(before)


def fill(store: BlockStore, n_blocks: int, n_bytes: int) -> list[bytes]:
    """Put blocks of this size into RAM; return their keys."""
    keys = [number.to_bytes(2, "big") for number in range(n_blocks)]
    for key in keys:
        arrays = {"k": mx.zeros((n_bytes,), mx.uint8)}
        store.pool.put(KVBlock.of(Block(key, b"", 0, b"ids", ""), arrays))
    return keys


class Restores:
    """Replaces the lookup of a prompt that begins with these blocks."""

    restored_bytes = 0

    def __init__(self, store: BlockStore, keys: Sequence[bytes]) -> None:
        self._pool, self._keys = store.pool, keys
        self.pinned: list[KVBlock] = []

    def hold(self) -> int:
        self.pinned = self.pinned or self._pool.pin(self._keys, prefetch=True)
        return sum(entry.n_bytes for entry in self.pinned)

    def let_go(self) -> None:
        pinned, self.pinned = self.pinned, []
        self._pool.unpin(pinned, prefetch=True)


def account(loaded: Any, store: BlockStore, **more: Any) -> Memory:
    """Return an account with room for five sequences of 4,000 tokens."""
    memory = Memory(1, 0, store, loaded, **more)
    lengths = [4000] * 5
    takes, n_more = memory._takes, MORE + GROWTH
    needed = takes.caches_bytes((), lengths, n_more) + takes.step_bytes((), lengths, n_more)
    memory.total_bytes = int(needed * 8 / 7) + 8
    memory.changed()
    return memory


def claim(order: int, n_tokens: int = 4000, lookup: Any = None) -> Claim:
    return Claim(order, n_tokens, lambda: False, lookup)


def test_claims_are_admitted_while_memory_is_free(loaded: Any, store: BlockStore) -> None:
    memory = account(loaded, store)
    claims = [claim(i) for i in range(8)]
    assert [memory.admits(candidate) for candidate in claims] == [True] * 5 + [False] * 3
    assert [candidate.order for candidate in memory.waiting] == [5, 6, 7]
    for candidate in claims[:5]:
        memory.enters(candidate)
    assert memory.weigh((), [4000] * 5, 0) and not memory.admits(claims[5])
    assert memory.weigh([4000] * 4, (), 0) and memory.admits(claims[5])
    assert not memory.admits(claims[6])


def test_a_too_long_prompt_can_enter_alone(loaded: Any, store: BlockStore) -> None:
    memory = account(loaded, store)
    long = claim(0, 1 << 20)
    assert not memory.admits(long)
    memory.enters(long)
    assert not memory.waiting and store.pool.max_bytes == memory.pool_bytes
    assert not memory.admits(claim(1, 10))
    memory.weigh((), [1 << 20], 0)
    memory.weigh((), (), 0)
    assert memory.admits(claim(2))


def test_a_limited_number_of_smaller_claims_pass_the_oldest(loaded: Any, store: BlockStore) -> None:
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
        short.is_over = lambda: True  # the request has ended
    assert n_passed == MOST_PASSED
    memory.weigh((), (), 0)
    assert memory.admits(long)


def test_a_claim_that_is_over_blocks_no_other_claim(loaded: Any, store: BlockStore) -> None:
    memory = account(loaded, store)
    memory.weigh([4000] * 5, (), 0)
    first = claim(0)
    assert not memory.admits(first)
    first.n_passed, first.is_over = MOST_PASSED, lambda: True
    memory.weigh([4000] * 3, (), 0)
    assert memory.admits(claim(1))


def test_the_pool_shrinks_as_claims_are_admitted(loaded: Any, store: BlockStore) -> None:
    memory = account(loaded, store)
    before = store.pool.max_bytes
    assert memory.pool_bytes < before <= 64 * MIB
    fill(store, 300, 1 << 16)
    assert store.pool.n_bytes > memory.pool_bytes
    for order in range(5):
        assert memory.admits(claim(order))
    assert memory.pool_bytes <= store.pool.max_bytes < before
    assert store.pool.n_bytes <= store.pool.max_bytes
    assert memory.parts()["pool"] == store.pool.n_bytes


def test_the_account_counts_the_tokens_of_steps_before_the_next_weigh() -> None:
    assert max(prefill.MOST_DRAFTED, prompt_lookup.MOST_DRAFTED) + WEIGH_EVERY <= MORE


@pytest.mark.parametrize(("more", "n_read"), [(0, 3328), (512, 3840), (2000, 4000)])
def test_step_memory_counts_spare_room_up_to_a_quarter(
    loaded: Any, store: BlockStore, more: int, n_read: int
) -> None:
    takes = account(loaded, store)._takes
    assert takes.prefill is not None
    takes = replace(takes, prefill=replace(takes.prefill, key_bytes=1e9))
    assert takes.step_bytes([3000, 10], (), more) == 2 * n_read * 1e9


def test_the_blocks_of_several_restores_must_fit_together(loaded: Any, store: BlockStore) -> None:
    memory = account(loaded, store)
    memory.weigh((), [4000] * 2, 0)
    left = memory._usable_bytes - memory._needed([10, 10], MORE + GROWTH)
    keys = fill(store, 100, left * 3 // 4 // 100)
    first, second = Restores(store, keys[:80]), Restores(store, keys[20:])
    assert memory.admits(claim(0, 10, first)) and first.pinned
    fill(store, 200, left * 3 // 4 // 100)
    others = Restores(store, [number.to_bytes(2, "big") for number in range(100, 200)])
    late = claim(1, 10, others)
    assert others.hold() and not memory.admits(late) and not others.pinned
    assert memory.admits(claim(2, 10, second)) and second.pinned  # shares most blocks with `first`
    assert store.pool.n_bytes <= store.pool.max_bytes
    first.let_go()
    second.let_go()
    memory.weigh((), [4000], 0)
    assert memory.admits(late)


def test_a_restore_that_does_not_fit_pins_no_blocks(loaded: Any, store: BlockStore) -> None:
    memory = account(loaded, store)
    keys = fill(store, 100, 1 << 16)
    short, long = Restores(store, keys[:20]), Restores(store, keys)
    memory.enters(claim(0, 4000, short))
    assert len(short.pinned) == 20
    memory.enters(claim(1, 15_000, long))
    assert not long.pinned and store.pool.n_bytes <= store.pool.max_bytes
    assert len(short.pinned) == 20


def test_an_idle_account_leaves_room_for_a_chunk(loaded: Any, store: BlockStore) -> None:
    memory = account(loaded, store)
    fill(store, 300, 1 << 16)
    assert memory._takes.chunk_bytes == 8 * MIB
    assert store.pool.n_bytes <= memory.total_bytes - 8 * MIB


def test_an_unbatched_sequence_is_counted_by_its_tokens(loaded: Any, store: BlockStore) -> None:
    memory = account(loaded, store)
    memory.weigh((), (4000,), None)
    assert memory.parts()["caches"] == memory._takes.caches_bytes((), [4000], 0) > 0


def test_the_account_sets_and_restores_mlx_memory_limit(loaded: Any, store: BlockStore) -> None:
    """A closed account restores the limit, whether or not another model follows."""

    def limit() -> int:
        current = mx.set_memory_limit(1)
        mx.set_memory_limit(current)
        return current

    for _ in range(2):
        memory = Memory(200 * MIB, 1000 * MIB, store, loaded)
        assert limit() == 1200 * MIB
        memory._pressure_level = lambda: CRITICAL
        memory.idle()
        assert limit() == 1100 * MIB
        memory.enters(claim(0, 1 << 20))  # it exceeds the account, but does not wait
        assert limit() > 1000 * MIB + memory._needed()
        memory.close()
        assert limit() == 1 << 40


def test_the_pool_keeps_few_blocks_if_the_device_has_few_buffers(
    loaded: Any, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metal ends a process with more than 499,000 buffers."""
    monkeypatch.setattr(mx, "device_info", lambda: {"resource_limit": 1000})
    memory = account(loaded, store)
    fill(store, 300, 1 << 10)
    memory.changed()
    n_arrays = 6 * len(loaded.spec.groups)
    assert 100 < len(store.pool) <= 750 // n_arrays + 1


def test_memory_pressure_reduces_the_admitted_claims(loaded: Any, store: BlockStore) -> None:
    memory = account(loaded, store)
    memory._pressure_level = lambda: CRITICAL
    memory.idle()
    assert memory.parts()["pressure"] == CRITICAL
    claims = [claim(i) for i in range(4)]
    assert [memory.admits(candidate) for candidate in claims] == [True, True, False, False]
    for candidate in claims:
        memory.enters(candidate)
    assert not memory.weigh([4000] * 4, (), 0)
    memory._pressure_level = lambda: NORMAL
    assert memory.weigh([4000] * 4, (), 0)


@pytest.mark.parametrize("lengths", [[300], [40, 1500, 700]])
def test_a_batch_takes_no_more_memory_than_counted(
    loaded: Any, model: Any, store: BlockStore, lengths: list[int]
) -> None:
    """The batch is measured by the shapes of its arrays and by MLX's active memory."""
    memory = account(loaded, store)
    gc.collect()
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
    counted = memory._takes.caches_bytes(lengths, (), MORE)
    assert shapes <= counted <= 3 * shapes
    assert abs(mx.get_active_memory() - before - shapes) < 0.02 * shapes + 65536


def test_the_default_budget_depends_on_device_memory_and_weights(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    info = {"max_recommended_working_set_size": 16 << 30}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert total_bytes(None, 6 << 30) == 8 << 30
    assert total_bytes(None, 40 << 30) == accounts.LEAST_BYTES
    assert total_bytes(123, 6 << 30) == 123
    caplog.clear()
    assert total_bytes(11 << 30, 6 << 30) == 11 << 30
    assert "11.0 GiB and weights of 6.0 GiB are more than the 16.0 GiB" in caplog.text
