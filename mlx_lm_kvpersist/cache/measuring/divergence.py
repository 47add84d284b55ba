"""How much a quantized cache changes a model's predictions, for each token of a text.

The Kullback-Leibler divergence from full precision, in nats, is computed for every next token. A
few hundred tokens then say as much as a perplexity over thousands.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import mlx.core as mx

from ..live.packed import GRID

_TEXTS = Path(__file__).with_name("texts.json")
"""Short texts of many kinds, all written for this project.

The context fills at least the first `GRID` tokens. Quantizing does not change the predictions of
these tokens, because queries see their own block in full precision. Each later part uses the
context's names and facts in another language or format. The last part copies a passage."""

AT_ONCE = GRID // 2
"""The most tokens of a text that are computed together; a divisor of `GRID`."""
_MOST_BYTES = 32 << 20
"""Bytes of one float32 array of log-probabilities; about six exist at a time."""
_LEAST_LOGPROB = -1e4
"""The lowest log-probability: masked tokens have -inf, and the difference of two -inf is NaN."""


@dataclass(frozen=True)
class Estimate:
    """A mean over the tokens of a text, and its standard error."""

    value: float
    error: float


@dataclass
class Predictions:
    """Predictions after each token of a text: lists with a number, in nats, or a flag per token.

    `nll` is the negative log-likelihood of the next token. `above` is its excess over full
    precision. `divergence` is the KL divergence from the full-precision prediction. `same`: whether
    the likeliest token is the same as in full precision.
    """

    nll: list[float] = field(default_factory=list)
    above: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)

    def add(self, more: Predictions, start: int = 0) -> None:
        for name, values in vars(self).items():
            values += getattr(more, name)[start:]

    @property
    def own(self) -> Predictions:
        """The predictions in full precision."""
        nll = [nll - above for nll, above in zip(self.nll, self.above, strict=True)]
        return Predictions(nll, [0.0] * len(nll), [0.0] * len(nll), [True] * len(nll))

    @property
    def perplexity(self) -> Estimate:
        return _exponential(_mean(self.nll))

    @property
    def perplexity_rise(self) -> Estimate:
        """The relative rise of the perplexity over full precision."""
        ratio = _exponential(_mean(self.above))
        return Estimate(ratio.value - 1, ratio.error)

    @property
    def agreement(self) -> Estimate:
        return _mean(self.same)

    @property
    def divergence_nats(self) -> Estimate:
        return _mean(self.divergence)

    @property
    def divergence_p99_nats(self) -> float:
        return sorted(self.divergence)[math.ceil(0.99 * len(self.divergence)) - 1]


def compared(
    model: Any, ids: Sequence[int], own_caches: list[Any], caches: Mapping[str, list[Any]]
) -> dict[str, Predictions]:
    """Return, for each of `caches`, the predictions after each of `ids` except the last.

    ids: up to `AT_ONCE` next ids of a text, in one block of the grid, and one more id. All caches
    hold the text before `ids`; `own_caches` are in full precision. The logits are evaluated.
    """
    fed, followed = mx.array([list(ids[:-1])]), mx.array(list(ids[1:]))
    predictions = {name: Predictions() for name in caches}
    own = model(fed, cache=own_caches)[0]
    n_rows = max(1, _MOST_BYTES // (mx.float32.size * own.shape[-1]))
    for name, its_caches in caches.items():
        logits = model(fed, cache=its_caches)[0]
        mx.eval(own, logits)
        for start in range(0, len(own), n_rows):
            rows = slice(start, start + n_rows)
            predictions[name].add(_predictions(own[rows], logits[rows], followed[rows]))
    return predictions


def _predictions(own_logits: mx.array, its_logits: mx.array, targets: mx.array) -> Predictions:
    """Compare logits [n, vocabulary]; `targets` [n] are the ids that followed."""
    both = [_log_probabilities(logits) for logits in (own_logits, its_logits)]
    mx.eval(both)
    own, quantized = both
    own_nll, nll = (-mx.take_along_axis(x, targets[:, None], axis=-1)[:, 0] for x in both)
    # Rounding can give numbers below 0.
    divergence = mx.maximum((mx.exp(own) * (own - quantized)).sum(axis=-1), 0)
    same = own.argmax(axis=-1) == quantized.argmax(axis=-1)
    numbers: list[Any] = [x.tolist() for x in (nll, nll - own_nll, divergence, same)]
    return Predictions(*numbers)


def _log_probabilities(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return mx.maximum(logits - mx.logsumexp(logits, axis=-1, keepdims=True), _LEAST_LOGPROB)


def part_means(nats: Sequence[float], places: Mapping[str, range]) -> dict[str, float]:
    """Return the mean divergence of each part that has predictions.

    nats: the divergence at each position of a text; `places` has the positions of the text's parts.
    """
    return {
        name: _mean(nats[place.start : place.stop]).value
        for name, place in places.items()
        if place.start < len(nats)
    }


def _mean(values: Sequence[float]) -> Estimate:
    return Estimate(fmean(values), pstdev(values) / math.sqrt(len(values)))


def _exponential(estimate: Estimate) -> Estimate:
    value = math.exp(min(estimate.value, 700.0))
    return Estimate(value, value * estimate.error)


def all_parts() -> dict[str, str]:
    """Return the texts by name: the context first, then the parts in the order of reading."""
    texts: dict[str, str] = json.loads(_TEXTS.read_text(encoding="utf-8"))
    return texts


def placed(tokenizer: Any) -> tuple[list[int], dict[str, range]]:
    """Return the ids of all parts as one text, and the positions of all parts except the context.

    The context is repeated until it has `GRID` tokens. The result has 800 to 1,050 ids, and some
    hundreds more if a vocabulary covers few languages.
    """
    (_, context), *passages = all_parts().items()
    ids, again = encode(tokenizer, context)
    while len(ids) < GRID:
        ids += again
    places: dict[str, range] = {}
    for name, text in passages:
        start = len(ids)
        ids += encode(tokenizer, text)[1]
        places[name] = range(start, len(ids))
    return ids, places


def encode(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return the begin token as a list, which may be empty, and the text's ids without it."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    bos = tokenizer.bos_token_id
    begins = bos is not None and list(tokenizer.encode("a"))[:1] == [bos]
    return ([bos] if begins else []), ids
