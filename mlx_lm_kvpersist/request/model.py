"""The model that the server has loaded: its caches, its text, and its speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from ..block import Root
from ..cache.blocks.cut_join import n_cached_tokens
from ..cache.geometry.precision import PrecisionChoice, layout_in_words
from ..cache.geometry.spec import ModelCacheSpec
from ..cache.live.attention import Strategy
from ..cache.live.policy import least_rows
from ..cache.measuring.prefill_memory import PrefillMemory
from ..host.hooks import PARKED, REPLY, PrefillLimits
from ..host.scheduling.pace import Pace
from ..match.text import TokenText
from ..ranks import ALONE, Ranks
from ..store.block_store import BlockStore
from ..store.records import DISK, RAM
from .checkpoint_saver import CheckpointSaver
from .saver import Saver
from .sequence import RunningSequence

MIN_RESTORE_BYTES = 4 << 20
"""Smaller restores are mostly overhead, so no rate is learned from them."""

_WEIGHT = 0.2
"""The weight of the newest measurement in a running average: a few requests settle it."""

_SUPPOSED_TOKEN_S = 1e-3
"""Seconds to compute a token, until a chunk has been measured."""


@dataclass
class Speed:
    """The speed of computing and restoring a model's prompts on this device.

    The generation thread learns; any thread may ask. Only working time counts: chunks without the
    steps of replies between them, reads in their own threads, joins without the pauses between
    their steps. So other requests do not change whether a prompt is restored. Until a speed is
    known, restoring counts as faster: on most devices it is, by far.

    `pace` learns from the chunks of prompts. `rates` has the bytes per second of each tier, as a
    running average: the rate of joining for RAM, which every restored byte needs, and the rate of
    reading for each lower tier. The dict is replaced, never changed: other threads iterate over it.
    """

    memory: PrefillMemory | None = None
    """None: prompts are computed as stock does."""
    pace: Pace = field(default_factory=Pace)
    rates: dict[str, float] = field(default_factory=dict)
    n_positions: float = math.inf
    """Positions for which the model has embeddings."""

    def limits(
        self,
        max_stall_s: float,
        stepped: Callable[[int, float | None], None] = lambda n_replies, seconds: None,
    ) -> PrefillLimits | None:
        """Return how prompts are computed while replies wait `max_stall_s` at most.

        `stepped` is called after steps of the replies.
        """
        if (memory := self.memory) is None:
            return None
        return PrefillLimits(
            max_stall_s,
            memory.most_tokens,
            memory.limit_bytes,
            self.pace,
            stepped,
            took=memory.learn,
            least_width=least_rows(),
            n_positions=self.n_positions,
        )

    def learn(self, tier: str, n_bytes: int, seconds: float) -> None:
        """Learn that `n_bytes` of a tier took `seconds`; few bytes are ignored."""
        if n_bytes >= MIN_RESTORE_BYTES and seconds > 0:
            measured = n_bytes / seconds
            average = self.rates.get(tier, measured)
            self.rates = {**self.rates, tier: average + _WEIGHT * (measured - average)}

    def compute_s(self, position: int, n_tokens: int) -> float:
        """Return the estimated seconds to compute `n_tokens` after the first `position` tokens."""
        seconds = self.pace.seconds(position, n_tokens)
        return n_tokens * _SUPPOSED_TOKEN_S if seconds is None else seconds

    def describe(self) -> dict[str, Any]:
        """Return the speeds as JSON values; the pace by position."""
        rates = {RAM: None, DISK: None, **self.rates}
        return {"prefill_tokens_per_s": self.pace.describe(), "restore_bytes_per_s": rates}


@dataclass(frozen=True)
class ModelOptions:
    """The options that decide how a model's prompts are computed and kept.

    `with_text`: whether its prompts may be stored as text. `max_prefill_bytes`: the memory
    of a chunk of a prompt, without model and caches. `ranks`: the processes that compute the model.
    """

    choice: PrecisionChoice
    attention: Strategy | Literal["auto"]
    max_prefill_bytes: int
    with_text: bool
    ranks: Ranks = ALONE


@dataclass(frozen=True)
class LoadedModel:
    """A model whose conversations are kept, called `name`; `ranks` compute it.

    `model` may be a weak proxy: the server drops a model before it loads the next, because two may
    not fit into memory.
    """

    model: Any
    tokenizer: Any
    spec: ModelCacheSpec
    fingerprint: str
    text: TokenText | None
    """None if prompts are matched by ids: text is not stored, or the tokenizer is not supported."""
    name: str = ""
    is_known: bool = True
    """Whether facts about its architecture ship with the package."""
    speed: Speed = field(default_factory=Speed, compare=False)
    draft: LoadedModel | None = field(default=None, compare=False)
    """The draft model, whose caches are kept below a root of its own."""
    ranks: Ranks = field(default=ALONE, compare=False)

    @property
    def precision(self) -> str:
        return layout_in_words(self.spec.layout)

    @cached_property
    def root(self) -> Root:
        """The root of this model's tree, without a namespace or a session."""
        return Root(
            self.fingerprint, self.spec.layout, with_text=self.text is not None, model=self.name
        )

    @cached_property
    def saver(self) -> Saver:
        if self.spec.any_prefix:
            return Saver(self.spec, self.text)
        return CheckpointSaver(self.spec, self.text, self.speed.pace)

    def save(
        self,
        sequence: RunningSequence,
        tokens: Sequence[int],
        caches: list[Any],
        cache_type: str,
        store: BlockStore,
    ) -> int:
        """Store the prefix that `caches` hold; return its number of tokens, or 0."""
        n_cached = n_cached_tokens(self.spec, caches)
        n_tokens = len(tokens) if n_cached is None else min(len(tokens), n_cached)
        if not self.spec.any_prefix and n_cached not in (None, n_tokens):
            return 0  # windows and states cannot be cut back to fewer tokens
        if n_tokens:
            cache_type = REPLY if cache_type == PARKED else cache_type
            self.saver.save(sequence, tokens[:n_tokens], caches, cache_type, store)
        return n_tokens

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def describe(self) -> dict[str, Any]:
        """Return what `mlx-lm-kvpersist spec --json` says, and the layers' attention."""
        plans = {name: asdict(plan) for name, plan in self.spec.plans.items()}
        model = {"model": self.name, "kept": True, "precision": self.precision}
        return {**model, **self.spec.describe(), "attention": plans}
