"""The prompt cache: plugins serve the requests they took; every fetch leaves a token."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
from mlx_lm.models.cache import KVCache

from mlx_lm_kvpersist.host.hooks import Prepared, Prompt, TakenRequest
from mlx_lm_kvpersist.host.manager import Taken, TakenTokens
from tests.support.host import plugged


class SavingRequest(TakenRequest):
    """A request that records its saves, or raises an error."""

    def __init__(self, n_cached: int = 0, error: Exception | None = None) -> None:
        super().__init__(Prompt([1, 2, 3], [[1, 2, 3]], ["user"]))
        self.n_cached, self.error = n_cached, error
        self.saved: list[tuple[list[int], str]] = []

    def enter(self) -> Prepared:
        return Prepared(self.prompt, ["caches"] if self.n_cached else None, self.n_cached)

    def insert(self, tokens: Sequence[int], caches: list[Any], cache_type: str) -> None:
        if self.error is not None:
            raise self.error
        self.saved.append((list(tokens), cache_type))


def taken_by(request: SavingRequest) -> TakenTokens:
    """Return tokens 1, 2, 3 of a request that a plugin took."""
    taken = Taken("saves", request)
    taken.enter()
    return TakenTokens([1, 2, 3], taken)


def filled_cache(server: ModuleType, n_tokens: int) -> tuple[Any, list[Any]]:
    """Return a prompt cache with tokens 0 … n_tokens - 1, saved by stock."""
    import mlx.core as mx

    cache = server.LRUPromptCache(10)
    layer = KVCache()
    layer.update_and_fetch(mx.zeros((1, 1, n_tokens, 4)), mx.zeros((1, 1, n_tokens, 4)))
    cache.insert_cache("m", list(range(n_tokens)), [layer], cache_type="assistant")
    return cache, [layer]


@pytest.mark.parametrize(
    ("tokens", "n_cached"), [([*range(8), 100, 101], 8), ([*range(5), 100], 5), ([*range(5)], 4)]
)
def test_untaken_tokens_are_fetched_from_stocks_cache(
    patched_server: ModuleType, tokens: list[int], n_cached: int
) -> None:
    cache, _ = filled_cache(patched_server, 8)
    caches, rest = cache.fetch_nearest_cache("m", tokens)
    assert (caches[0].offset, rest) == (n_cached, tokens[n_cached:])


@pytest.mark.parametrize("n_tokens", [2, 8])
def test_exact_hit_in_stocks_cache_leaves_tokens_to_compute(
    patched_server: ModuleType, n_tokens: int
) -> None:
    """Stock returns an empty rest here, which ends its generation thread."""
    cache, _ = filled_cache(patched_server, n_tokens)
    caches, rest = cache.fetch_nearest_cache("m", list(range(n_tokens)))
    assert (caches[0].offset, rest) == (n_tokens - 2, [n_tokens - 2, n_tokens - 1])


def test_exact_hit_of_one_token_is_a_miss(patched_server: ModuleType) -> None:
    cache, _ = filled_cache(patched_server, 1)
    assert cache.fetch_nearest_cache("m", [0]) == (None, [0])


@pytest.mark.parametrize(("n_cached", "rest"), [(0, [1, 2, 3]), (1, [2, 3]), (2, [3])])
def test_a_taken_request_gets_its_plugins_caches_once(
    patched_server: ModuleType, n_cached: int, rest: list[int]
) -> None:
    cache = patched_server.LRUPromptCache(10)
    tokens = taken_by(SavingRequest(n_cached))
    assert cache.fetch_nearest_cache("m", tokens) == (["caches"] if n_cached else None, rest)
    assert cache.fetch_nearest_cache("m", tokens) == (None, [1, 2, 3])


def test_taken_request_is_saved_by_its_plugin_and_not_by_stock(patched_server: ModuleType) -> None:
    cache = patched_server.LRUPromptCache(10)
    cache.insert_cache("m", taken_by(request := SavingRequest()), ["caches"], cache_type="user")
    assert request.saved == [([1, 2, 3], "user")]
    assert len(cache) == 0


def test_repeated_save_failure_is_logged_once_and_raises_nothing(
    patched_server: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with plugged():
        cache, request = patched_server.LRUPromptCache(10), SavingRequest(error=OSError("full"))
        for _ in range(3):
            cache.insert_cache("m", taken_by(request), ["caches"], cache_type="user")
    messages = [record.getMessage() for record in caplog.records if record.exc_info]
    assert messages == ["kvpersist: plugin saves failed in hook take_request; ignored"]
    assert caplog.records[0].name == "mlx_lm_kvpersist.host.manager"
    assert len(cache) == 0
