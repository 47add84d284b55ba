"""Prompt-lookup decoding: a step computes several tokens of a reply that repeats known text.

The last ids are looked up in the conversation, or in a plugin's stored ids. The ids that followed
them there are drafts. The model checks all drafts in one call, together with the next token. Wrong
drafts are trimmed from the caches. A greedy reply is the same without drafts, except for other
kernels' rounding. Sampled tokens keep their distribution.
Source: https://github.com/apoorvumang/prompt-lookup-decoding
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import mlx.core as mx

N_LAST = 4
"""The number of last ids that are looked up in the conversation."""
N_SHOWN = 16
"""The number of last ids that a plugin gets."""
MOST_DRAFTED = 16
MOST_CREDIT = 4.0
"""The largest gain, in steps, that is kept for later wrong drafts."""
PAID_OFF = 0.01
"""Each step without drafts reduces a loss by this part of a step's time."""
_INDEXED_AT_ONCE = 2048
"""The number of older ids that are indexed in one step."""


class Occurrences:
    """The last position of each run of `N_LAST` ids; older ids are indexed gradually."""

    def __init__(self, uid: int, ids: list[int]) -> None:
        self.uid, self.ids = uid, ids
        self._ends: dict[tuple[int, ...], int] = {}
        self._oldest = self._newest = max(len(ids), N_LAST)

    def update(self) -> None:
        ids, ends = self.ids, self._ends
        for end in range(self._newest, len(ids)):  # the newest run has no next id yet
            ends[tuple(ids[end - N_LAST : end])] = end
        self._newest = max(self._newest, len(ids))
        until = max(N_LAST, self._oldest - _INDEXED_AT_ONCE)
        for end in range(self._oldest - 1, until - 1, -1):
            ends.setdefault(tuple(ids[end - N_LAST : end]), end)
        self._oldest = until

    def after(self, run: Sequence[int], n: int) -> list[int]:
        """Return up to `n` ids that followed a run where it last occurred; none for a new run."""
        end = self._ends.get(tuple(run))
        return [] if end is None else list(self.ids[end : end + n])


class PromptLookup:
    """Makes the steps of a single reply; some steps have several tokens. Generation thread.

    A draft gains the time of the steps that it makes unnecessary, and loses the additional time of
    its own step. Gains and losses are added up, in units of a usual step's time. Nothing is drafted
    while the sum is negative. So if all drafts are wrong, a long reply takes about 1% longer
    (`PAID_OFF`). A call of the model gets at most `most_taken_back(caches)` tokens.
    """

    def __init__(self, most_taken_back: Callable[[Sequence[Any]], int]) -> None:
        self._most_taken_back = most_taken_back
        self._occurrences: Occurrences | None = None
        self._step_s = 0.0
        self._gain = 0.0
        self._n_ids = N_LAST

    def next(self, batch: Any) -> tuple[list[Any], bool]:
        """Make a step of mlx-lm's batch; return its responses, and whether ids were drafted.

        Ids are drafted only for a single reply without processors, because processors see one token
        at a time. A step with drafts has several responses, in order, up to the end of the reply.
        """
        if len(batch) != 1 or any(batch.logits_processors):
            return batch.next(), False
        started = time.perf_counter()
        # A draft would delay the first token: a step's tokens are all sent at the step's end.
        is_first = not batch._num_tokens[0]
        ids = self._ids(batch) if self._step_s and self._gain >= 0 and not is_first else []
        responses = checked(batch, ids) if ids else batch.next()
        seconds = time.perf_counter() - started
        if ids:
            gain = len(responses) - seconds / self._step_s
            self._gain = min(self._gain + gain, MOST_CREDIT)
            n_right = len(responses) - 1
            if n_right == len(ids) - 1:
                self._n_ids = min(MOST_DRAFTED, 2 * self._n_ids)
            else:
                self._n_ids = max(2, min(self._n_ids, 2 * n_right or self._n_ids // 2))
        else:
            # Other requests, or the first use of a shape, make steps slow.
            step_s = self._step_s or seconds
            self._step_s = 0.9 * step_s + 0.1 * min(seconds, 2 * step_s)
            if self._gain < 0:
                self._gain = min(self._gain + PAID_OFF, 0.0)
        if responses and responses[-1].finish_reason is not None:
            self._occurrences = None
        return responses, bool(ids)

    def _ids(self, batch: Any) -> list[int]:
        """Return the next token and its drafts; nothing if no draft is known.

        The device may still be computing the next token: wait only if drafts are possible.
        """
        (uid,), (ids,), n_most = batch.uids, batch.tokens, batch.max_tokens[0]
        n_room = self._most_taken_back(batch.prompt_cache) - 1  # the call also has the next token
        n_ids = min(self._n_ids, n_most - batch._num_tokens[0] - 1, n_room)
        if n_ids < 1:
            return []
        if self._occurrences is None or self._occurrences.uid != uid:
            self._occurrences = Occurrences(uid, ids)
        self._occurrences.update()
        drafted = self._after(ids, n_ids + 1)
        if not drafted:
            return []
        due = batch._next_tokens.item()
        if drafted[0] != due:
            drafted = [due, *self._after([*ids[-N_SHOWN:], due], n_ids)]
        n_logits = batch._next_logprobs[0].shape[-1]  # for larger ids, MLX would read other memory
        drafted = list(takewhile(lambda token: token < n_logits, drafted))
        return drafted if len(drafted) > 1 else []

    def _after(self, last: Sequence[int], n: int) -> list[int]:
        assert self._occurrences is not None
        ids = self._occurrences.after(last[-N_LAST:], n)
        request = getattr(self._occurrences.ids, "taken", None)
        return ids if ids or request is None else list(request.draft_ids(last[-N_SHOWN:], n))


def checked(batch: Any, ids: list[int]) -> list[Any]:
    """Give the model the next token and the drafts; return the responses for the right drafts."""
    logits = batch.model(mx.array([ids]), cache=batch.prompt_cache)[0]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    sampler = (batch.samplers[0] if batch.samplers else None) or batch.fallback_sampler
    # Row by row, because a sampler may make one random choice for all rows of a call.
    sampled: Any = mx.concatenate([sampler(row) for row in mx.split(logprobs, len(ids))])
    mx.eval(sampled, logprobs)
    pairs = zip(ids[1:], sampled.tolist(), strict=False)
    n_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    for cache in batch.prompt_cache:
        cache.trim(len(ids) - 1 - n_right)
    rows = [batch._next_logprobs[0], *logprobs]
    batch._next_tokens = sampled[n_right : n_right + 1]
    batch._next_logprobs = [rows[n_right + 1]]
    responses: list[Any] = []
    try:
        for token, row in zip(ids[: n_right + 1], rows, strict=False):
            batch._step = partial(_computed, batch, token, row)
            responses += batch.next()
            if responses[-1].finish_reason is not None:
                for cache in responses[-1].prompt_cache:
                    cache.trim(n_right + 1 - len(responses))
                break
    finally:
        del batch._step
    return responses


def _computed(batch: Any, token: int, logprobs: mx.array) -> tuple[list[int], list[mx.array]]:
    """Return the result of mlx-lm's `_step` for a token that was computed before."""
    batch.tokens[0].append(token)
    return [token], [logprobs]
