"""A loaded model makes the plugin's caches; if the plugin fails, loading the model fails."""

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
    """A model with three layers and without its own caches."""

    layers = (None, None, None)


class ModelWithCaches(Model):
    def make_cache(self) -> list[str]:
        return ["own", "caches", "three"]


class Batchable:
    def merge(self, caches: Any) -> None: ...


class CachesPlugin:
    """A plugin that makes three of the given caches, raises the given error, or ignores models."""

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
    """A provider with fake models instead of files."""

    def load(path: Any, *args: Any, return_config: bool = False, **kwargs: Any) -> Any:
        model = ModelWithCaches() if path == "own" else Model()
        tokenizer = SimpleNamespace(chat_template=None, vocab_size=1)
        return (model, tokenizer, {}) if return_config else (model, tokenizer)

    monkeypatch.setattr(patched_server, "load", load)
    return patched_server.ModelProvider(ARGS)


def test_without_a_plugins_answer_the_model_is_not_changed(provider: Any) -> None:
    with plugged(CachesPlugin(None)) as _:
        provider.load("plain")
    assert "make_cache" not in vars(provider.model)
    assert provider.is_batchable


def test_caches_come_from_the_plugin(patched_server: ModuleType, provider: Any) -> None:
    with plugged(CachesPlugin(object())):
        provider.load("plain")
        assert not provider.is_batchable
        provider.load("own")
        assert not provider.is_batchable
    with plugged(caches_plugin := CachesPlugin(Batchable())):
        provider.load("plain")
        assert provider.is_batchable
        assert [type(c) for c in patched_server.make_prompt_cache(provider.model)] == [
            Batchable
        ] * 3
        assert caches_plugin.providers == [provider.model]
        provider._load("plain", draft_model_path="draft")
        assert not provider.is_batchable


def test_plugin_can_disable_batching_and_runs_while_the_model_loads(provider: Any) -> None:
    was_loading = []

    class Unbatched(CachesPlugin):
        batches = False

        def make(self) -> Any:
            was_loading.append(provider.is_loading)
            return super().make()

    with plugged(Unbatched(Batchable())):
        provider.load("plain")
    assert not provider.is_batchable
    assert was_loading == [True] and not provider.is_loading
    with plugged(CachesPlugin(RuntimeError("no"))), pytest.raises(RuntimeError):
        provider.load("own")
    assert not provider.is_loading


def test_number_of_logits_is_read_again_for_each_model(provider: Any) -> None:
    with plugged(CachesPlugin(None)):
        for n_ids in (7, 9):
            provider.load(f"of {n_ids}")
            provider.model = lambda token, n_ids=n_ids: mx.zeros((1, 1, n_ids))
            assert provider.n_logits == n_ids


@pytest.mark.parametrize("second_answer", [None, RuntimeError("later")])
@pytest.mark.parametrize(("path", "expected"), [("own", ["own", "caches", "three"]), ("plain", 3)])
def test_model_makes_its_own_caches_if_the_plugin_later_makes_none(
    provider: Any, second_answer: Any, path: str, expected: Any
) -> None:
    with plugged(CachesPlugin(Batchable(), second_answer)):
        provider.load(path)
        caches = provider.model.make_cache()
    assert caches == expected or [type(cache) for cache in caches] == [KVCache] * expected


@pytest.mark.parametrize("error", [RuntimeError("no such store"), KeyError("x")])
def test_plugin_failure_fails_the_load_and_the_next_load_tries_again(
    provider: Any, error: Exception
) -> None:
    for _ in range(2):
        with plugged(CachesPlugin(error)), pytest.raises(type(error)):
            provider.load("plain")
        assert provider.model is None and provider.model_key is None
        # Only a failure of the default model stops the server.
        assert provider.fatal_error is None
    with plugged(CachesPlugin(Batchable())):
        provider.load("plain")
    assert provider.is_batchable


def test_the_server_is_ready_when_its_model_is_loaded(provider: Any) -> None:
    error = RuntimeError("no such store")
    with plugged(CachesPlugin(error)), pytest.raises(RuntimeError) as raised:
        provider.load_default()
    assert raised.value is error
    assert not provider.is_ready
    with plugged(CachesPlugin(None)):
        provider.load_default()
    assert provider.is_ready


def test_every_name_of_the_default_model_loads_this_model(
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
    with plugged(CachesPlugin(None)):
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


def test_error_names_a_default_model_that_cannot_be_loaded(
    provider: Any, patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError("no model\nat all")

    monkeypatch.setattr(patched_server, "load", load)
    expected = r"--model probe cannot be loaded \(FileNotFoundError: no model\); expected a folder"
    with plugged(CachesPlugin(None)), pytest.raises(ConfigError, match=expected):
        provider.load_default()
    assert not provider.is_ready


def test_a_model_is_freed_without_the_garbage_collector(provider: Any) -> None:
    with plugged(caches_plugin := CachesPlugin(Batchable())):
        provider.load("plain")
    model = weakref.ref(provider.model)
    caches_plugin.providers.clear()
    gc.disable()
    try:
        provider.model = None
        assert model() is None
    finally:
        gc.enable()
