"""A prompt that is served by itself: its chunks, what is saved of it, and what stock is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from queue import Queue
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_lm_kvpersist.errors import ClientGone
from mlx_lm_kvpersist.host.answers import PREFILL, PrefillLimits, Prompt
from mlx_lm_kvpersist.host.manager import Taken, TakenTokens
from mlx_lm_kvpersist.host.scheduling.reply import ReplyQueue
from mlx_lm_kvpersist.host.scheduling.single_prompt import SinglePrompt

from .test_prefill import Counting, Plugin, Saving, keys_of

IDS = list(range(1000, 1200))
N_SYSTEM = 70


class Single:
    """One prompt, in a system's part and a user's, as stock asks for its caches."""

    def __init__(self) -> None:
        self.model, self.plugin = Counting(), Plugin(PrefillLimits(1.0, lambda position: 64))
        self.client = SimpleNamespace(client_gone=False)
        self.queue: Queue[Any] = Queue()
        self.reply = ReplyQueue(self.queue, self.client)  # type: ignore[arg-type]
        self.reply.stops_by_raising = True
        self.context = SimpleNamespace(prompt_cache_count=-1, stop=lambda: None, prompt=IDS)
        self.reply.put(self.context)

    def compute(self, caches: Any = None, n_cached: int = 0) -> tuple[Any, list[int]]:
        prompt = Prompt(IDS, [IDS[:N_SYSTEM], IDS[N_SYSTEM:]], ["system", "user"])
        taken = Taken("saves", Saving(self.plugin, prompt), n_cached=n_cached, prompt=prompt)
        self.single = SinglePrompt([self.model, None], self.reply, 2048)
        return self.single.compute(TakenTokens(IDS, taken), caches)


def holds(caches: Any, ids: list[int]) -> bool:
    """Whether a cache's keys are these ids; behind them its buffer has room."""
    return bool(caches[0].offset == len(ids) and keys_of(caches)[: len(ids)] == ids)


def limited(single: Single) -> Single:
    single.plugin.limit(single.model)
    single.model.make_cache.make = lambda: [KVCache()]
    return single


def test_it_is_computed_in_chunks_and_saved_after_each() -> None:
    single = limited(Single())
    caches, rest = single.compute()
    assert rest == IDS[-1:] and holds(caches, IDS[:-1])
    saved = [(kind, tokens) for _, kind, tokens, _ in single.plugin.saved]
    ends = [(PREFILL, 64), ("system", 70), (PREFILL, 128), (PREFILL, 192), ("user", 199)]
    assert saved == [(kind, IDS[:end]) for kind, end in ends]
    for *_, tokens, keys in single.plugin.saved:
        assert keys[: len(tokens)] == tokens


def test_what_is_cached_is_not_computed_again_and_not_counted_twice() -> None:
    before, _ = limited(Single()).compute()
    before[0].trim(99)
    single = limited(Single())
    caches, rest = single.compute(before, n_cached=100)
    assert holds(caches, IDS[:-1]) and rest == IDS[-1:]
    assert sum(n for rows in single.model.computed for n in rows) == 99
    single.context.prompt_cache_count = len(IDS) - len(rest)  # as stock counts
    single.reply.put("token")
    assert single.context.prompt_cache_count == 100


@pytest.mark.parametrize("n_cached", [0, 100, len(IDS) - 1])
def test_penalties_are_shown_the_whole_prompt(n_cached: int) -> None:
    before, _ = limited(Single()).compute()
    before[0].trim(len(IDS) - 1 - n_cached)
    single = limited(Single())
    _, rest = single.compute(before if n_cached else None, n_cached)
    shown = single.single.shown_all(lambda tokens, logits: (tokens.tolist(), logits))
    assert shown(mx.array([*rest, 5]), "logits") == ([*IDS, 5], "logits")


def test_the_writer_hears_of_a_reply_that_runs_by_itself() -> None:
    single, told = Single(), []
    limits = single.plugin.limits
    stepped = lambda n_replies, seconds: told.append((n_replies, seconds))  # noqa: E731
    single.plugin.limits = replace(limits, stepped=stepped)
    limited(single).compute()
    assert told == [(1, None)]


def test_it_is_given_up_when_its_client_leaves() -> None:
    single = limited(Single())
    save = single.plugin.saved.append

    def leave(saved: Any) -> None:
        save(saved)
        single.client.client_gone = saved[1] == "system"

    single.plugin.saved = SimpleNamespace(append=leave)  # type: ignore[assignment]
    with pytest.raises(ClientGone):
        single.compute()
    assert sum(n for rows in single.model.computed for n in rows) == N_SYSTEM


@pytest.mark.parametrize("change", [lambda one: None, lambda one: one.plugin.limit(one.model)])
def test_without_limits_stock_computes_it(change: Callable[[Single], None]) -> None:
    single = Single()
    single.plugin.limits = None  # type: ignore[assignment]
    change(single)
    assert single.compute() == (None, IDS) and not single.model.computed


def test_a_plugin_is_told_what_each_chunk_of_a_single_prompt_took() -> None:
    single, told = Single(), []
    took = lambda *chunk: told.append(chunk)  # noqa: E731
    single.plugin.limits = replace(single.plugin.limits, took=took)
    limited(single).compute()
    assert [chunk[:2] for chunk in told] == [(64, 0), (6, 64), (58, 70), (64, 128), (7, 192)]
    assert all(n_bytes >= 0 for *_, n_bytes in told)
