"""A model whose conversations go through the plugin's store, driven as the plugin drives it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec
from mlx_lm_kvpersist.host.hooks import REPLY, Prompt
from mlx_lm_kvpersist.request.lookup import Lookup, Reuse
from mlx_lm_kvpersist.request.model import LoadedModel
from mlx_lm_kvpersist.request.outcome import Outcome
from mlx_lm_kvpersist.request.saver import RunningSequence
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits

from .drive import Reply, Row, alone

_LIMITS = StoreLimits(1 << 30, 1 << 30)


@dataclass
class StoredModel:
    """A model with a store. `restart` closes the store and opens it as a new process would."""

    model: Any
    spec: ModelCacheSpec
    folder: Path
    limits: StoreLimits = _LIMITS
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Without a tokenizer, prompts are matched by their ids.
        self.loaded = LoadedModel(self.model, None, self.spec, "zoo", None)
        self.store = BlockStore(self.folder, self.limits)

    def restart(self) -> None:
        self.store.close()
        self.store = BlockStore(self.folder, self.limits)

    def close(self) -> None:
        self.store.close()

    def row(
        self, segments: list[list[int]], n_new: int, reply: list[int] | None, session: str = "zoo"
    ) -> Row:
        """Look a prompt up. The returned row saves its new tokens."""
        ids = [token for segment in segments for token in segment]
        types = ["system", "user"][: len(segments)]
        reuse = restored(Prompt(ids, segments, types), self.loaded, self.store)
        assert list(reuse.prompt.ids) == ids
        self.outcomes.append(reuse.outcome)
        n_cached = reuse.outcome.n_reused
        sequence = RunningSequence(
            self.loaded.root, len(ids), n_cached, reuse.chain, session=session
        )
        keeper = partial(self._insert, sequence)
        caches = reuse.caches or self.spec.make_cache()
        return Row(segments, caches, n_cached, n_new, reply, keeper)

    def _insert(self, sequence: RunningSequence, tokens: list[int], caches: list[Any]) -> None:
        cache_type = REPLY if len(tokens) > sequence.n_prompt else "user"
        self.loaded.save(sequence, tokens, caches, cache_type, self.store)

    def answer(
        self, segments: list[list[int]], n_new: int, reply: list[int] | None = None
    ) -> Reply:
        return alone(self.model, self.row(segments, n_new, reply), self.spec.batches)


def restored(prompt: Prompt, loaded: LoadedModel, store: BlockStore) -> Reuse:
    return Lookup(prompt, loaded.root, store, loaded).restore()
