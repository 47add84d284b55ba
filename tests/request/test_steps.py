"""A restore in steps, between the steps of running replies, gives the same caches as at once."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_lm_kvpersist.block import Block
from mlx_lm_kvpersist.cache.geometry.kinds import slots_of
from mlx_lm_kvpersist.cache.geometry.spec import probe_model
from mlx_lm_kvpersist.errors import ClientGone
from mlx_lm_kvpersist.host.hooks import Prompt
from mlx_lm_kvpersist.request import lookup as lookup_module
from mlx_lm_kvpersist.request.lookup import Lookup, Reuse
from mlx_lm_kvpersist.request.outcome import Reason
from models_check.build import build
from models_check.conversation import random_ids
from models_check.stored import StoredModel
from tests.support import wait_until
from tests.support.store_files import block_path, read_file, write_block

N_PROMPT = 1100


@pytest.fixture(autouse=True)
def every_restore_is_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_module, "MIN_PREFETCH_BYTES", 0)


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Return a model of a class, and the folder of a store with its answer to the prompt."""

    @cache
    def answered_by(name: str) -> tuple[Any, Path]:
        model, folder = build(name), tmp_path_factory.mktemp(name)
        with closing(StoredModel(model, probe_model(model), folder)) as stored:
            stored.answer([random_ids(1, N_PROMPT)], 4)
        return model, folder

    return answered_by


@pytest.fixture
def stored(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    answered: Callable[[str], tuple[Any, Path]],
) -> Iterator[StoredModel]:
    """A model of the class that the test names, with the answered prompt on disk."""
    model, folder = answered(getattr(request, "param", "llama"))
    shutil.copytree(folder, tmp_path / "store")
    with closing(StoredModel(model, probe_model(model), tmp_path / "store")) as made:
        made.store.drain()  # the store's first look at the folder may open the index again
        yield made


def look_up(stored: StoredModel, *, hot: bool = False) -> Lookup:
    """Look up the prompt that was answered, and more; nothing is in RAM unless `hot`."""
    if not hot:
        stored.store.pool.clear()
    ids = random_ids(1, N_PROMPT) + random_ids(2, 20)
    prompt = Prompt(ids, [ids], ["user"])
    return Lookup(prompt, stored.loaded.root, stored.store, stored.loaded)


def restore_in_steps(lookup: Lookup) -> tuple[Reuse, int]:
    """Restore in the smallest steps; return the result and the number of steps."""
    n_steps = 1
    wait_until(lambda: lookup._prefetch is None or lookup._prefetch.finished, "the prefetch")
    while not lookup.advance(0.0):
        n_steps += 1
    return lookup.restore(), n_steps


def assert_same(first: Reuse, second: Reuse) -> None:
    assert first.outcome.n_reused == second.outcome.n_reused > 0
    assert first.caches is not None and second.caches is not None
    for a, b in zip(first.caches, second.caches, strict=True):
        for (_, x), (_, y) in zip(tree_flatten(a.state), tree_flatten(b.state), strict=True):
            assert mx.array_equal(x, y) if isinstance(x, mx.array) else x == y


@pytest.mark.parametrize("stored", ["llama", "gemma3_text", "mamba2", "falcon_h1"], indirect=True)
def test_a_restore_in_steps_gives_the_same_caches_as_at_once(stored: StoredModel) -> None:
    for hot in (False, True):
        at_once = look_up(stored, hot=hot).restore()
        lookup = look_up(stored, hot=hot)
        assert lookup.prefetch() != hot
        reuse, n_steps = restore_in_steps(lookup)
        assert_same(reuse, at_once)
        assert n_steps > (N_PROMPT // 256 if stored.spec.full else 1)
        assert (reuse.outcome.tier == "ram") == hot == (at_once.outcome.tier == "ram")
        assert reuse.outcome.kind is at_once.outcome.kind
        assert not any(entry.prefetched for entry in stored.store.pool._entries.values())


def test_a_restore_begun_in_steps_can_be_finished_at_once(stored: StoredModel) -> None:
    """No reply runs any more, so the request enters at once."""
    at_once = look_up(stored).restore()
    lookup = look_up(stored)
    lookup.prefetch()
    wait_until(lambda: lookup._prefetch is not None and lookup._prefetch.finished, "the prefetch")
    assert not lookup.advance(0.0) and lookup.is_begun
    assert_same(lookup.restore(), at_once)


def test_a_complete_restore_keeps_its_caches_until_it_is_closed(stored: StoredModel) -> None:
    lookup = look_up(stored)
    in_steps_left = iter(range(10_000))
    while not lookup.advance(0.0):
        next(in_steps_left)
    assert lookup.advance(0.0) and lookup._reuse is not None
    caches = [weakref.ref(slot) for slot in slots_of(lookup._reuse.caches or ())]
    lookup.close()
    assert caches and not any(cache() for cache in caches)


def test_closing_a_lookup_during_a_restore_ends_the_restore(
    stored: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread notices that the client left."""
    lookup, load_all = look_up(stored), stored.store.reader.load_all

    def close_and_load(*args: Any) -> Any:
        lookup.close()
        return load_all(*args)

    monkeypatch.setattr(stored.store.reader, "load_all", close_and_load)
    assert not lookup.advance(0.0)
    assert not lookup.is_begun
    with pytest.raises(ClientGone):
        lookup.restore()


def test_closing_a_lookup_as_its_prefetch_begins_releases_all_pins(
    stored: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread notices that the client left."""
    lookup, reader, pool = look_up(stored), stored.store.reader, stored.store.pool
    prefetch = reader.prefetch

    def close_and_prefetch(*args: Any) -> Any:
        lookup.close()
        return prefetch(*args)

    monkeypatch.setattr(reader, "prefetch", close_and_prefetch)
    lookup.prefetch()
    reader._prefetcher.submit(lambda: None).result(10)  # the prefetch has ended
    assert not reader._prefetches
    assert not any(entry.prefetched for entry in pool._entries.values())


def test_damage_found_by_a_prefetch_is_the_reported_reason(stored: StoredModel) -> None:
    lookup = look_up(stored)
    path = block_path(stored.folder, lookup.stored.match.path[2].key)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    assert lookup.prefetch()
    wait_until(lambda: lookup._prefetch is not None and lookup._prefetch.finished, "the prefetch")
    assert stored.store.blocks_quarantined == 1
    assert lookup.restore().outcome.reason is Reason.DAMAGED


def test_a_restore_is_cut_at_a_block_deleted_between_steps(stored: StoredModel) -> None:
    at_once = look_up(stored).restore()
    lookup = look_up(stored)
    assert not lookup.advance(0.0)
    lost = lookup.stored.match.path[2]
    stored.store.pool.clear()
    block_path(stored.folder, lost.key).unlink()
    reuse, _ = restore_in_steps(lookup)
    assert reuse.outcome.n_reused == lost.start < at_once.outcome.n_reused
    assert_same(reuse, look_up(stored).restore())


def test_turns_saved_between_steps_do_not_change_a_restore(stored: StoredModel) -> None:
    at_once = look_up(stored).restore()
    lookup = look_up(stored)
    assert not lookup.advance(0.0)
    stored.answer([random_ids(9, 600)], 4)
    reuse, _ = restore_in_steps(lookup)
    assert_same(reuse, at_once)


def test_after_a_failed_step_a_restore_at_once_succeeds(
    stored: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("a moment")

    at_once = look_up(stored).restore()
    lookup = look_up(stored)
    with monkeypatch.context() as patch:
        patch.setattr(stored.store.reader, "load_all", fail)
        with pytest.raises(OSError, match="a moment"):
            lookup.advance(0.0)
    assert_same(lookup.restore(), at_once)


def test_a_restore_ends_when_its_client_disconnects(
    stored: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_module, "_LOOK_S", 0.0)
    lookup = look_up(stored)
    lookup.prefetch()
    looks = iter([False, False, True])
    with pytest.raises(ClientGone):
        lookup.restore(lambda: next(looks))
    assert not any(entry.prefetched for entry in stored.store.pool._entries.values())


def test_buffers_are_allocated_in_several_steps(
    stored: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Touching the memory of a long prompt's caches takes longer than replies may wait."""
    made: list[int] = []
    evaluate = mx.eval

    def counted(*arrays: Any) -> None:
        made[-1] += sum(x.nbytes for _, x in tree_flatten(list(arrays)) if x.size > 0)
        evaluate(*arrays)

    look_up(stored).restore()
    lookup = look_up(stored, hot=True)
    monkeypatch.setattr("mlx_lm_kvpersist.cache.blocks.mx.eval", counted)
    monkeypatch.setattr("mlx_lm_kvpersist.cache.blocks._ROOM_BYTES", 1)
    made.append(0)
    while not lookup.advance(0.0) and sum(made) == made[-1]:
        made.append(0)
    assert 0 < max(made) < stored.spec.bytes_per_token * N_PROMPT / 2


def test_a_closed_lookup_is_freed_without_garbage_collection(stored: StoredModel) -> None:
    """Python's garbage collector does not know how much memory caches take."""
    gc.collect()
    gc.disable()
    try:
        lookup = look_up(stored)
        assert not lookup.advance(0.0)
        left = weakref.ref(lookup)
        lookup.close()
        del lookup
        assert left() is None
    finally:
        gc.enable()


def test_a_step_does_not_read_blocks_that_are_being_prefetched(
    stored: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    read = stored.store.reader.read

    def later(*args: Any) -> Any:
        may_go_on.wait(60)
        return read(*args)

    monkeypatch.setattr(stored.store.reader, "read", later)
    lookup = look_up(stored)
    assert lookup.prefetch()
    assert not lookup.advance(0.0) and not lookup.is_begun
    may_go_on.set()
    reuse, _ = restore_in_steps(lookup)
    assert reuse.outcome.n_reused > 0


def rewrite(stored: StoredModel, block: Block, change: Callable[[str, mx.array], mx.array]) -> Path:
    """Replace the file of a block by a valid file with changed arrays; return its path."""
    path = block_path(stored.folder, block.key)
    _, root, arrays = read_file(path)
    path.unlink()
    changed = {name: mx.contiguous(change(name, x)) for name, x in arrays.items()}
    mx.eval(changed)
    write_block(path, block, root, changed)
    return path


def test_the_canary_runs_in_steps_and_rejects_changed_blocks(stored: StoredModel) -> None:
    lookup = look_up(stored)
    rewrite(stored, lookup.stored.match.path[-1], lambda _, x: x * 3)
    assert lookup.prefetch()
    wait_until(lambda: lookup._prefetch is not None and lookup._prefetch.finished, "the prefetch")
    n_steps = 1
    while not lookup.advance(0.0):
        n_steps += 1
        # Another prompt that needs these blocks at this time runs its own canary.
        assert all(entry.read_s for entry in stored.store.pool._entries.values())
    reuse = lookup.restore()
    assert n_steps > 1 and (reuse.caches, reuse.outcome.n_reused) == (None, 0)
    assert reuse.outcome.reason is Reason.DAMAGED


@pytest.mark.parametrize(
    "change",
    [
        lambda name, x: x.astype(mx.float16) if x.dtype == mx.bfloat16 else x,
        lambda name, x: x[:, :, :-1],
    ],
    ids=["dtype", "tokens"],
)
def test_a_valid_file_with_unexpected_arrays_is_quarantined(
    stored: StoredModel, change: Callable[[str, mx.array], mx.array]
) -> None:
    """The key and the checksum are right, but the arrays have another dtype or length."""
    lookup = look_up(stored)
    lost = lookup.stored.match.path[2]
    path = rewrite(stored, lost, change)
    outcome = lookup.restore().outcome
    assert (outcome.n_reused, outcome.reason) == (lost.start, Reason.DAMAGED)
    stored.store.drain()
    assert not path.exists() and stored.store.blocks_quarantined == 1


def test_a_restore_updates_the_time_of_use(stored: StoredModel) -> None:
    def used() -> float:
        unused = stored.store.index.unused(stored.loaded.fingerprint)
        return max(used_s for used_s, is_checkpoint, *_ in unused if not is_checkpoint)

    before = used()
    assert look_up(stored).restore().outcome.n_reused > 0
    stored.store.drain()
    assert used() > before
