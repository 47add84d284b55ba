"""A prompt that is served alone: its chunks, its saves, and the part left to stock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from queue import Queue
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_lm_kvpersist.errors import ClientGone, DeviceFailed
from mlx_lm_kvpersist.host.hooks import PREFILL, PrefillLimits, Prompt
from mlx_lm_kvpersist.host.manager import Taken, TakenTokens
from mlx_lm_kvpersist.host.scheduling.model_provider import MOST_IN_A_ROW
from mlx_lm_kvpersist.host.scheduling.prefill import MOST_DRAFTED, plugin_stream_generate
from mlx_lm_kvpersist.host.scheduling.waiting import WEIGH_EVERY, ReplyQueue

from .test_prefill import Counting, Plugin, Saving, keys_of

IDS = list(range(1000, 1200))
N_SYSTEM = 70


class Single:
    """One prompt, in a system's part and a user's, as the server gives it to `stream_generate`."""

    def __init__(self, most: int = 64) -> None:
        self.model, self.plugin = Counting(), Plugin(PrefillLimits(1.0, lambda position: most))
        self.client = SimpleNamespace(client_gone=False)
        self.queue: Queue[Any] = Queue()
        self.reply = ReplyQueue(self.queue, self.client)  # type: ignore[arg-type]
        self.context = SimpleNamespace(stop=lambda: None, prompt=IDS)
        self.reply.put(self.context)
        self.options: dict[str, Any] = {}
        """Stock's arguments."""
        self.tokens: list[str] = ["token"]
        self.error: Exception | None = None

    def limited(self) -> Single:
        self.plugin.limit(self.model)
        self.model.make_cache.make = lambda: [KVCache()]
        return self

    def stock(self, **options: Any) -> Iterator[str]:
        self.options = options
        yield from self.tokens
        if self.error is not None:
            raise self.error

    def compute(self, caches: Any = None, n_cached: int = 0, **options: Any) -> tuple[Any, Any]:
        """Return the caches and the ids that stock gets."""
        prompt = Prompt(IDS, [IDS[:N_SYSTEM], IDS[N_SYSTEM:]], ["system", "user"])
        taken = Taken("saves", Saving(self.plugin, prompt), n_cached=n_cached, prompt=prompt)
        taken.reply = self.reply
        options = {
            "model": self.model,
            "prompt": TakenTokens(IDS, taken)[n_cached:],
            "prompt_cache": caches or [KVCache()],
            "prompt_progress_callback": lambda *progress: self.reply.put(progress),
            "prefill_step_size": 2048,
            **options,
        }
        assert list(plugin_stream_generate(self.stock)(**options)) == self.tokens
        return self.options["prompt_cache"], self.options["prompt"]


def holds(caches: Any, ids: list[int]) -> bool:
    """Whether a cache's keys are these ids; its buffer may have more room."""
    return bool(caches[0].offset == len(ids) and keys_of(caches)[: len(ids)] == ids)


def test_it_is_computed_in_chunks_and_saved_after_each() -> None:
    single = Single().limited()
    caches, rest = single.compute()
    assert rest == IDS[-1:] and holds(caches, IDS[:-1])
    saved = [(kind, tokens) for _, kind, tokens, _ in single.plugin.saved]
    ends = [(PREFILL, 64), ("system", 70), (PREFILL, 128), (PREFILL, 192), ("user", 199)]
    assert saved == [(kind, IDS[:end]) for kind, end in ends]
    for *_, tokens, keys in single.plugin.saved:
        assert keys[: len(tokens)] == tokens


def test_what_is_cached_is_not_computed_again() -> None:
    before, _ = Single().limited().compute()
    before[0].trim(99)
    single = Single().limited()
    caches, rest = single.compute(before, n_cached=100)
    assert holds(caches, IDS[:-1]) and rest == IDS[-1:]
    assert sum(n for rows in single.model.computed for n in rows) == 99


@pytest.mark.parametrize("n_cached", [0, 100, len(IDS) - 1])
def test_penalties_are_shown_the_whole_prompt(n_cached: int) -> None:
    before, _ = Single().limited().compute()
    before[0].trim(len(IDS) - 1 - n_cached)
    single = Single().limited()
    processors = [lambda tokens, logits: (tokens.tolist(), logits)]
    _, rest = single.compute(before if n_cached else None, n_cached, logits_processors=processors)
    (shown,) = single.options["logits_processors"]
    assert shown(mx.array([*rest, 5]), "logits") == ([*IDS, 5], "logits")


def test_the_writer_hears_of_a_reply_that_runs_alone() -> None:
    single, told = Single(), []
    limits = single.plugin.limits
    stepped = lambda n_replies, seconds: told.append((n_replies, seconds))  # noqa: E731
    single.plugin.limits = replace(limits, stepped=stepped)
    single.limited().compute()
    assert told == [(1, None)]


def test_it_is_given_up_when_its_client_leaves() -> None:
    single = Single().limited()
    save = single.plugin.saved.append

    def leave(saved: Any) -> None:
        save(saved)
        single.client.client_gone = saved[1] == "system"

    single.plugin.saved = SimpleNamespace(append=leave)  # type: ignore[assignment]
    with pytest.raises(ClientGone):
        single.compute()
    assert sum(n for rows in single.model.computed for n in rows) == N_SYSTEM


def test_a_prompt_that_no_plugin_took_is_stocks() -> None:
    single = Single().limited()
    given = {"model": single.model, "prompt": IDS}
    assert list(plugin_stream_generate(single.stock)(**given)) == ["token"]
    assert single.options == given and not single.model.computed


def test_a_plugin_is_told_what_each_chunk_of_a_single_prompt_took() -> None:
    single, told = Single(), []
    took = lambda *chunk: told.append(chunk)  # noqa: E731
    single.plugin.limits = replace(single.plugin.limits, took=took)
    single.limited().compute()
    assert [chunk[:2] for chunk in told] == [(64, 0), (6, 64), (58, 70), (64, 128), (7, 192)]
    assert all(n_bytes >= 0 for *_, n_bytes in told)


def test_a_single_reply_is_weighed_while_it_grows() -> None:
    seen: list[Any] = []

    def weigh(*running: Any) -> bool:
        seen.append(running)
        return True

    single = Single().limited()
    made = single.model.make_cache
    made._support = replace(made._support, weigh=weigh)
    single.tokens = ["token"] * (2 * WEIGH_EVERY)
    single.compute()
    assert seen == [((), (len(IDS),), None), ((), (len(IDS) + WEIGH_EVERY,), None)]


@pytest.mark.parametrize(("asked", "given"), [(0, 0), (3, 3), (10**30, MOST_DRAFTED)])
def test_a_draft_model_computes_no_more_than_caches_take_back(asked: int, given: int) -> None:
    single, draft = Single().limited(), Single().limited().model
    caches, _ = single.compute(draft_model=draft, num_draft_tokens=asked)
    assert single.options["num_draft_tokens"] == given
    assert len(caches) == 2 and all(holds([cache], IDS[:-1]) for cache in caches)


@pytest.mark.parametrize("tokens", [[], ["token"]])
def test_replies_that_always_fail_end_the_server(tokens: list[str]) -> None:
    single = Single().limited()
    single.tokens, single.error = tokens, RuntimeError("bad luck")
    for _ in range(MOST_IN_A_ROW - 1):
        with pytest.raises(RuntimeError, match="bad luck"):
            single.compute()
    with pytest.raises(DeviceFailed, match="in a row failed"):
        single.compute()
