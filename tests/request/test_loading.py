"""A model that was loaded is made ready: measured once, whatever goes wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load

from mlx_lm_kvpersist.cache.geometry.precision import Allocation, KVPrecision, PrecisionRequest
from mlx_lm_kvpersist.cache.measuring import allocation
from mlx_lm_kvpersist.cache.measuring.persisted_allocation import known_allocation, put_allocation
from mlx_lm_kvpersist.host.patching.patch import PatchSet
from mlx_lm_kvpersist.host.patching.patches import PATCHES
from mlx_lm_kvpersist.request import loading
from mlx_lm_kvpersist.request.model import LoadedModel
from mlx_lm_kvpersist.store.block_store import BlockStore
from mlx_lm_kvpersist.store.budget import StoreLimits

SHORT, LONG = PrecisionRequest(measure_s=1e-6), PrecisionRequest(measure_s=600)


@pytest.fixture(scope="module")
def provider(tiny_model: Path) -> Any:
    loaded: Any = load(str(tiny_model))
    key = (str(tiny_model), None, None)
    return SimpleNamespace(model=loaded[0], tokenizer=loaded[1], model_key=key)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    made = BlockStore(tmp_path / "store", StoreLimits(1 << 30, 1 << 30, min_free_bytes=0))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [7 * i % 300 for i in range(128)]
    monkeypatch.setattr(loading, "sample_ids", lambda tokenizer: ids)


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    """Stock's attention cannot take keys and values of unlike precisions."""
    (patch,) = (patch for patch in PATCHES if patch.name == "attention")
    applied = PatchSet()
    applied.apply([patch])
    yield
    applied.undo()


def prepare(provider: Any, store: BlockStore, request: PrecisionRequest) -> LoadedModel:
    return loading.prepare(provider, store, request, "dequantize", 1 << 30, with_text=True)


def kept(store: BlockStore, loaded: LoadedModel) -> Allocation | None:
    return known_allocation(store.view.state, loaded.fingerprint, LONG)


@pytest.mark.parametrize(
    "error", [RuntimeError("[metal::malloc] no memory"), ZeroDivisionError(), MemoryError()]
)
def test_a_model_that_cannot_be_measured_is_kept_all_the_same(
    provider: Any,
    store: BlockStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    def fails(*_: Any) -> Allocation:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(loading, "measure", fails)
        loaded = prepare(provider, store, LONG)
    assert loaded.spec.layout == "k8rv4rb64,n256"
    assert "could not be measured" in caplog.text and repr(error) in caplog.text
    assert kept(store, loaded) is None, "it may succeed at the next start"
    assert kept(store, prepare(provider, store, LONG)) is not None


def test_what_was_cut_short_is_measured_again_only_with_more_time(
    provider: Any, store: BlockStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = prepare(provider, store, SHORT)
    assert first.spec.layout == "k8rv4rb64,n256"
    assert "were not enough to measure every layer alone" in caplog.text
    caplog.clear()
    assert prepare(provider, store, SHORT).spec.layout == first.spec.layout
    assert "measuring once" not in caplog.text
    second = prepare(provider, store, LONG)
    found = kept(store, second)
    assert found is not None and found.cut_at_s is None and found.divergence is not None
    caplog.clear()
    # What is complete stays, with less time too.
    for request in (SHORT, LONG):
        assert prepare(provider, store, request).spec.layout == second.spec.layout
    assert "measuring once" not in caplog.text and "not enough" not in caplog.text


def test_the_server_that_was_quicker_is_followed(
    provider: Any, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one server's choice replaced the other's, conversations would be lost."""
    theirs = Allocation({0: KVPrecision.of(8, 64), 1: KVPrecision.of(6, 64)})
    fingerprint = prepare(provider, store, LONG).fingerprint
    with store.index.database.transaction() as db:
        db.execute("DELETE FROM state")

    def meanwhile(*given: Any) -> Allocation:
        put_allocation(store.view.state, fingerprint, LONG, theirs)
        return allocation.measure(*given)

    monkeypatch.setattr(loading, "measure", meanwhile)
    assert prepare(provider, store, LONG).spec.layout == "8b64*1,6b64*1,n256"
    assert known_allocation(store.view.state, fingerprint, LONG) == theirs


def test_memory_is_given_back(
    provider: Any, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(True))
    monkeypatch.setattr(loading, "measure", lambda *_: 1 / 0)
    prepare(provider, store, LONG)
    assert cleared
