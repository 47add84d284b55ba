"""How far a model's predictions move when its cache is quantized, in nats.

The Kullback-Leibler divergence from the model's own precision is taken for every next token of a
text, so a few hundred tokens say as much as a perplexity over thousands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from ..geometry.precision import Estimate

_CHUNK = 256
_MOST_BYTES = 256 << 20
"""Of the reference's log-probabilities."""
_MOST_CHUNK_BYTES = 32 << 20
"""Of one float32 array of log-probabilities; some six exist at a time."""
_LEAST_LOGPROB = -1e4
"""Masked tokens have -inf, and -inf - -inf is no number. float16 holds this."""


class Reference:
    """A model's own predictions of a text, and how far those over other caches are from them.

    `own_caches` is a new prompt cache in the model's own precision. Evaluates MLX.
    """

    def __init__(self, model: Any, ids: Sequence[int], own_caches: list[Any]) -> None:
        self._model = model
        self._ids = mx.array([list(ids)])
        self._expected: list[mx.array] = []
        for logprobs in self._run(own_caches):
            if logprobs.nbytes * len(ids) > _MOST_BYTES * logprobs.shape[0]:
                # This moves a mean by less than 1e-4.
                logprobs = logprobs.astype(mx.float16)
            mx.eval(logprobs)
            self._expected.append(logprobs)

    @staticmethod
    def most_tokens(vocabulary: int) -> int:
        """Return how many tokens' predictions may be held at once."""
        return _MOST_BYTES // (mx.float16.size * vocabulary)

    def divergence(self, caches: list[Any]) -> Estimate:
        """Return the divergence of the model with these caches, which are empty."""
        nats: list[float] = []
        for expected, found in zip(self._expected, self._run(caches), strict=True):
            expected = expected.astype(mx.float32)
            each: Any = (mx.exp(expected) * (expected - found)).sum(axis=-1)
            nats += each.tolist()
        mean = sum(nats) / len(nats)
        variance = sum((one - mean) ** 2 for one in nats) / max(1, len(nats) - 1)
        return Estimate(mean, math.sqrt(variance / len(nats)))

    def _run(self, caches: list[Any]) -> Iterator[mx.array]:
        """Yield log-probabilities [n, vocabulary] of the text, lazy, some rows at a time."""
        for start in range(0, self._ids.shape[1], _CHUNK):
            logits = self._model(self._ids[:, start : start + _CHUNK], cache=caches)[0]
            mx.eval(logits)
            n_rows = max(1, _MOST_CHUNK_BYTES // (mx.float32.size * logits.shape[-1]))
            for row in range(0, logits.shape[0], n_rows):
                some = logits[row : row + n_rows].astype(mx.float32)
                logprobs = some - mx.logsumexp(some, axis=-1, keepdims=True)
                yield mx.maximum(logprobs, _LEAST_LOGPROB)
