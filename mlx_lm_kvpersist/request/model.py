"""What is known of the model that the server has loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..block import Root
from ..cache.geometry.precision import Allocation, bits_in_words, rotation_in_words
from ..cache.geometry.spec import Batching, ModelCacheSpec
from ..match.text import TokenText
from ..units import show_bytes
from .checkpoint_saver import CheckpointSaver
from .prefix_saver import PrefixSaver
from .speed import Speed

_BATCHING = {
    Batching.REPLIES: "replies in batches",
    Batching.NONE: "one request at a time",
}


@dataclass(frozen=True)
class LoadedModel:
    """A model whose conversations are kept.

    `model` may be a weak proxy: the server drops a model before it loads the next, and two do not
    always fit into memory.
    """

    model: Any
    tokenizer: Any
    spec: ModelCacheSpec
    fingerprint: str
    text: TokenText | None
    """None when prompts are matched by ids: text is not to be stored, or not understood."""
    name: str = ""
    """What people call the model."""
    speed: Speed = field(default_factory=Speed, compare=False)

    @cached_property
    def root(self) -> Root:
        """The root of this model's tree, without a namespace or a session."""
        return Root(
            self.fingerprint, self.spec.layout, with_text=self.text is not None, model=self.name
        )

    @cached_property
    def saver(self) -> PrefixSaver | CheckpointSaver:
        """What saves this model's caches, and finds what can be restored."""
        saver = PrefixSaver if self.spec.any_prefix else CheckpointSaver
        return saver(self.spec, self.text)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def describe(self) -> dict[str, Any]:
        """Return what `mlx-lm-kvpersist spec --json` says, and the layers' attention."""
        plans = {name: plan.describe() for name, plan in self.spec.plans.items()}
        return {"model": self.name, "kept": True, **self.spec.describe(), "attention": plans}


def described(spec: ModelCacheSpec, allocation: Allocation | None = None) -> str:
    """Return how full layers are stored, batched and attended, for the log."""
    plans = {
        f"prefill {p.prefill}, decode {p.decode}, batches {p.batch_decode}"
        for p in spec.plans.values()
    }
    attention = f"attention: {' or '.join(sorted(plans))}" if plans else "attention as in mlx-lm"
    n_bytes = show_bytes(spec.bytes_per_token)
    found = f"{n_bytes} a token, {described_bits(spec)}"
    if allocation is not None and allocation.divergence is not None:
        found += (
            f"; predicted divergence {allocation.divergence.value:.2g} "
            f"(measured on {allocation.measured_on})"
        )
    return f"{found}; {_BATCHING[spec.batching]}, {attention}"


def described_bits(spec: ModelCacheSpec) -> str:
    """Return the bits of keys and values, such as "keys 4 bits, values 4 (5.0 on average …)"."""
    precisions = [group.precision for group in spec.full]
    if not precisions:
        return "in windows and states alone"
    if not any(precisions):
        return "in full precision"
    n_own = sum(len(group.slots) for group in spec.full if group.precision is None)
    turned = rotation_in_words(precisions)
    own_bytes = sum(group.full_precision_bytes for group in spec.full)
    return (
        bits_in_words(precisions)
        + (f", {n_own} layers in full precision" if n_own else "")
        + f" ({spec.bits_per_number:.1f} on average with scales"
        + (f", {turned}" if turned else "")
        + f"), {spec.bytes_per_token / own_bytes:.2f} of full memory"
    )
