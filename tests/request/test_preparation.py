"""What is found out of a loaded model while nobody asks: once, and nothing wrong is kept."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load

from mlx_lm_kvpersist.cache.geometry import probe
from mlx_lm_kvpersist.cache.geometry.fingerprint import model_fingerprint
from mlx_lm_kvpersist.cache.geometry.precision import PrecisionChoice
from mlx_lm_kvpersist.cache.steps import Steps
from mlx_lm_kvpersist.config import KV_BITS
from mlx_lm_kvpersist.errors import ModelNotSupported, SelfTestFailed
from mlx_lm_kvpersist.host.answers import REPLY
from mlx_lm_kvpersist.ranks import Ranks
from mlx_lm_kvpersist.request import loading
from mlx_lm_kvpersist.request.loading import Asked, Preparation
from mlx_lm_kvpersist.request.machine import Pressure
from mlx_lm_kvpersist.request.memory import Memory
from mlx_lm_kvpersist.request.model import LoadedModel
from mlx_lm_kvpersist.request.serving import RequestState, RunningSequence, Serving
from mlx_lm_kvpersist.store.block_store import BlockStore
from tests.support import make_tiny_model
from tests.support.host import patched_attention

from .conftest import provider_of, store_in

K6V4 = Asked(KV_BITS["k6v4"], "auto", 1 << 30, with_text=True)
N_READY = 1
"""Steps of a model of which all is known: the one that says so."""


def reads_arrays(model: LoadedModel) -> bool:
    """Whether attention over quantized caches gets arrays."""
    return not any(hasattr(cache, "bits") for cache in model.spec.make_cache())


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return provider_of(tmp_path_factory.mktemp("model"), n_layers=2)


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    with patched_attention():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def opened(folder: Path) -> Iterator[Callable[[], BlockStore]]:
    """Open the store, as a server that starts does; what was opened before stays as it is."""
    made: list[BlockStore] = []

    def open_store() -> BlockStore:
        made.append(store_in(folder))
        return made[-1]

    yield open_store
    for one in made:
        one.close()


class Starts:
    """Prepares one model after the other, and counts what is done for it."""

    def __init__(self, provider: Any) -> None:
        self.provider, self.proofs, self.n_steps, self.joins = provider, 0, 0, True

    def begin(self, store: BlockStore, asked: Asked = K6V4) -> Preparation:
        return Preparation(self.provider, store, asked, self._prove)

    def _prove(self, choice: PrecisionChoice) -> Steps[bool]:
        yield
        self.proofs += 1
        return self.joins

    def finish(self, one: Preparation, store: BlockStore) -> int:
        """Do all steps; return how many."""
        n_steps = sum(1 for _ in one.steps())
        assert one.doing == ""
        store.drain()
        return n_steps


def test_a_second_start_finds_out_nothing(
    provider: Any, opened: Callable[[], BlockStore], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    starts, store = Starts(provider), opened()
    first = starts.begin(store)
    provisional = first.model
    assert first.doing.endswith("(1 of 4)") and "nothing is kept yet" in caplog.text
    assert first.model.fingerprint == model_fingerprint(Path(provider.model_key[0]), None)
    assert starts.finish(first, store) > 10
    found = first.model
    assert found.spec.plans["0"].can_take_packed and found.spec == provisional.spec
    assert reads_arrays(provisional) and not reads_arrays(found)
    again = starts.begin(opened())
    assert again.doing == "" and again.model.spec == found.spec
    assert again.model.spec.plans == found.spec.plans
    assert again.model.speed.memory == found.speed.memory
    assert (again.model.root, again.model.verdict) == (found.root, found.verdict)
    assert starts.finish(again, store) == 0 and starts.proofs == 1


def test_layers_that_fail_only_when_they_are_evaluated_are_remembered(
    provider: Any, opened: Callable[[], BlockStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's shapes alone tell another spec."""
    monkeypatch.setattr(
        probe, "_why_not", lambda model, spec, evaluate: "no such kernel" if evaluate else None
    )
    starts, store = Starts(provider), opened()
    first = starts.begin(store)
    assert first.model.spec.quantized
    starts.finish(first, store)
    assert [group.why for group in first.model.spec.groups] == ["no such kernel"]
    again = starts.begin(opened())
    assert again.doing == "" and again.model.spec == first.model.spec
    assert again.model.root == first.model.root


@pytest.mark.parametrize(
    ("changed", "n_proofs"),
    [("version", 2), ("device", 2), ("precision", 2), ("attention", 2), ("weights", 1)],
)
def test_what_something_else_was_found_for_is_found_anew(
    provider: Any,
    opened: Callable[[], BlockStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: str,
    n_proofs: int,
) -> None:
    starts, store, asked = Starts(provider), opened(), K6V4
    starts.finish(starts.begin(store), store)
    if changed == "version":
        monkeypatch.setattr(loading, "version", lambda name: "9.9.9")
    elif changed == "device":
        monkeypatch.setattr(loading, "device_key", lambda: "another")
    elif changed == "precision":
        asked = replace(asked, choice=KV_BITS["8"])
    elif changed == "attention":
        asked = replace(asked, attention="packed")
    else:
        other = make_tiny_model(tmp_path / "other", n_layers=2, seed=5)
        loaded: Any = load(str(other))
        starts.provider = SimpleNamespace(
            model=loaded[0], tokenizer=loaded[1], model_key=(str(other), None, None)
        )
    again = starts.begin(store, asked)
    assert again.doing
    starts.finish(again, store)
    assert starts.proofs == n_proofs
    assert starts.begin(store, asked).doing == ""


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: None,
        lambda value: 7,
        lambda value: {**value, "spec": []},
        lambda value: {**value, "plans": {}},
    ],
)
def test_a_damaged_value_is_found_out_again(
    provider: Any, opened: Callable[[], BlockStore], damage: Callable[[Any], Any]
) -> None:
    starts, store = Starts(provider), opened()
    first = starts.begin(store)
    starts.finish(first, store)
    state = store.index.state
    (key,) = [
        key
        for (key,) in store.index.ask("SELECT key FROM state")
        if key.startswith(loading._MODEL_KEY)
    ]
    state.put(key, damage(state.get(key)))
    again = starts.begin(store)
    assert again.doing
    assert starts.finish(again, store) > 0 and again.model.spec == first.model.spec
    assert again.model.spec.plans["0"].can_take_packed


def test_an_end_in_the_middle_leaves_nothing_that_counts(
    provider: Any, opened: Callable[[], BlockStore]
) -> None:
    """After any number of steps: a later start begins anew, and finds the same."""
    starts, store = Starts(provider), opened()
    for n_steps in (1, 3, 8, 15):
        steps = starts.begin(store).steps()
        for _ in range(n_steps):
            next(steps)
        steps.close()
        store.drain()
        later = opened()
        again = starts.begin(later)
        assert again.doing and reads_arrays(again.model)
    starts.finish(again, later)
    assert starts.begin(store).doing == "" and starts.proofs == 1


def test_two_servers_of_one_folder_do_not_find_out_twice(
    provider: Any, opened: Callable[[], BlockStore]
) -> None:
    starts, store, theirs = Starts(provider), opened(), opened()
    ours, other = starts.begin(store), starts.begin(theirs)
    assert ours.doing and other.doing
    n_steps = starts.finish(other, theirs)
    assert starts.finish(ours, store) <= N_READY < n_steps and starts.proofs == 1
    assert ours.model.spec.plans == other.model.spec.plans


def test_a_model_that_changes_on_disk_is_another_at_the_next_load(
    opened: Callable[[], BlockStore], tmp_path: Path
) -> None:
    """Although sizes and times stay; and it is the first again when it has its old content."""
    starts, store = Starts(provider_of(tmp_path / "model", n_layers=2)), opened()
    one = starts.begin(store)
    starts.finish(one, store)
    weights = next((tmp_path / "model").glob("*.safetensors"))
    stat, content = weights.stat(), weights.read_bytes()

    def begin(content: bytes) -> Preparation:
        weights.write_bytes(content)
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return starts.begin(store)

    other = begin(content[:-1] + bytes([content[-1] ^ 1]))
    assert other.doing and other.model.fingerprint != one.model.fingerprint
    again = begin(content)
    assert again.doing == "" and again.model.fingerprint == one.model.fingerprint
    keys = [key for (key,) in store.index.ask("SELECT key FROM state")]
    assert keys and not [key for key in keys if str(weights) in key]


def test_ranks_with_other_files_of_the_model_are_refused(
    provider: Any, opened: Callable[[], BlockStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: dict[str, object] = {}

    class RankOfTwo(Ranks):
        def same(self, value: object, what: str) -> bool:
            compared[what] = value
            return False

    monkeypatch.setattr(loading, "ranks", lambda: RankOfTwo(2, 0))
    with pytest.raises(ModelNotSupported, match="different files of the model"):
        Starts(provider).begin(opened())
    own = model_fingerprint(Path(provider.model_key[0]), None)
    assert compared == {"the model's files": own}


@pytest.mark.parametrize("joins", [True, False])
def test_prompts_stay_apart_where_that_is_right_alone(
    provider: Any, opened: Callable[[], BlockStore], *, joins: bool
) -> None:
    starts, store = Starts(provider), opened()
    starts.joins = joins
    first = starts.begin(store)
    starts.finish(first, store)
    assert first.model.spec.joins is joins
    assert starts.begin(store).model.spec.joins is joins and starts.proofs == 1


def test_what_fails_is_told_and_not_kept(
    provider: Any, opened: Callable[[], BlockStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, store = Starts(provider), opened()

    def prove(choice: PrecisionChoice) -> Steps[bool]:
        yield
        raise SelfTestFailed("other logits")

    with pytest.raises(SelfTestFailed):
        list(Preparation(provider, store, K6V4, prove).steps())
    with monkeypatch.context() as broken:
        broken.setattr("mlx_lm_kvpersist.cache.blocks.canary.canary_difference", lambda *_: 1.0)
        with pytest.raises(ModelNotSupported):
            list(starts.begin(store).steps())
    store.drain()
    again = starts.begin(store)
    assert again.doing
    starts.finish(again, store)


@pytest.mark.parametrize("batches", [True, False])
def test_what_was_computed_meanwhile_is_kept_if_it_is_right(
    provider: Any, opened: Callable[[], BlockStore], batches: bool
) -> None:
    starts, store = Starts(provider), opened()
    one = starts.begin(store)
    memory = Memory(1 << 30, 0, store, Pressure())
    serving = Serving(store, one.model, lambda *_: None, False, 0.1, memory, one)
    ids = [7 * i % 300 for i in range(300)]
    caches = one.model.spec.make_cache()
    for start in range(0, 300, 256):
        mx.eval(provider.model(mx.array([ids[start : start + 256]]), cache=caches))
    state = RequestState(namespace="theirs")
    serving.save(RunningSequence(state, 290), ids, caches, REPLY)
    starts.finish(one, store)
    assert one.model.spec.batches
    one.model = replace(one.model, spec=replace(one.model.spec, batches=batches))
    assert serving.doing == ""
    list(serving.prepared())
    store.drain()
    assert store.index.totals().n_blocks == (2 if batches else 0)
    if state.root is not None:
        assert state.root == replace(one.model.root, namespace="theirs")


@pytest.mark.parametrize(("is_known", "n_saved"), [(True, 3), (False, 0)])
def test_what_is_held_when_its_model_goes_is_saved_or_told(
    provider: Any,
    opened: Callable[[], BlockStore],
    caplog: pytest.LogCaptureFixture,
    is_known: bool,
    n_saved: int,
) -> None:
    starts, store = Starts(provider), opened()
    one = starts.begin(store)
    memory = Memory(1 << 30, 0, store, Pressure())
    serving = Serving(store, one.model, lambda *_: None, False, 0.1, memory, one)

    def save(token: int) -> None:
        caches = one.model.spec.make_cache()
        mx.eval(provider.model(mx.array([[token] * 256]), cache=caches))
        sequence = RunningSequence(RequestState(), 200)
        serving.save(sequence, [token] * 256, caches, REPLY)

    for token in range(5, 8):
        save(token)
    assert memory.held_bytes > 0
    if is_known:
        starts.finish(one, store)
        next(serving.prepared())
    serving.end(saves=True)
    assert memory.held_bytes == 0
    if not is_known:
        save(8)
        assert memory.held_bytes == 0 and not serving._held
    store.drain()
    assert store.index.totals().n_blocks == n_saved
    assert ("3 turns that were held are not kept" in caplog.text) != is_known


def test_what_is_held_is_bounded(provider: Any, opened: Callable[[], BlockStore]) -> None:
    starts, store = Starts(provider), opened()
    one = starts.begin(store)
    memory = Memory(1 << 30, 0, store, Pressure())
    serving = Serving(store, one.model, lambda *_: None, False, 0.1, memory, one)
    store.limits = replace(store.limits, max_ram_bytes=1 << 10)
    caches = one.model.spec.make_cache()
    mx.eval(provider.model(mx.array([[5] * 256]), cache=caches))
    serving.save(RunningSequence(RequestState(), 200), [5] * 256, caches, REPLY)
    starts.finish(one, store)
    list(serving.prepared())
    store.drain()
    assert store.index.totals().n_blocks == 0
