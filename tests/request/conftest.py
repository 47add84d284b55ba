from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load

from mlx_lm_kvpersist.block import Root
from mlx_lm_kvpersist.cache.geometry.precision import PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import probe_model
from mlx_lm_kvpersist.cache.live.packed import GRID
from mlx_lm_kvpersist.host.hooks import REPLY, Prompt
from mlx_lm_kvpersist.match import TokenText
from mlx_lm_kvpersist.ranks import ALONE, Ranks
from mlx_lm_kvpersist.request.lookup import Lookup, Reuse
from mlx_lm_kvpersist.request.model import LoadedModel, ModelOptions, load_model
from mlx_lm_kvpersist.request.outcome import Outcome
from mlx_lm_kvpersist.request.saver import RunningSequence
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from tests.support.synthetic import make_tiny_model

KINDS = [
    *("byte-level", "sentencepiece"),
    pytest.param("byte-level-bos", marks=pytest.mark.slow),
    pytest.param("sentencepiece-legacy", marks=pytest.mark.slow),
]
"""Two kinds of tokenizer by default, and two more in slow tests."""


@pytest.fixture(autouse=True)
def memory_limit() -> Iterator[None]:
    """Restore MLX's memory limit, which `Memory` changes."""
    before = mx.set_memory_limit(1 << 40)
    mx.set_memory_limit(before)
    yield
    mx.set_memory_limit(before)


@pytest.fixture(scope="session", params=KINDS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny model with each kind of tokenizer."""
    kind = request.param
    path: Path = make_tiny_model(
        tmp_path_factory.mktemp(kind),
        tokenizer=kind.removesuffix("-bos"),
        bos=kind != "byte-level",
        n_heads=2,
        n_kv_heads=1,
        whole_characters=False,
    )
    model, tokenizer = load(str(path))
    return LoadedModel(model, tokenizer, probe_model(model), "fingerprint", TokenText.of(tokenizer))


def provider_of(folder: Path, n_layers: int) -> Any:
    """Return a provider that has loaded a tiny model."""
    path = make_tiny_model(folder, n_layers=n_layers)
    model, tokenizer = load(str(path))
    return SimpleNamespace(model=model, tokenizer=tokenizer, model_key=(str(path), None, None))


def store_in(folder: Path) -> BlockStore:
    """Return a store whose limits are never reached."""
    return BlockStore(folder, StoreLimits(1 << 30, 1 << 30, min_free_bytes=0))


def loaded_in(provider: Any, choice: PrecisionChoice, ranks: Ranks = ALONE) -> LoadedModel:
    """Return a provider's model, loaded as in the server, in a precision."""
    return load_model(provider, ModelOptions(choice, "auto", 1 << 30, True, ranks))


@dataclass
class Conversations:
    """A model and a store, used as the server uses them, but without the server.

    computed: the caches of turns that reused nothing, by their ids; tests of the model share them.
    """

    loaded: LoadedModel
    store: BlockStore
    computed: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)

    @property
    def root(self) -> Root:
        return self.loaded.root

    def forward(self, ids: list[int], caches: list[Any]) -> mx.array:
        """Feed ids, block after block; return the logits of the last id, [vocab]."""
        start, n_cached = 0, caches[0].offset
        while start < len(ids):
            stop = start + GRID - (n_cached + start) % GRID
            logits: mx.array = self.loaded.model(mx.array([ids[start:stop]]), cache=caches)[0, -1]
            mx.eval(logits, [cache.state for cache in caches])
            start = stop
        return logits

    def remember(self, ids: list[int], n_prompt: int, session: str | None = None) -> None:
        """Run a turn as the server does: look up, prefill, save, reply, save."""
        prompt = ids[:n_prompt]
        reuse = self.look_up(prompt)
        assert list(reuse.prompt.ids) == prompt
        caches, n_reused = reuse.caches or self.loaded.spec.make_cache(), reuse.outcome.n_reused
        sequence = RunningSequence(self.root, n_prompt, n_reused, reuse.chain, session=session)
        is_new = n_reused == 0
        if len(prompt) - 1 > n_reused:
            caches = self._continued(prompt[:-1], n_reused, caches, is_new)
            self.loaded.save(sequence, prompt[:-1], caches, "user", self.store)
            n_reused = len(prompt) - 1
        caches = self._continued(ids, n_reused, caches, is_new)
        cache_type = REPLY if len(ids) > n_prompt else "user"
        self.loaded.save(sequence, ids, caches, cache_type, self.store)

    def _continued(
        self, ids: list[int], n_cached: int, caches: list[Any], is_new: bool
    ) -> list[Any]:
        """Return caches of `ids`; the caches of a new turn are computed once for all tests."""
        if not is_new or tuple(ids) not in self.computed:
            self.forward(ids[n_cached:], caches)
            if not is_new:
                return caches
            self.computed[tuple(ids)] = copy.deepcopy(caches)
        return copy.deepcopy(self.computed[tuple(ids)])

    def look_up(self, ids: list[int]) -> Reuse:
        prompt = Prompt(ids, [ids], ["user"])
        return Lookup(prompt, self.root, self.store, self.loaded).restore()

    def forget_hot_blocks(self) -> None:
        self.store.drain()
        self.store.pool.clear()

    def ask(self, ids: list[int]) -> tuple[list[int], list[Any], Outcome]:
        """Look a prompt up; return the ids to feed, the restored caches and the outcome."""
        reuse = self.look_up(ids)
        caches = reuse.caches or self.loaded.spec.make_cache()
        assert all(cache.size() == reuse.outcome.n_reused for cache in caches)
        return list(reuse.prompt.ids), caches, reuse.outcome


@pytest.fixture(scope="module")
def computed(loaded: LoadedModel) -> dict[tuple[int, ...], list[Any]]:
    """The caches of turns that reused nothing, shared by the tests of a module."""
    return {}


@pytest.fixture
def talk(
    loaded: LoadedModel, computed: dict[tuple[int, ...], list[Any]], tmp_path: Path
) -> Iterator[Conversations]:
    store = BlockStore(tmp_path / "store", StoreLimits(1 << 30, 1 << 30))
    yield Conversations(loaded, store, computed)
    store.close()
