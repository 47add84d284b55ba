"""The check at startup: a tiny model goes through a 4-bit batch, the store, and back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import llama

from ..cache.batch import BatchQuantizedKVCache
from ..cache.spec import ModelCacheSpec
from ..errors import SelfTestFailed
from ..host.prompt import Prompt
from ..store.block_store import BlockStore, StoreLimits
from .insert import keep
from .lookup import look_up
from .model import LoadedModel
from .state import Kind, RequestState

_N_NEW = 4
_PROMPTS = ([i * 7 % 61 + 2 for i in range(300)], [i * 5 % 53 + 3 for i in range(41)])
_CONTINUATION = [9, 8, 7, 6, 5]


def check_round_trip() -> None:
    """Raise SelfTestFailed unless batching, storing and restoring give what recomputing gives."""
    model = tiny_model()
    spec = ModelCacheSpec.probe(model)
    model.make_cache = spec.make_cache
    loaded = LoadedModel(model, None, spec, "selftest", None)
    with tempfile.TemporaryDirectory() as folder:
        store = BlockStore(Path(folder), StoreLimits(1 << 30, 1 << 30))
        try:
            _check(loaded, store)
        finally:
            store.close()


def _check(loaded: LoadedModel, store: BlockStore) -> None:
    batch = _generate(loaded, [list(prompt) for prompt in _PROMPTS], [None, None])
    for prompt, (tokens, caches) in zip(_PROMPTS, batch, strict=True):
        alone = _generate(loaded, [list(prompt)], [None])[0][0]
        if tokens != alone:
            raise SelfTestFailed("a batched sequence gave other tokens than the same one alone")
        state = RequestState(root=loaded.root(), n_prompt=len(prompt))
        keep(state, tokens, caches, store, loaded)
    store.drain()
    store.pool.clear()
    for tokens, _ in batch:
        ids = [*tokens, *_CONTINUATION]
        state = RequestState(root=loaded.root())
        look_up(state, Prompt(ids, [ids], ["user"]), store, loaded)
        if state.outcome is None or state.outcome.kind is not Kind.EXTEND or not state.restored:
            raise SelfTestFailed(f"a stored sequence was not found again: {state.outcome}")
        caches, n_tokens = state.restored
        if n_tokens != len(tokens):
            raise SelfTestFailed(f"{n_tokens} of {len(tokens)} stored tokens were restored")
        restored = _generate(loaded, [ids[n_tokens:]], [caches])[0][0]
        recomputed = _generate(loaded, [ids], [None])[0][0]
        if restored != recomputed[n_tokens:]:
            raise SelfTestFailed("a restored sequence goes on differently than a recomputed one")


def _generate(
    loaded: LoadedModel, prompts: list[list[int]], caches: list[Any]
) -> list[tuple[list[int], list[Any]]]:
    """Run prompts in one batch; return, for each, all tokens fed and its caches."""
    generator = BatchGenerator(loaded.model, stream=mx.default_stream(mx.default_device()))
    uids = generator.insert(prompts, max_tokens=[_N_NEW] * len(prompts), caches=caches)
    results: dict[int, tuple[list[int], list[Any]]] = {}
    while len(results) < len(prompts):
        _, responses = generator.next()
        live = generator._generation_batch.prompt_cache
        if live and not isinstance(live[0], BatchQuantizedKVCache):
            raise SelfTestFailed(f"the live batch is a {type(live[0]).__name__}, not in 4 bits")
        for response in responses:
            if response.finish_reason is not None:
                results[response.uid] = (list(response.all_tokens), response.prompt_cache)
    generator.close()
    return [results[uid] for uid in uids]


def tiny_model(seed: int = 7) -> Any:
    """Return a llama of two layers with random weights."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        rms_norm_eps=1e-5,
        vocab_size=64,
    )
    key = mx.random.key(seed)
    model = llama.Model(args)
    weights = []
    for name, value in tree_flatten(model.parameters()):
        key, sub = mx.random.split(key)
        weights.append((name, mx.random.normal(value.shape, key=sub) * 0.2 + ("norm" in name)))
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model
