"""Whether a model bears the default precision: judged once, in small steps.

A text of many kinds is predicted in full precision and in the default, chunk by chunk. Where its
worst part loses more than `LIMIT_NATS`, precisions with more bits are tried in turn. The verdict is
persisted, so every later start takes it at once. Generation thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mlx_lm.models.cache import make_prompt_cache

from ...ranks import ranks
from ..geometry.precision import FULL_BITS, PrecisionChoice, layout_in_words
from ..geometry.probe import position_limit
from ..geometry.spec import ModelCacheSpec
from ..live.packed import GRID
from .divergence import AT_ONCE, compared, part_means
from .texts import placed

LIMIT_NATS = 0.01
"""Most that the mean divergence of a part's predictions may be."""
_FALLBACKS = ((8, 4), (8, 8), (FULL_BITS, FULL_BITS))
"""Bits of keys and of values that are taken in turn where the default is not borne."""

_KEY = "guard/1/"
"""The number grows when texts or limits change: then models are judged anew."""
_LEAST_TOKENS = 8
"""Of a step, however slow the device: a request waits as if its prompt had 16 tokens more."""


class Persisted(Protocol):
    """JSON values by key that outlive the process; the store implements it.

    A key names all that a value depends on, and the format of the value. So a result for another
    device, or in another format, is not found.
    """

    def get(self, key: str) -> Any:
        """Return a value, or None if the key has no value that can be read."""

    def put(self, key: str, value: Any) -> None:
        """Write a value, in place of any before."""


Loss = tuple[str, float]
"""A part of the text, and its mean divergence in nats."""


@dataclass(frozen=True)
class Verdict:
    """The loss of the worst part of the text, by precision.

    The first is the default, and only the last may be within the limit. Where the model's context
    ends before the first part, the part is "".
    """

    losses: tuple[Loss, ...]

    @property
    def n_refused(self) -> int:
        return sum(nats > LIMIT_NATS for _, nats in self.losses)

    def choice(self, default: PrecisionChoice) -> PrecisionChoice:
        """Return the precision that the model gets where `default` is asked for."""
        return _chain(default)[self.n_refused]

    def __str__(self) -> str:
        said = [f"{nats:.2g} nats ({part})" if part else "nothing" for part, nats in self.losses]
        if not self.n_refused:
            return f"checked: loses at most {said[0]}"
        own = f"; this loses {said[-1]}" if self.n_refused < len(said) else ""
        return f"the default loses {said[0]}, more than {LIMIT_NATS:g}{own}"


def precision_in_words(layout: str, verdict: Verdict | None) -> str:
    """Return a layout for people, and what the guard found."""
    return layout_in_words(layout) + (f" ({verdict})" if verdict else "")


def is_guarded(choice: PrecisionChoice) -> bool:
    """Say whether a choice is the default; what is asked for by name is never replaced."""
    return False


def _chain(default: PrecisionChoice) -> list[PrecisionChoice]:
    others = (replace(default, key_bits=keys, value_bits=values) for keys, values in _FALLBACKS)
    return [default, *others]


def known_verdict(
    persisted: Persisted, fingerprint: str, default: PrecisionChoice
) -> Verdict | None:
    """Return what was found of a model before, if anything."""
    kept = persisted.get(f"{_KEY}{fingerprint} {default}")
    return Verdict(tuple((part, nats) for part, nats in kept)) if kept else None


def put_verdict(
    persisted: Persisted, fingerprint: str, default: PrecisionChoice, verdict: Verdict
) -> None:
    """Persist a verdict, unless another server was quicker."""
    if known_verdict(persisted, fingerprint, default) is None:
        persisted.put(f"{_KEY}{fingerprint} {default}", verdict.losses)


def judging_bytes(tokenizer: Any, spec: ModelCacheSpec) -> int:
    """Return the most bytes that `judge` holds between two steps: the text in two caches."""
    n_tokens = len(placed(tokenizer)[0]) + GRID
    return 2 * sum(n_tokens * each.full_precision_bytes + each.state_bytes for each in spec.groups)


def judge(
    model: Any,
    tokenizer: Any,
    spec: ModelCacheSpec,
    default: PrecisionChoice,
    step_s: float,
) -> Generator[None, None, Verdict]:
    """Find the precision that a model bears, in steps that end at the yields.

    A step takes about `step_s`: as many tokens as the one before took, or half as many, or twice.
    `spec` is the model's in the precision `default`. Raises ValueError where a divergence is no
    number: then the model's predictions are none either.
    """
    losses: list[Loss] = []
    ids, places = placed(tokenizer)
    ids = ids[: position_limit(model)]
    *tried, _ = _chain(default)
    n_tokens = _LEAST_TOKENS
    while len(losses) < len(tried) and not (losses and losses[-1][1] <= LIMIT_NATS):
        yield
        with own_caches(model):
            its = spec
            if losses:
                its = ModelCacheSpec.probe(model, tried[len(losses)], evaluate=False)
            own, caches = make_prompt_cache(model), {"": its.make_cache()}
        if losses and its.layout == spec.layout:  # few layers: the outer ones are all there are
            losses.append(losses[0])
            continue
        nats: list[float] = []
        while (start := len(nats)) < len(ids) - 1:
            yield
            start_s = time.perf_counter()
            some = ids[start : start + n_tokens + 1]
            nats += compared(model, some, own, caches)[""].divergence
            seconds = ranks().told(time.perf_counter() - start_s, "the time of a step")
            if seconds > step_s:
                n_tokens = max(n_tokens // 2, _LEAST_TOKENS)
            elif 2 * seconds <= step_s and len(nats) % (2 * n_tokens) == 0:
                n_tokens = min(2 * n_tokens, AT_ONCE)
        means = part_means(nats, places) or {"": 0.0}
        if not all(map(math.isfinite, means.values())):
            raise ValueError("predictions that are no numbers")
        losses.append(max(means.items(), key=lambda each: each[1]))
    return Verdict(tuple(losses))


@contextmanager
def own_caches(model: Any) -> Iterator[None]:
    """Let a model make the caches of its class: a server has put the plugin's in their place."""
    made = vars(model).pop("make_cache", None)
    try:
        yield
    finally:
        if made is not None:
            model.make_cache = made
