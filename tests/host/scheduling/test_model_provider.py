"""A loaded model makes the plugins' caches, and a failure is never a silent stock server."""

from __future__ import annotations

import gc
import weakref
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_lm_kvpersist.errors import ConfigError
from mlx_lm_kvpersist.host.hooks import ModelSupport, hookimpl
from mlx_lm_kvpersist.host.patching.probes import ARGS
from mlx_lm_kvpersist.host.scheduling.model_provider import own_names
from tests.support.host import plugged


class Model:
    """The part of a model that makes caches."""

    layers = (None, None, None)


class ModelWithCaches(Model):
    def make_cache(self) -> list[str]:
        return ["own", "caches", "three"]


class Batchable:
    def merge(self, caches: Any) -> None: ...


class Makes:
    """Answers with three of these caches; raises an exception, and gives no answer for None."""

    batches = True

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.providers: list[Any] = []

    @hookimpl
    def model_loaded(self, provider: Any) -> ModelSupport | None:
        self.providers.append(provider.model)
        if isinstance(self.answers[0], Exception):
            raise self.answers[0]
        if self.answers[0] is None:
            return None
        return ModelSupport(self.make, batches=self.batches)

    def make(self) -> Any:
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer and [answer] * 3


@pytest.fixture
def provider(patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A provider whose models are made, not read."""

    def load(path: Any, *args: Any, return_config: bool = False, **kwargs: Any) -> Any:
        model = ModelWithCaches() if path == "own" else Model()
        tokenizer = SimpleNamespace(chat_template=None, vocab_size=1)
        return (model, tokenizer, {}) if return_config else (model, tokenizer)

    monkeypatch.setattr(patched_server, "load", load)
    return patched_server.ModelProvider(ARGS)


def test_without_an_answer_the_model_is_left_alone(provider: Any) -> None:
    with plugged(Makes(None)) as _:
        provider.load("plain")
    assert "make_cache" not in vars(provider.model)
    assert provider.is_batchable


def test_caches_come_from_the_plugin(patched_server: ModuleType, provider: Any) -> None:
    with plugged(Makes(object())):
        provider.load("plain")
        assert not provider.is_batchable
        provider.load("own")
        assert not provider.is_batchable
    with plugged(makes := Makes(Batchable())):
        provider.load("plain")
        assert provider.is_batchable
        assert [type(c) for c in patched_server.make_prompt_cache(provider.model)] == [
            Batchable
        ] * 3
        assert makes.providers == [provider.model]
        provider._load("plain", draft_model_path="draft")
        assert not provider.is_batchable


def test_a_plugin_may_have_a_model_served_one_at_a_time(provider: Any) -> None:
    loading = []

    class Alone(Makes):
        batches = False

        def make(self) -> Any:
            loading.append(provider.is_loading)
            return super().make()

    with plugged(Alone(Batchable())):
        provider.load("plain")
    assert not provider.is_batchable
    assert loading == [True] and not provider.is_loading
    with plugged(Makes(RuntimeError("no"))), pytest.raises(RuntimeError):
        provider.load("own")
    assert not provider.is_loading


def test_each_model_has_its_own_number_of_ids(provider: Any) -> None:
    with plugged(Makes(None)):
        for n_ids in (7, 9):
            provider.load(f"of {n_ids}")
            provider.model = lambda token, n_ids=n_ids: mx.zeros((1, 1, n_ids))
            assert provider.n_logits == n_ids


@pytest.mark.parametrize("later", [None, RuntimeError("later")])
@pytest.mark.parametrize(("path", "expected"), [("own", ["own", "caches", "three"]), ("plain", 3)])
def test_later_a_silent_or_failing_plugin_leaves_the_models_own_way(
    provider: Any, later: Any, path: str, expected: Any
) -> None:
    with plugged(Makes(Batchable(), later)):
        provider.load(path)
        caches = provider.model.make_cache()
    assert caches == expected or [type(cache) for cache in caches] == [KVCache] * expected


@pytest.mark.parametrize("error", [RuntimeError("no such store"), KeyError("x")])
def test_a_failure_reaches_the_caller_and_the_next_request_tries_again(
    provider: Any, error: Exception
) -> None:
    for _ in range(2):
        with plugged(Makes(error)), pytest.raises(type(error)):
            provider.load("plain")
        assert provider.model is None and provider.model_key is None
        # A later model's failure is its client's; only the default model stops the server.
        assert provider.fatal_error is None
    with plugged(Makes(Batchable())):
        provider.load("plain")
    assert provider.is_batchable


def test_the_server_is_ready_when_its_model_is_loaded(provider: Any) -> None:
    error = RuntimeError("no such store")
    with plugged(Makes(error)), pytest.raises(RuntimeError) as raised:
        provider.load_default()
    assert raised.value is error
    assert not provider.is_ready
    with plugged(Makes(None)):
        provider.load_default()
    assert provider.is_ready


def test_every_name_of_the_own_model_is_one_model(
    provider: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--mlx-community--a--b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (link := tmp_path / "link").symlink_to(snapshot)
    args = Namespace(**{**vars(ARGS), "model": str(link), "served_name": "team"})
    args.adapter_path = "adapter"
    monkeypatch.setattr(provider, "cli_args", args)
    names = ["team", str(snapshot), str(link), "mlx-community/a--b"]
    assert own_names(args) == names
    provider._model_map["default_model"] = None
    with plugged(Makes(None)):
        provider.load_default()
        provider._model_map["default_model"] = str(link)
        provider._adapter_map["default_model"] = "adapter"
        provider.load("default_model")
        assert provider.model_key[:2] == (str(link), "adapter")
        for name in ("default_model", *names):
            provider.load(name)
            assert provider.model_key[:2] == (str(link), "adapter")
            provider.load(name, "other")
            assert provider.model_key[:2] == (str(link), "other")
    args.model = None
    assert own_names(args) == []


def test_a_default_model_that_stock_cannot_load_is_named(
    provider: Any, patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError("no model\nat all")

    monkeypatch.setattr(patched_server, "load", load)
    expected = r"--model probe cannot be loaded \(FileNotFoundError: no model\); expected a folder"
    with plugged(Makes(None)), pytest.raises(ConfigError, match=expected):
        provider.load_default()
    assert not provider.is_ready


def test_a_model_is_freed_without_the_garbage_collector(provider: Any) -> None:
    with plugged(makes := Makes(Batchable())):
        provider.load("plain")
    model = weakref.ref(provider.model)
    makes.providers.clear()
    gc.disable()
    try:
        provider.model = None
        assert model() is None
    finally:
        gc.enable()
