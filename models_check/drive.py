"""Generate as the stock server does, without HTTP: in its batch generator, or one by one.

Every sequence is cut into segments. As in the server, caches are saved at the end of each segment
and of the reply. If a reply's tokens are prescribed, runs can be compared even after a near tie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.generate import BatchGenerator, generate_step

from mlx_lm_kvpersist.cache.live.packed import GRID

Keeper = Callable[[list[int], list[Any]], None]
"""Called with token ids and the caches of these tokens."""


@dataclass
class Row:
    """One prompt to compute: `caches` have its first `n_cached` tokens."""

    segments: list[list[int]]
    caches: list[Any]
    n_cached: int = 0
    n_new: int = 8
    reply: Sequence[int] | None = None
    """The reply's tokens; None chooses the likeliest token each time."""
    keeper: Keeper = field(default=lambda tokens, caches: None)

    @property
    def prompt(self) -> list[int]:
        return [token for segment in self.segments for token in segment]

    def rest(self) -> list[list[int]]:
        rest, n_cached = [], self.n_cached
        for segment in self.segments:
            if n_cached < len(segment):
                rest.append(segment[n_cached:])
            n_cached = max(0, n_cached - len(segment))
        return rest

    def sampler(self) -> Callable[[mx.array], mx.array]:
        """Return a function that chooses a token from log-probabilities [1, vocab]."""
        if self.reply is None:
            return lambda logprobs: mx.argmax(logprobs, axis=-1)
        # The generator samples one token more than it returns.
        tokens = iter([*self.reply[: self.n_new], 0, 0])
        return lambda logprobs: mx.array([next(tokens)], mx.uint32)


@dataclass(frozen=True)
class Reply:
    """`ids` [n], `logprobs` [n, vocab] float32, and the caches of `tokens` (prompt and reply)."""

    ids: list[int]
    logprobs: npt.NDArray[np.float32]
    tokens: list[int]
    caches: list[Any]


def can_batch(caches: Sequence[Any]) -> bool:
    return all(hasattr(cache, "merge") for cache in caches)


def generate(
    model: Any,
    rows: Sequence[Row],
    batches: bool = True,
    *,
    joint: bool = True,
    padded: bool = False,
) -> list[Reply]:
    """Generate in one batch if `batches` and the caches allow it, else one by one.

    A batch computes its prompts one by one, as our server does. If `padded`, it computes them
    together and pads them on the right, as stock does. If not `joint`, the other prompts come when
    the first reply has begun.
    """
    if not batches or not all(can_batch(row.caches) for row in rows):
        return [_single(model, row) for row in rows]
    generator = BatchGenerator(
        model,
        prefill_batch_size=len(rows) if padded else 1,
        stream=mx.default_stream(mx.default_device()),
    )
    return _in_a_batch(generator, rows, len(rows) if joint else 1)


def alone(model: Any, row: Row, batches: bool = True) -> Reply:
    """Generate one reply without other requests."""
    return generate(model, [row], batches)[0]


def _in_a_batch(generator: Any, rows: Sequence[Row], n_at_once: int) -> list[Reply]:
    runs = {run.uid: run for run in _insert(generator, rows[:n_at_once])}
    late = rows[n_at_once:]
    while late or not all(run.reply for run in runs.values()):
        prompt_responses, responses = generator.next()
        ended = [
            response.uid
            for response in prompt_responses
            if response.end_of_segment
            and not response.end_of_prompt
            and runs[response.uid].n_segments
        ]
        for uid, (caches, tokens) in generator.extract_cache(ended).items():
            runs[uid].n_segments -= 1
            runs[uid].row.keeper(list(tokens), caches)
        for response in responses:
            runs[response.uid].take(response)
        if late and responses:
            runs.update((run.uid, run) for run in _insert(generator, late))
            late = []
    generator.close()
    replies = [run.reply for run in sorted(runs.values(), key=lambda run: run.uid)]
    return [reply for reply in replies if reply is not None]


@dataclass
class _Run:
    uid: int
    row: Row
    n_segments: int
    """The number of segments whose caches are not saved yet."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[npt.NDArray[np.float32]] = field(default_factory=list)
    reply: Reply | None = None

    def take(self, response: Any) -> None:
        self.ids.append(int(response.token))
        self.logprobs.append(np.array(response.logprobs.astype(mx.float32)))
        if response.finish_reason is not None:
            tokens, caches = list(response.all_tokens), response.prompt_cache
            self.row.keeper(tokens, caches)
            self.reply = Reply(self.ids, np.stack(self.logprobs), tokens, caches)


def _insert(generator: Any, rows: Sequence[Row]) -> list[_Run]:
    uids = generator.insert_segments(
        segments=[row.rest() for row in rows],
        max_tokens=[row.n_new for row in rows],
        caches=[row.caches for row in rows],
        all_tokens=[row.prompt[: row.n_cached] for row in rows],
        samplers=[row.sampler() for row in rows],
    )
    return [_Run(uid, row, len(row.rest())) for uid, row in zip(uids, rows, strict=True)]


def _single(model: Any, row: Row) -> Reply:
    ids, logprobs = [], []
    steps = generate_step(
        mx.array(row.prompt[row.n_cached :]),
        model,
        max_tokens=row.n_new,
        sampler=row.sampler(),
        prompt_cache=row.caches,
    )
    for token, step in steps:
        ids.append(int(token))
        logprobs.append(np.array(step.astype(mx.float32)))
    tokens = [*row.prompt, *ids]
    row.keeper(tokens, row.caches)
    return Reply(ids, np.stack(logprobs), tokens, row.caches)


def plainly(model: Any, row: Row, *, at_once: bool = False) -> Reply:
    """Generate without mlx-lm's generators, but cut the prompt as its batch generator does.

    If `at_once`, cut it only before the last token, as mlx-lm does for a single request.
    """
    segments = row.rest()
    if at_once:
        segments = [[token for segment in segments for token in segment]]
    if len(segments[-1]) > 1:
        segments[-1:] = [segments[-1][:-1], segments[-1][-1:]]
    position = len(row.prompt) - sum(map(len, segments))
    for segment in segments:
        # A query sees its own block unquantized, so no call goes beyond the end of a block.
        ends = [*range(GRID - position % GRID, len(segment), GRID), len(segment)]
        for start, stop in pairwise([0, *ends]):
            logits = model(mx.array([segment[start:stop]]), cache=row.caches)[:, -1]
            mx.eval(logits, [cache.state for cache in row.caches])
        position += len(segment)
    ids, logprobs, choose = [], [], row.sampler()
    for _ in range(row.n_new):
        steps = logits.astype(mx.float32)
        steps = steps - mx.logsumexp(steps, axis=-1, keepdims=True)
        logprobs.append(np.array(steps[0]))
        ids.append(int(choose(steps)))
        logits = model(mx.array([ids[-1:]]), cache=row.caches)[:, -1]
    return Reply(ids, np.stack(logprobs), [*row.prompt, *ids], row.caches)
