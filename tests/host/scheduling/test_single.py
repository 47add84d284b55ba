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

from .test_prefill import Counting, Plugin, Saving, allocate_8_mib_in_each_call, keys_of

IDS = list(range(1000, 1200))
N_SYSTEM = 70


class Single:
    """A prompt with a system and a user segment, as the server gives it to `stream_generate`."""

    def __init__(self, max_chunk: int = 64) -> None:
        self.model, self.plugin = Counting(), Plugin(PrefillLimits(1.0, lambda position: max_chunk))
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


def has_keys(caches: Any, ids: list[int]) -> bool:
    """Whether the keys of the first cache are these ids; its buffer may be longer."""
    return bool(caches[0].offset == len(ids) and keys_of(caches)[: len(ids)] == ids)


def test_single_prompt_is_computed_in_chunks_and_saved_after_each() -> None:
    single = Single().limited()
    caches, rest = single.compute()
    assert rest == IDS[-1:] and has_keys(caches, IDS[:-1])
    saved = [(kind, tokens) for _, kind, tokens, _ in single.plugin.saved]
    ends = [(PREFILL, 64), ("system", 70), (PREFILL, 128), (PREFILL, 192), ("user", 199)]
    assert saved == [(kind, IDS[:end]) for kind, end in ends]
    for *_, tokens, keys in single.plugin.saved:
        assert keys[: len(tokens)] == tokens


def test_cached_tokens_are_not_computed_again() -> None:
    before, _ = Single().limited().compute()
    before[0].trim(99)
    single = Single().limited()
    caches, rest = single.compute(before, n_cached=100)
    assert has_keys(caches, IDS[:-1]) and rest == IDS[-1:]
    assert sum(n for rows in single.model.computed for n in rows) == 99


@pytest.mark.parametrize("n_cached", [0, 100, len(IDS) - 1])
def test_logits_processors_get_the_whole_prompt(n_cached: int) -> None:
    before, _ = Single().limited().compute()
    before[0].trim(len(IDS) - 1 - n_cached)
    single = Single().limited()
    processors = [lambda tokens, logits: (tokens.tolist(), logits)]
    _, rest = single.compute(before if n_cached else None, n_cached, logits_processors=processors)
    (processor,) = single.options["logits_processors"]
    assert processor(mx.array([*rest, 5]), "logits") == ([*IDS, 5], "logits")


def test_stepped_is_called_when_a_single_reply_begins() -> None:
    single, calls = Single(), []
    limits = single.plugin.limits
    stepped = lambda n_replies, seconds: calls.append((n_replies, seconds))  # noqa: E731
    single.plugin.limits = replace(limits, stepped=stepped)
    single.limited().compute()
    assert calls == [(1, None)]


def test_single_prompt_stops_when_its_client_leaves() -> None:
    single = Single().limited()
    save = single.plugin.saved.append

    def leave(saved: Any) -> None:
        save(saved)
        single.client.client_gone = saved[1] == "system"

    single.plugin.saved = SimpleNamespace(append=leave)  # type: ignore[assignment]
    with pytest.raises(ClientGone):
        single.compute()
    assert sum(n for rows in single.model.computed for n in rows) == N_SYSTEM


def test_untaken_prompt_is_passed_to_stock_unchanged() -> None:
    single = Single().limited()
    arguments = {"model": single.model, "prompt": IDS}
    assert list(plugin_stream_generate(single.stock)(**arguments)) == ["token"]
    assert single.options == arguments and not single.model.computed


def test_plugin_gets_the_memory_of_each_chunk_of_a_single_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocate_8_mib_in_each_call(monkeypatch)
    single, chunks = Single(), []
    took = lambda *chunk: chunks.append(chunk)  # noqa: E731
    single.plugin.limits = replace(single.plugin.limits, took=took)
    single.limited().compute()
    assert [chunk[:2] for chunk in chunks] == [(64, 0), (6, 64), (58, 70), (64, 128), (7, 192)]
    assert all(7 << 20 < n_bytes < 20 << 20 for *_, n_bytes in chunks)


def test_memory_account_is_updated_while_a_single_reply_grows() -> None:
    calls: list[Any] = []

    def weigh(*running: Any) -> bool:
        calls.append(running)
        return True

    single = Single().limited()
    caches = single.model.make_cache
    caches._support = replace(caches._support, weigh=weigh)
    single.tokens = ["token"] * (2 * WEIGH_EVERY)
    single.compute()
    assert calls == [((), (len(IDS),), None), ((), (len(IDS) + WEIGH_EVERY,), None)]


@pytest.mark.parametrize(("requested", "expected"), [(0, 0), (3, 3), (10**30, MOST_DRAFTED)])
def test_draft_tokens_are_limited_to_the_number_that_caches_can_trim(
    requested: int, expected: int
) -> None:
    single, draft = Single().limited(), Single().limited().model
    caches, _ = single.compute(draft_model=draft, num_draft_tokens=requested)
    assert single.options["num_draft_tokens"] == expected
    assert len(caches) == 2 and all(has_keys([cache], IDS[:-1]) for cache in caches)


@pytest.mark.parametrize("tokens", [[], ["token"]])
def test_single_replies_that_always_fail_end_the_server(tokens: list[str]) -> None:
    single = Single().limited()
    single.tokens, single.error = tokens, RuntimeError("bad luck")
    for _ in range(MOST_IN_A_ROW - 1):
        with pytest.raises(RuntimeError, match="bad luck"):
            single.compute()
    with pytest.raises(DeviceFailed, match="in a row failed"):
        single.compute()
