from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load

from mlx_lm_kvpersist.cache.spec import ModelCacheSpec
from mlx_lm_kvpersist.host.prompt import Prompt
from mlx_lm_kvpersist.match.keys import Root
from mlx_lm_kvpersist.match.text import TokenText
from mlx_lm_kvpersist.request.insert import keep
from mlx_lm_kvpersist.request.lookup import look_up
from mlx_lm_kvpersist.request.model import LoadedModel
from mlx_lm_kvpersist.request.state import Outcome, RequestState
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from mlx_lm_kvpersist.synthetic import make_tiny_model

KINDS = ["byte-level", "byte-level-bos", "sentencepiece", "sentencepiece-legacy"]


@pytest.fixture(scope="session", params=KINDS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny model with each kind of tokenizer."""
    kind = request.param
    path: Path = make_tiny_model(
        tmp_path_factory.mktemp(kind),
        tokenizer=kind.removesuffix("-bos"),
        bos=kind != "byte-level",
        whole_characters=False,
    )
    model, tokenizer = load(str(path))
    return LoadedModel(
        model, tokenizer, ModelCacheSpec.probe(model), "fingerprint", TokenText.of(tokenizer)
    )


@dataclass
class Conversations:
    """A store with a model in front, driven as the server drives it, without the server."""

    loaded: LoadedModel
    store: BlockStore

    @property
    def root(self) -> Root:
        return self.loaded.root()

    def forward(self, ids: list[int], caches: list[Any]) -> mx.array:
        """Feed ids; return the logits of the last one, [vocab]."""
        logits: mx.array = self.loaded.model(mx.array([ids]), cache=caches)[0, -1]
        mx.eval(logits, [cache.state for cache in caches])
        return logits

    def remember(self, ids: list[int], n_prompt: int, session: str | None = None) -> None:
        """Take a turn as the server does: look up, prefill, keep, reply, keep."""
        state = RequestState(session=session, root=self.root, n_prompt=n_prompt)
        prompt = ids[:n_prompt]
        fed = look_up(state, Prompt(prompt, [prompt], ["user"]), self.store, self.loaded).ids
        assert fed == prompt
        caches, n_reused = state.restored or (self.loaded.spec.make_cache(), 0)
        if len(prompt) - 1 > n_reused:
            self.forward(prompt[n_reused:-1], caches)
            keep(state, prompt[:-1], caches, self.store, self.loaded)
            n_reused = len(prompt) - 1
        self.forward(ids[n_reused:], caches)
        keep(state, ids, caches, self.store, self.loaded)

    def forget_hot_blocks(self) -> None:
        self.store.drain()
        self.store.pool.clear()

    def ask(self, ids: list[int]) -> tuple[list[int], list[Any], Outcome]:
        """Look a prompt up; return the ids to feed, the restored caches and the outcome."""
        state = RequestState(root=self.root)
        prompt = look_up(state, Prompt(ids, [ids], ["user"]), self.store, self.loaded)
        assert state.outcome is not None
        caches, n_reused = state.restored or (self.loaded.spec.make_cache(), 0)
        assert n_reused == state.outcome.n_reused
        assert all(cache.size() == n_reused for cache in caches)
        return prompt.ids, caches, state.outcome


@pytest.fixture
def talk(loaded: LoadedModel, tmp_path: Path) -> Iterator[Conversations]:
    store = BlockStore(tmp_path / "store", StoreLimits(1 << 30, 1 << 30))
    yield Conversations(loaded, store)
    store.close()
