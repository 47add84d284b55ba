"""While nobody asks, a loaded model's precision is judged, and a bad one replaced."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load

from mlx_lm_kvpersist.cache.geometry.precision import PrecisionChoice
from mlx_lm_kvpersist.cache.measuring import guard as judging
from mlx_lm_kvpersist.cache.measuring.divergence import compared
from mlx_lm_kvpersist.cache.measuring.guard import Verdict, known_verdict, put_verdict
from mlx_lm_kvpersist.config import DEFAULT_BITS, KV_BITS
from mlx_lm_kvpersist.host.answers import ModelSupport
from mlx_lm_kvpersist.host.scheduling.model_provider import PluginCaches
from mlx_lm_kvpersist.request import guard as guarding
from mlx_lm_kvpersist.request import loading
from mlx_lm_kvpersist.request.guard import Guard
from mlx_lm_kvpersist.request.idle import IdleWork
from mlx_lm_kvpersist.request.loading import Asked, Preparation
from mlx_lm_kvpersist.request.machine import Pressure
from mlx_lm_kvpersist.request.memory import Claim, Memory
from mlx_lm_kvpersist.request.model import LoadedModel
from mlx_lm_kvpersist.request.serving import Serving
from mlx_lm_kvpersist.store.block_store import BlockStore
from tests.support.host import patched_attention

from .conftest import prepared, provider_of, store_in, unproven

DEFAULT = KV_BITS[DEFAULT_BITS]
STEPS = 400
IDLE_S = 1e6


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    """Stock's attention cannot take keys and values of unlike precisions."""
    with patched_attention():
        yield


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return provider_of(tmp_path_factory.mktemp("model"), n_layers=4)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    made = store_in(tmp_path / "store")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [7 * i * i % 300 for i in range(280)]
    monkeypatch.setattr(judging, "placed", lambda tokenizer: (ids, {"end": range(256, 280)}))


def prepare(provider: Any, store: BlockStore, bits: str = DEFAULT_BITS) -> LoadedModel:
    return prepared(provider, store, KV_BITS[bits]).model


def served(preparation: Preparation, store: BlockStore) -> Serving:
    model = preparation.model
    memory = Memory(1 << 30, 0, store, Pressure())
    return Serving(store, model, lambda *_: None, False, 0.1, memory, preparation)


def guard_of(its: Serving, step_s: float = 60.0, default: PrecisionChoice = DEFAULT) -> IdleWork:
    """Return what does one step of the guard's whenever nothing is served."""
    assert its.preparation is not None
    guard = Guard(its, default, its.preparation.fit, step_s)
    work = IdleWork((None for _ in range(1)), guard.steps(), 0.0)
    while not work._quiet_s:
        work.idle(0.0)
    return work


def serving(provider: Any, store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> Serving:
    """Return what serves a model whose caches the server makes as the plugin says."""
    made = served(prepared(provider, store, DEFAULT), store)
    support = ModelSupport(lambda: made.model.spec.make_cache())
    monkeypatch.setattr(
        provider.model, "make_cache", PluginCaches(provider.model, "p", support), raising=False
    )
    return made


def work(guard: IdleWork) -> None:
    for _ in range(STEPS):
        guard.idle(IDLE_S)


def test_a_precision_that_is_borne_stays(
    provider: Any,
    store: BlockStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(judging, "LIMIT_NATS", 1e6)
    its = serving(provider, store, monkeypatch)
    before = its.model
    work(guard_of(its))
    assert its.model.root == before.root and its.model.spec is before.spec
    assert its.model.verdict is not None and not its.model.verdict.n_refused
    assert its.model.precision.endswith("(end))")
    assert caplog.text.count("checked: loses at most") == 1


@pytest.mark.parametrize(
    ("losses", "layout"), [((0.5, 0.002), "k8v4b64,c256"), ((0.5, 0.4, 0.3), "full")]
)
def test_what_is_found_is_what_later_starts_take(
    provider: Any,
    store: BlockStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    losses: tuple[float, ...],
    layout: str,
) -> None:
    """The model goes on in the new precision, with the root and groups of a new start."""
    found = iter(losses)
    monkeypatch.setattr(judging, "part_means", lambda *_: {"end": next(found)})
    its = serving(provider, store, monkeypatch)
    before = its.model
    guard = guard_of(its)
    guard.idle(IDLE_S)
    assert its.model is before
    work(guard)
    assert its.model.spec.layout == layout and its.model.root != before.root
    assert its.model.speed is before.speed
    assert caplog.text.count("from now on: the default loses 0.5 nats (end), more than 0.01") == 1
    monkeypatch.undo()
    store.drain()
    # It is ready at once: the new precision was proven, too, and its measurements kept.
    asked = Asked(DEFAULT, "dequantize", 1 << 30, with_text=True)
    start = Preparation(provider, store, asked, lambda choice: unproven())
    assert start.doing == ""
    again = start.model
    assert (again.spec, again.root) == (its.model.spec, its.model.root)
    assert again.verdict == its.model.verdict
    # Nothing is left to judge, and what is asked for by name stays.
    work(guard_of(replace(its, model=again)))
    assert prepare(provider, store, "k6v4").spec.layout == "k6v4b64,c256"


def test_requests_between_two_steps_change_nothing(
    provider: Any, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may come after any step; the guard goes on where it was."""
    found = []
    for is_disturbed in (False, True):
        its = serving(provider, store, monkeypatch)
        guard = guard_of(its, 1e-9)
        for number in range(STEPS):
            guard.idle(IDLE_S)
            if is_disturbed and number < 50:
                caches = provider.model.make_cache()
                mx.eval(provider.model(mx.array([[number, 5, 9]]), cache=caches))
        assert its.model.verdict is not None
        found.append(its.model.verdict)
        monkeypatch.delattr(provider.model, "make_cache")
        store.drain()
        with store.index.database.transaction() as db:
            db.execute("DELETE FROM state WHERE key LIKE 'guard/%'")
    assert found[0] == found[1]


def test_the_verdict_of_a_server_that_was_quicker_is_taken(
    provider: Any, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = serving(provider, store, monkeypatch)
    theirs = Verdict((("far copy", 0.5), ("far copy", 0.001)))
    put_verdict(store.view.state, its.model.fingerprint, DEFAULT, theirs)
    monkeypatch.setattr(judging, "placed", lambda tokenizer: 1 / 0)
    work(guard_of(its))
    assert its.model.verdict == theirs and its.model.spec.layout == "k8v4b64,c256"


def test_bits_that_a_model_cannot_be_served_in_are_not_kept(
    provider: Any, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = serving(provider, store, monkeypatch)
    before = its.model
    refused = Verdict((("far copy", 0.5), ("far copy", 0.001)))
    with monkeypatch.context() as broken:
        broken.setattr(guarding, "known_verdict", lambda *_: refused)
        broken.setattr(loading, "planning", lambda *_: 1 / 0)
        work(guard_of(its))
    store.drain()
    assert its.model is before
    assert known_verdict(store.view.state, its.model.fingerprint, DEFAULT) is None


def test_what_ends_in_the_middle_is_judged_again(
    provider: Any, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = serving(provider, store, monkeypatch)
    guard = guard_of(its, 1e-9)
    for _ in range(20):
        guard.idle(IDLE_S)
    del guard
    monkeypatch.undo()
    assert its.model.verdict is None and prepare(provider, store).verdict is None


@pytest.mark.parametrize("error", [RuntimeError("[metal::malloc] no memory"), MemoryError()])
def test_a_failure_changes_nothing(
    provider: Any,
    store: BlockStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    def fails(*_: Any) -> Verdict:
        raise error

    monkeypatch.setattr(judging, "compared", fails)
    its = serving(provider, store, monkeypatch)
    before = its.model
    work(guard_of(its))
    assert its.model is before
    assert caplog.text.count("could not be checked") == 1 and repr(error) in caplog.text
    monkeypatch.undo()
    assert prepare(provider, store).verdict is None


@pytest.mark.parametrize("n_steps", [0, 4])
def test_a_model_that_the_server_drops_is_no_failure(
    provider: Any, store: BlockStore, caplog: pytest.LogCaptureFixture, n_steps: int
) -> None:
    loaded: Any = load(provider.model_key[0])
    own = SimpleNamespace(model=loaded[0], tokenizer=loaded[1], model_key=provider.model_key)
    its = served(prepared(own, store, DEFAULT), store)
    model = its.model
    guard = guard_of(its, 1e-9)
    for _ in range(n_steps):
        guard.idle(IDLE_S)
    del own.model, loaded
    gc.collect()
    caplog.clear()
    work(guard)
    assert not caplog.text and its.model is model


def test_a_request_that_lacks_memory_gets_that_of_the_guard(
    provider: Any, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard begins anew when there is memory again, and finds the same."""
    its = serving(provider, store, monkeypatch)
    memory = its.memory
    monkeypatch.setattr(judging, "LIMIT_NATS", 0.0)
    held: list[weakref.ref[Any]] = []
    n_held_bytes = 0

    def seen(model: Any, ids: list[int], own: list[Any], caches: Any) -> Any:
        nonlocal n_held_bytes
        held.extend(weakref.ref(cache) for cache in (*own, *caches[""]))
        found = compared(model, ids, own, caches)
        n_held_bytes = max(n_held_bytes, sum(cache.nbytes for cache in (*own, *caches[""])))
        return found

    monkeypatch.setattr(judging, "compared", seen)
    monkeypatch.setattr(guarding, "known_verdict", lambda *_: None)
    before, found = its.model, []
    for n_steps in (STEPS, 4, 12):
        its.model = before
        guard = guard_of(its)
        held.clear()
        for _ in range(n_steps):
            guard.idle(IDLE_S)
        is_judging = n_steps < STEPS
        assert any(cache() is not None for cache in held) == is_judging
        assert (memory.held_bytes > 0) == is_judging
        memory.weigh([10], [], 0)  # a reply that leaves room enough
        guard.idle(IDLE_S)
        assert any(cache() is not None for cache in held) == is_judging
        memory.waiting.append(Claim(0, 10, lambda: False))
        for _ in range(3):
            guard.idle(IDLE_S)
            assert held and all(cache() is None for cache in held) and not memory.held_bytes
        memory.waiting.clear()
        work(guard)
        found.append(its.model.verdict)
        memory.weigh((), (), 0)
    assert found[0] and len(found[0].losses) == 3 and found[1:] == [found[0]] * 2
    assert 0 < n_held_bytes <= judging.judging_bytes(None, before.spec) < 4 * n_held_bytes


def test_where_there_is_little_memory_only_what_runs_hinders_the_guard(
    provider: Any, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = serving(provider, store, monkeypatch)
    its.memory.total_bytes = 1
    its.memory.weigh([10], [], 0)
    guard = guard_of(its)
    work(guard)
    assert its.model.verdict is None and not its.memory.held_bytes
    its.memory.weigh((), (), 0)
    work(guard)
    assert its.model.verdict is not None


def test_a_model_that_was_refused_is_not_judged(provider: Any, store: BlockStore) -> None:
    its = served(prepared(provider, store, DEFAULT), store)
    assert its.preparation is not None
    its.preparation.doing = "it keeps state outside its caches"
    assert list(Guard(its, DEFAULT, its.preparation.fit, 60.0).steps()) == []
    assert its.model.verdict is None


def test_nothing_is_judged_that_was_asked_for_by_name(
    provider: Any, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = serving(provider, store, monkeypatch)
    monkeypatch.setattr(judging, "placed", lambda tokenizer: 1 / 0)
    for name in KV_BITS.keys() - {DEFAULT_BITS}:
        work(guard_of(its, default=KV_BITS[name]))
    assert its.model.verdict is None
