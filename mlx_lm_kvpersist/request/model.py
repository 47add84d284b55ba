"""The model that the server has loaded: its cache spec, the text of its tokens, and its speed.

The generation thread loads the model and saves sequences. Any thread may read.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import mlx.core as mx

from ..block import Root
from ..cache.blocks import n_cached_tokens
from ..cache.geometry.fingerprint import local_path, model_fingerprint
from ..cache.geometry.kinds import GroupKind, end_on_grid
from ..cache.geometry.precision import PrecisionChoice, layout_in_words
from ..cache.geometry.spec import ModelCacheSpec, architecture_of, position_limit, spec_of
from ..cache.live.attention import Strategy, least_rows
from ..cache.measuring.attention_check import plan_attention
from ..cache.measuring.prefill_memory import PrefillMemory
from ..errors import ModelNotSupported
from ..host.hooks import PARKED, REPLY, PrefillLimits
from ..host.scheduling.pace import Pace
from ..match import TokenText
from ..ranks import ALONE, Ranks
from ..store.block_store import BlockStore
from ..store.records import DISK, RAM
from ..units import show_bytes
from .saver import CheckpointSaver, RunningSequence, Saver

logger = logging.getLogger(__name__)

MIN_RESTORE_BYTES = 4 << 20
"""The time of a smaller restore is mostly overhead, so `Speed.learn` ignores it."""

_WEIGHT = 0.2
"""The weight of a new measurement in a running average."""

_SUPPOSED_TOKEN_S = 1e-3
"""The assumed seconds to compute a token, until a chunk has been measured."""


@dataclass
class Speed:
    """The speed of computing and restoring a model's prompts on this device.

    The generation thread measures; any thread may read. The steps that generate replies are not
    measured, so their speed never decides whether a prompt is restored. Until a speed is known,
    restoring counts as faster than computing, which is true on most devices.

    `rates` has a running average of each tier's bytes per second. The rate of RAM is the speed of
    joining: every restored byte is joined. The dict is replaced, never changed, because other
    threads iterate over it.
    """

    memory: PrefillMemory | None = None
    """If None, prompts are computed as in the stock server."""
    pace: Pace = field(default_factory=Pace)
    rates: dict[str, float] = field(default_factory=dict)
    n_positions: float = math.inf
    """The most positions that the model is made for (`position_limit`); infinite if unknown."""

    def limits(
        self,
        max_stall_s: float,
        stepped: Callable[[int, float | None], None] = lambda n_replies, seconds: None,
    ) -> PrefillLimits | None:
        """Return the limits for computing prompts; a reply should wait for at most `max_stall_s`.

        The wait can be longer, because a chunk has at least 32 tokens. Return None if `memory` is
        None: prompts are then computed as in mlx-lm.
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
        if n_bytes >= MIN_RESTORE_BYTES and seconds > 0:
            measured = n_bytes / seconds
            average = self.rates.get(tier, measured)
            self.rates = {**self.rates, tier: average + _WEIGHT * (measured - average)}

    def compute_s(self, position: int, n_tokens: int) -> float:
        """Return the estimated seconds to compute `n_tokens` after the first `position` tokens."""
        seconds = self.pace.seconds(position, n_tokens)
        return n_tokens * _SUPPOSED_TOKEN_S if seconds is None else seconds

    def describe(self) -> dict[str, Any]:
        rates = {RAM: None, DISK: None, **self.rates}
        return {"prefill_tokens_per_s": self.pace.describe(), "restore_bytes_per_s": rates}


@dataclass(frozen=True)
class ModelOptions:
    """The options that decide how a model's prompts are computed and stored.

    `with_text`: whether the text of prompts may be stored. `max_prefill_bytes` limits the memory
    that a chunk takes besides model and caches.
    """

    choice: PrecisionChoice
    attention: Strategy | Literal["auto"]
    max_prefill_bytes: int
    with_text: bool
    ranks: Ranks = ALONE


@dataclass(frozen=True)
class LoadedModel:
    """A model whose conversations are stored.

    `model` may be a weak proxy: the server drops a model before it loads the next, because two
    models may not fit into memory.
    """

    model: Any
    tokenizer: Any
    spec: ModelCacheSpec
    fingerprint: str
    text: TokenText | None
    """None if prompts are matched by ids: text is not stored, or the tokenizer is not supported."""
    name: str = ""
    is_known: bool = True
    """Whether the package has facts about the model's architecture."""
    speed: Speed = field(default_factory=Speed, compare=False)
    draft: LoadedModel | None = field(default=None, compare=False)
    """The draft model, whose caches are stored below a separate root."""
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
        """Save the first tokens, as many as `caches` hold; return the number of these tokens.

        Fewer tokens may be stored: `Saver.save` says which blocks are saved. The result is 0 if
        the caches cannot be saved.
        """
        n_cached = n_cached_tokens(self.spec, caches)
        n_tokens = len(tokens) if n_cached is None else min(len(tokens), n_cached)
        if not self.spec.any_prefix and n_cached not in (None, n_tokens):
            return 0  # windows and states cannot be cut to fewer tokens
        if n_tokens:
            cache_type = REPLY if cache_type == PARKED else cache_type
            self.saver.save(sequence, tokens[:n_tokens], caches, cache_type, store)
        return n_tokens

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def describe(self) -> dict[str, Any]:
        """Return the values that `mlx-lm-kvpersist spec --json` prints, and the attention plans."""
        plans = {name: plan.describe() for name, plan in self.spec.plans.items()}
        model = {"model": self.name, "kept": True, "precision": self.precision}
        return {**model, **self.spec.describe(), "attention": plans}


def load_model(provider: Any, options: ModelOptions) -> LoadedModel:
    """Return the provider's model with its cache spec, fingerprint, speed and draft model.

    provider: has `model`, `tokenizer` and `model_key`, like mlx-lm's ModelProvider. Raises OSError,
    and ModelNotSupported if the model's conversations cannot be stored.
    """
    model_path, adapter_path, draft_path = provider.model_key
    name, adapter = str(model_path), Path(adapter_path) if adapter_path else None
    model: Any = weakref.proxy(provider.model)
    computed, together = model, options.ranks
    facts = architecture_of(model)
    if not together.same(repr(facts), "the facts of the architecture"):
        facts = None
    with _on_all_ranks(options):
        fingerprint = model_fingerprint(local_path(model_path), adapter)
        text = TokenText.of(provider.tokenizer) if options.with_text else None
        spec = spec_of(model, options.choice, facts)
        memory = PrefillMemory.of(model, spec, options.max_prefill_bytes)
    if together.are_several:
        computed = partial(_evaluated, model)
        if not together.same(fingerprint, "the model's files"):
            raise ModelNotSupported("the ranks have different files of the model")
        fingerprint += f" {part_of_model(provider, together.rank, together.size)}"
    kinds = [(group.kind.name, group.precision is not None) for group in spec.groups]
    if not together.same(kinds, "the kinds of layers"):
        raise ModelNotSupported(
            "the ranks have layers of different kinds; start the server without --pipeline"
        )
    least = partial(together.least, what="how many attention strategies are correct")
    is_packed = facts is not None and facts.packed
    spec = plan_attention(model, spec, options.attention, is_packed, least)
    end_on_grid(model)
    draft = _draft_of(provider, draft_path, spec, options) if draft_path else None
    if text is None and options.with_text:
        logger.warning("kvpersist: this tokenizer's prompts are matched by ids, not by text")
    for group in spec.full:
        if group.precision is None and not options.choice.is_full_precision:
            n_slots, why = len(group.slots), group.why
            logger.warning("kvpersist: %d layers stay in full precision: %s", n_slots, why)
    if facts is None:
        logger.warning(
            "kvpersist: the package has no facts about the architecture of %s: prompts are "
            "computed alone, attention dequantizes, restores are checked if caches can be trimmed",
            name,
        )
    n_positions = position_limit(model) or math.inf
    is_known, speed = facts is not None, Speed(memory, n_positions=n_positions)
    loaded = computed, provider.tokenizer, spec, fingerprint, text, name, is_known, speed
    return LoadedModel(*loaded, draft, together)


@contextmanager
def _on_all_ranks(options: ModelOptions) -> Iterator[None]:
    """Run work that each rank does alone, without messages.

    If the work fails on one rank, all ranks raise: otherwise the other ranks would wait for a
    message from the failed rank. Raises ModelNotSupported for all errors except OSError.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if options.ranks.agree(error is None, "whether the model is supported"):
        return
    if isinstance(error, ModelNotSupported | OSError):
        raise error
    if error is not None:  # stock may still serve an unusual model
        raise ModelNotSupported(f"the model cannot be examined: {error!r}") from error
    raise ModelNotSupported("another rank does not support the model; that rank's log says why")


def _draft_of(provider: Any, path: str, spec: ModelCacheSpec, options: ModelOptions) -> LoadedModel:
    """Return the draft model, which reads the ids of the main model's tokenizer.

    Raises ModelNotSupported if a cache of either model cannot be trimmed, because mlx-lm trims
    refused draft tokens, or if the main model does not have one cache per layer.
    """
    loaded = SimpleNamespace(
        model=provider.draft_model, tokenizer=provider.tokenizer, model_key=(path, None, None)
    )
    draft = load_model(loaded, replace(options, with_text=False))
    for name, model_spec in (("model", spec), ("draft model", draft.spec)):
        for group in model_spec.groups:
            if group.kind is not GroupKind.FULL:
                raise ModelNotSupported(
                    f"a draft model is in use, and layer {group.slots[0]} of the {name} has a "
                    f"{group.cache}, which cannot be trimmed"
                )
    n_caches, n_layers = len(spec.template), len(provider.model.layers)
    if n_caches != n_layers:
        raise ModelNotSupported(
            f"a draft model is in use, and the model has {n_caches} caches for its {n_layers} "
            "layers: mlx-lm would mix the caches of both models"
        )
    return draft


def _evaluated(model: Any, *args: Any, **kwargs: Any) -> mx.array:
    """Call a model that several ranks compute; evaluate the logits before the next call.

    If two calls are evaluated together, ranks may compute their parts in different orders.
    """
    logits: mx.array = model(*args, **kwargs)
    mx.eval(logits)
    return logits


def part_of_model(provider: Any, rank: int, n_ranks: int) -> str:
    kind = "pipeline" if provider.cli_args.pipeline else "tensor"
    inner = getattr(provider.model, "model", provider.model)
    layers = getattr(inner, "start_idx", None), getattr(inner, "end_idx", None)
    return f"{kind} {rank} of {n_ranks}, layers {layers[0]}-{layers[1]}"


def places(store: BlockStore) -> str:
    ram = show_bytes(store.pool.max_bytes)
    return f"conversations in {store.disk}, and up to {ram} of RAM"


def described(spec: ModelCacheSpec) -> str:
    plans = {str(plan) for plan in spec.plans.values()}
    attention = f"attention: {' or '.join(sorted(plans))}" if plans else "attention as in mlx-lm"
    size = f"{show_bytes(spec.bytes_per_token)} a token, {layout_in_words(spec.layout)}"
    if any(group.precision for group in spec.full):
        own_bytes = sum(group.full_precision_bytes for group in spec.full)
        size += (
            f" ({spec.bits_per_number:.1f} bits on average with scales), "
            f"{spec.bytes_per_token / own_bytes:.0%} of the unquantized size"
        )
    served = "replies in batches" if spec.batches else "one request at a time"
    return f"{size}; {served}, {attention}"
