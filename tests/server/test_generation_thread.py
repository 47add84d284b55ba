"""Behaviour that no reply shows: shared batches, and the release of a model's weights."""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load

from mlx_lm_kvpersist.cache.live.caches import BatchQuantizedKVCache
from mlx_lm_kvpersist.host import manager
from mlx_lm_kvpersist.host.patching.patches import PATCH_SET, PATCHES
from mlx_lm_kvpersist.host.patching.probes import ARGS
from mlx_lm_kvpersist.plugin import KVPersistPlugin
from tests.support import make_tiny_model, synthetic_text
from tests.support.zoo import make_zoo_model


@dataclass
class Patched:
    """The server's module with the plugin in it, and the options it was configured with."""

    server: ModuleType
    plugin: KVPersistPlugin
    args: argparse.Namespace


@pytest.fixture
def patched(tmp_path: Path) -> Iterator[Patched]:
    plugin = KVPersistPlugin()
    parser = argparse.ArgumentParser()
    plugin.add_options(parser)
    options = ["--kvpersist-dir", str(tmp_path / "store")]
    args = parser.parse_args(options, copy.copy(ARGS))
    plugin.configure(args)
    made = manager.PluginManager()
    made.register(plugin)
    PATCH_SET.apply(PATCHES)
    try:
        with manager.using(made):
            yield Patched(importlib.import_module("mlx_lm.server"), plugin, args)
    finally:
        PATCH_SET.undo()
        plugin.shutdown()


def test_prompts_and_replies_of_conversations_share_a_batch(
    patched: Patched, tiny_model: Path
) -> None:
    """Two prompts of different length are computed together, and their replies run together."""
    provider = patched.server.ModelProvider(patched.args)
    model, tokenizer = provider.load(str(tiny_model))
    assert provider.is_batchable
    prompts = [tokenizer.encode(synthetic_text(n, seed=n)) for n in (90, 200)]
    alone = [generate(patched, model, [prompt])[0][0] for prompt in prompts]
    together, rows, n_replies, kinds = generate(patched, model, prompts)
    assert together == alone
    assert (rows, max(n_replies)) == ({2}, 2)
    assert n_replies.count(2) >= 5
    assert kinds == {BatchQuantizedKVCache}


def test_model_that_reads_padding_computes_prompts_one_by_one(
    patched: Patched, tmp_path: Path
) -> None:
    """Only the replies share a batch."""
    provider = patched.server.ModelProvider(patched.args)
    model, tokenizer = provider.load(str(make_zoo_model(tmp_path / "mamba", "mamba")))
    assert provider.is_batchable
    prompts = [tokenizer.encode(synthetic_text(n, seed=n)) for n in (20, 60)]
    alone = [generate(patched, model, [prompt])[0][0] for prompt in prompts]
    together, rows, n_replies, _ = generate(patched, model, prompts)
    assert together == alone
    assert (rows, max(n_replies)) == ({1}, 2)


def test_model_with_wrong_batched_replies_is_not_batched(patched: Patched, tmp_path: Path) -> None:
    provider = patched.server.ModelProvider(patched.args)
    model, _ = provider.load(str(make_zoo_model(tmp_path / "bigcode", "gpt_bigcode")))
    assert all(hasattr(cache, "merge") for cache in model.make_cache())  # stock would batch it
    assert not provider.is_batchable


def generate(
    patched: Patched, model: Any, prompts: list[list[int]]
) -> tuple[list[list[int]], set[int], list[int], set[type]]:
    """Return the replies, the rows of prefill steps, the replies of each step, and cache types."""
    stream = mx.default_stream(mx.default_device())
    generator = patched.server.BatchGenerator(model, stream=stream)
    rows: set[int] = set()

    def computed(ids: Any, cache: Any) -> Any:
        rows.add(ids.shape[0])
        return model(ids, cache=cache)

    uids = generator.insert(prompts, max_tokens=[8] * len(prompts))
    generator.prefills._model = computed
    replies: dict[int, list[int]] = {uid: [] for uid in uids}
    n_replies, kinds = [0], set()
    n_open = len(prompts)
    while n_open:
        _, responses = generator.next()
        batch = generator.replies
        n_replies.append(len(responses))
        kinds |= {type(cache) for cache in batch.prompt_cache}
        for response in responses:
            replies[response.uid].append(response.token)
            n_open -= response.finish_reason is not None
    generator.close()
    return [replies[uid] for uid in uids], rows, n_replies, kinds


def test_weights_are_freed_before_the_next_model_is_loaded(
    patched: Patched, tiny_model: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models do not always fit into memory: the plugin must not keep the first."""
    other = make_tiny_model(models_dir / "second-model", seed=1)
    loaded: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watched(path: str, *args: Any, **kwargs: Any) -> Any:
        alive.append(sum(reference() is not None for reference in loaded))
        made = load(path, *args, **kwargs)
        loaded.append(weakref.ref(made[0]))
        return made

    monkeypatch.setattr(patched.server, "load", watched)
    provider = patched.server.ModelProvider(patched.args)
    gc.collect()
    gc.disable()  # a reference cycle must not keep the model either
    # Stock collects garbage before it loads a model; reference counts alone must be enough.
    monkeypatch.setattr(gc, "collect", lambda *args: 0)
    try:
        for path in (tiny_model, other, tiny_model):
            provider.load(str(path))
            assert provider.is_batchable
            caches = provider.model.make_cache()
            provider.model(mx.array([[1, 2, 3]]), cache=caches)
            mx.eval([cache.state for cache in caches])
            del caches
    finally:
        gc.enable()
    assert alive == [0, 0, 0]
    assert patched.plugin._serving is not None
    assert patched.plugin._serving.model.name == str(tiny_model)
