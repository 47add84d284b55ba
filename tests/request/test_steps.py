"""A restore in parts, between two steps of running replies: the same as without replies."""

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
        made.store.drain()  # its first look at what is stored may open the index once more
        yield made


def look_up(stored: StoredModel, *, hot: bool = False) -> Lookup:
    """Look up the prompt that was answered, and more; nothing is in RAM unless `hot`."""
    if not hot:
        stored.store.pool.clear()
    ids = random_ids(1, N_PROMPT) + random_ids(2, 20)
    prompt = Prompt(ids, [ids], ["user"])
    return Lookup(prompt, stored.loaded.root, stored.store, stored.loaded)


def in_steps(lookup: Lookup) -> tuple[Reuse, int]:
    """Restore in the smallest steps; return the result, and how many there were."""
    n_steps = 1
    wait_until(lambda: lookup._prefetch is None or lookup._prefetch.finished, "the prefetch")
    while not lookup.advance(0.0):
        n_steps += 1
    return lookup.restore(), n_steps


def assert_same(one: Reuse, other: Reuse) -> None:
    assert one.outcome.n_reused == other.outcome.n_reused > 0
    assert one.caches is not None and other.caches is not None
    for a, b in zip(one.caches, other.caches, strict=True):
        for (_, x), (_, y) in zip(tree_flatten(a.state), tree_flatten(b.state), strict=True):
            assert mx.array_equal(x, y) if isinstance(x, mx.array) else x == y


@pytest.mark.parametrize("stored", ["llama", "gemma3_text", "mamba2", "falcon_h1"], indirect=True)
def test_in_steps_or_in_one_go_the_caches_are_the_same(stored: StoredModel) -> None:
    for hot in (False, True):
        at_once = look_up(stored, hot=hot).restore()
        lookup = look_up(stored, hot=hot)
        assert lookup.prefetch() != hot
        reuse, n_steps = in_steps(lookup)
        assert_same(reuse, at_once)
        assert n_steps > (N_PROMPT // 256 if stored.spec.full else 1)
        assert (reuse.outcome.tier == "ram") == hot == (at_once.outcome.tier == "ram")
        assert reuse.outcome.kind is at_once.outcome.kind
        assert not any(entry.prefetched for entry in stored.store.pool._entries.values())


def test_a_restore_that_was_begun_in_steps_ends_in_one_go(stored: StoredModel) -> None:
    """No reply runs any more, so the request enters at once."""
    at_once = look_up(stored).restore()
    lookup = look_up(stored)
    lookup.prefetch()
    wait_until(lambda: lookup._prefetch is not None and lookup._prefetch.finished, "the prefetch")
    assert not lookup.advance(0.0) and lookup.is_begun
    assert_same(lookup.restore(), at_once)


def test_a_restore_that_is_complete_stays_so_until_it_is_closed(stored: StoredModel) -> None:
    lookup = look_up(stored)
    in_steps_left = iter(range(10_000))
    while not lookup.advance(0.0):
        next(in_steps_left)
    assert lookup.advance(0.0) and lookup._reuse is not None
    caches = [weakref.ref(slot) for slot in slots_of(lookup._reuse.caches or ())]
    lookup.close()
    assert caches and not any(cache() for cache in caches)


def test_a_close_while_it_restores_lets_go_of_everything(
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


def test_a_close_while_a_prefetch_begins_lets_go_of_everything(
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


def test_damage_that_a_prefetch_finds_is_said(stored: StoredModel) -> None:
    lookup = look_up(stored)
    path = block_path(stored.folder, lookup.stored.match.path[2].key)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    assert lookup.prefetch()
    wait_until(lambda: lookup._prefetch is not None and lookup._prefetch.finished, "the prefetch")
    assert stored.store.blocks_quarantined == 1
    assert lookup.restore().outcome.reason is Reason.DAMAGED


def test_blocks_that_go_between_two_steps_cost_their_tokens(stored: StoredModel) -> None:
    at_once = look_up(stored).restore()
    lookup = look_up(stored)
    assert not lookup.advance(0.0)
    lost = lookup.stored.match.path[2]
    stored.store.pool.clear()
    block_path(stored.folder, lost.key).unlink()
    reuse, _ = in_steps(lookup)
    assert reuse.outcome.n_reused == lost.start < at_once.outcome.n_reused
    assert_same(reuse, look_up(stored).restore())


def test_other_turns_that_are_saved_between_two_steps_change_nothing(stored: StoredModel) -> None:
    at_once = look_up(stored).restore()
    lookup = look_up(stored)
    assert not lookup.advance(0.0)
    stored.answer([random_ids(9, 600)], 4)
    reuse, _ = in_steps(lookup)
    assert_same(reuse, at_once)


def test_a_step_that_fails_leaves_the_rest_to_the_request(
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


def test_a_restore_ends_when_its_client_has_gone(
    stored: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_module, "_LOOK_S", 0.0)
    lookup = look_up(stored)
    lookup.prefetch()
    looks = iter([False, False, True])
    with pytest.raises(ClientGone):
        lookup.restore(lambda: next(looks))
    assert not any(entry.prefetched for entry in stored.store.pool._entries.values())


def test_the_buffers_are_not_all_made_in_one_step(
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


def test_a_client_that_left_leaves_no_caches_behind(stored: StoredModel) -> None:
    """Python's garbage collector does not know how much memory they have."""
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


def test_no_step_reads_what_is_being_prefetched(
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
    reuse, _ = in_steps(lookup)
    assert reuse.outcome.n_reused > 0


def rewrite(stored: StoredModel, block: Block, change: Callable[[str, mx.array], mx.array]) -> Path:
    """Change the arrays in the file of a block, which stays whole; return its path."""
    path = block_path(stored.folder, block.key)
    _, root, arrays = read_file(path)
    path.unlink()
    changed = {name: mx.contiguous(change(name, x)) for name, x in arrays.items()}
    mx.eval(changed)
    write_block(path, block, root, changed)
    return path


def test_the_canary_also_runs_between_steps(stored: StoredModel) -> None:
    lookup = look_up(stored)
    rewrite(stored, lookup.stored.match.path[-1], lambda _, x: x * 3)
    assert lookup.prefetch()
    wait_until(lambda: lookup._prefetch is not None and lookup._prefetch.finished, "the prefetch")
    n_steps = 1
    while not lookup.advance(0.0):
        n_steps += 1
        # Another prompt that needs them in the meantime has its own canary.
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
def test_a_whole_file_of_another_form_costs_its_tokens(
    stored: StoredModel, change: Callable[[str, mx.array], mx.array]
) -> None:
    """Its key and its checksum are right, and its arrays would be joined."""
    lookup = look_up(stored)
    lost = lookup.stored.match.path[2]
    path = rewrite(stored, lost, change)
    outcome = lookup.restore().outcome
    assert (outcome.n_reused, outcome.reason) == (lost.start, Reason.DAMAGED)
    stored.store.drain()
    assert not path.exists() and stored.store.blocks_quarantined == 1


def test_what_was_restored_counts_as_used(stored: StoredModel) -> None:
    def used() -> float:
        unused = stored.store.index.unused(stored.loaded.fingerprint)
        return max(used_s for used_s, is_checkpoint, *_ in unused if not is_checkpoint)

    before = used()
    assert look_up(stored).restore().outcome.n_reused > 0
    stored.store.drain()
    assert used() > before
