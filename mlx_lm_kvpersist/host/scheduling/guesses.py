"""What a single reply repeats is guessed, and checked in one call of the model.

Agents write files, edits and tool output again that they have read before. Where the last four ids
have occurred before in the conversation, or a few more in what the plugin has stored, the ids that
followed them then are given to the model behind the token that is due. They stand as far as the
model samples just these; the caches forget the rest. So a greedy reply is that of one token a step,
but for the rounding of other kernels, and every sampled token is drawn from the same distribution.
No second model is needed: https://github.com/apoorvumang/prompt-lookup-decoding
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import mlx.core as mx

N_LAST = 4
"""Ids that must have occurred before, for what followed them to be a guess."""
N_SHOWN = 16
"""Ids that a plugin is shown, to say what may follow them."""
MOST = 16
"""Ids that are guessed at once, at most."""
MOST_CREDIT = 4.0
"""Steps that good guesses are credited with, at most, for bad ones later."""
PAID_OFF = 0.01
"""Of a step without a guess: so much of what guesses have lost is paid off."""
_INDEXED_AT_ONCE = 2048
"""Older ids that are looked at in one step."""


class _Occurrences:
    """Where runs of `N_LAST` ids of one sequence ended last, older ones indexed bit by bit."""

    def __init__(self, uid: int, ids: list[int]) -> None:
        self.uid, self.ids = uid, ids
        self._ends: dict[tuple[int, ...], int] = {}
        self._oldest = self._newest = max(len(ids), N_LAST)

    def update(self) -> None:
        """Take in the ids that came, and some older ones."""
        ids, ends = self.ids, self._ends
        for end in range(self._newest, len(ids)):  # of the last run nothing follows yet
            ends[tuple(ids[end - N_LAST : end])] = end
        self._newest = max(self._newest, len(ids))
        until = max(N_LAST, self._oldest - _INDEXED_AT_ONCE)
        for end in range(self._oldest - 1, until - 1, -1):
            ends.setdefault(tuple(ids[end - N_LAST : end]), end)
        self._oldest = until

    def after(self, run: Sequence[int], n: int) -> list[int]:
        """Return up to `n` ids that followed the last such run; none where there is none."""
        end = self._ends.get(tuple(run))
        return [] if end is None else list(self.ids[end : end + n])


class Guesses:
    """Makes the steps of a single reply, some of several tokens. Generation thread.

    Wins and losses are added up in steps, and nothing is guessed while the sum is below zero. So
    wrong guesses cost a step or two, and `PAID_OFF` of the time, beyond what right ones have won.
    A call of the model gets as many tokens as `most_taken_back` says of the caches, at most.
    """

    def __init__(self, most_taken_back: Callable[[Sequence[Any]], int]) -> None:
        self._most_taken_back = most_taken_back
        self._seen: _Occurrences | None = None
        self._step_s = 0.0
        self._won = 0.0
        self._n_ids = N_LAST

    def next(self, batch: Any) -> tuple[list[Any], bool]:
        """Make a step of stock's batch; return its responses, and whether ids were guessed.

        Guesses are made for a single reply without processors, which see one token at a time. Such
        a step has several responses, in order, and none follows the end of the reply.
        """
        if len(batch) != 1 or any(batch.logits_processors):
            return batch.next(), False
        started = time.perf_counter()
        ids = self._ids(batch) if self._step_s and self._won >= 0 else []
        told = _checked(batch, ids) if ids else batch.next()
        seconds = time.perf_counter() - started
        if ids:
            self._won = min(self._won + len(told) - seconds / self._step_s, MOST_CREDIT)
            self._n_ids = self._length(len(ids) - 1, len(told) - 1)
        else:
            # Slow steps are others' work, or the first of a shape.
            step_s = self._step_s or seconds
            self._step_s = 0.9 * step_s + 0.1 * min(seconds, 2 * step_s)
            if self._won < 0:
                self._won = min(self._won + PAID_OFF, 0.0)
        if told and told[-1].finish_reason is not None:
            self._seen = None
        return told, bool(ids)

    def _length(self, n_guessed: int, n_right: int) -> int:
        """Return how many ids to guess next."""
        if n_right == n_guessed:
            return min(MOST, 2 * self._n_ids)
        return max(2, min(self._n_ids, 2 * n_right or self._n_ids // 2))

    def _ids(self, batch: Any) -> list[int]:
        """Return the token that is due and what may follow it; none where that is unknown.

        The device may still be at work on that token. It is waited for only if it can be guessed.
        """
        (uid,), (ids,), n_left = batch.uids, batch.tokens, batch.max_tokens[0]
        n_room = self._most_taken_back(batch.prompt_cache) - 1  # the token that is due stays
        n_ids = min(self._n_ids, n_left - batch._num_tokens[0] - 1, n_room)
        if n_ids < 1:
            return []
        if self._seen is None or self._seen.uid != uid:
            self._seen = _Occurrences(uid, ids)
        self._seen.update()
        guessed = self._after(ids, n_ids + 1)
        if not guessed:
            return []
        due = batch._next_tokens.item()
        if guessed[0] != due:
            guessed = [due, *self._after([*ids[-N_SHOWN:], due], n_ids)]
        n_logits = batch._next_logprobs[0].shape[-1]  # beyond, MLX would read any memory
        guessed = list(takewhile(lambda one: one < n_logits, guessed))
        return guessed if len(guessed) > 1 else []

    def _after(self, last: Sequence[int], n: int) -> list[int]:
        """Return up to `n` ids that may follow the last ones, by the conversation, or a plugin."""
        assert self._seen is not None
        found, taken = self._seen.after(last[-N_LAST:], n), getattr(self._seen.ids, "taken", None)
        return found if found or taken is None else list(taken.guess(last[-N_SHOWN:], n))


def _checked(batch: Any, ids: list[int]) -> list[Any]:
    """Give the model the token that is due and guessed ones; return responses to the right ones."""
    logits = batch.model(mx.array([ids]), cache=batch.prompt_cache)[0]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    sampler = (batch.samplers[0] if batch.samplers else None) or batch.fallback_sampler
    # Row by row: a sampler may make one random choice for all rows of a call.
    sampled: Any = mx.concatenate([sampler(row) for row in mx.split(logprobs, len(ids))])
    mx.eval(sampled, logprobs)
    pairs = zip(ids[1:], sampled.tolist(), strict=False)
    n_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    for cache in batch.prompt_cache:
        cache.trim(len(ids) - 1 - n_right)
    of_each = [batch._next_logprobs[0], *logprobs]
    batch._next_tokens, batch._next_logprobs = (
        sampled[n_right : n_right + 1],
        [of_each[n_right + 1]],
    )
    told: list[Any] = []
    try:
        for token, its in zip(ids[: n_right + 1], of_each, strict=False):
            batch._step = lambda token=token, its=its: _step(batch, token, its)
            told += batch.next()
            if told[-1].finish_reason is not None:
                for cache in told[-1].prompt_cache:
                    cache.trim(n_right + 1 - len(told))
                break
    finally:
        del batch._step
    return told


def _step(batch: Any, token: int, logprobs: mx.array) -> tuple[list[int], list[mx.array]]:
    """Stand for stock's step: its token was computed before."""
    batch.tokens[0].append(token)
    return [token], [logprobs]
