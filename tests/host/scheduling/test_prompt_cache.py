"""The prompt cache: a plugin's requests stay with it, and every fetch leaves a token."""

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


class Saves(TakenRequest):
    """Records its arguments at a save, or raises."""

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


def taken_by(taker: Saves) -> TakenTokens:
    """Return tokens 1, 2, 3 of a request that a plugin took."""
    taken = Taken("saves", taker)
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
def test_what_no_plugin_took_is_stocks(
    patched_server: ModuleType, tokens: list[int], n_cached: int
) -> None:
    cache, _ = filled_cache(patched_server, 8)
    found, rest = cache.fetch_nearest_cache("m", tokens)
    assert (found[0].offset, rest) == (n_cached, tokens[n_cached:])


@pytest.mark.parametrize("n_tokens", [2, 8])
def test_an_exact_hit_of_stock_leaves_a_token(patched_server: ModuleType, n_tokens: int) -> None:
    """Stock returns an empty rest here, and its generation thread dies of it."""
    cache, _ = filled_cache(patched_server, 8)
    found, rest = cache.fetch_nearest_cache("m", list(range(8)))
    assert rest == [6, 7]
    assert found[0].offset == 6


def test_an_exact_hit_of_one_token_is_a_miss(patched_server: ModuleType) -> None:
    cache, _ = filled_cache(patched_server, 1)
    assert cache.fetch_nearest_cache("m", [0]) == (None, [0])


@pytest.mark.parametrize(("n_cached", "rest"), [(0, [1, 2, 3]), (1, [2, 3]), (2, [3])])
def test_a_taken_request_gets_its_plugins_caches_once(
    patched_server: ModuleType, n_cached: int, rest: list[int]
) -> None:
    cache = patched_server.LRUPromptCache(10)
    tokens = taken_by(Saves(n_cached))
    assert cache.fetch_nearest_cache("m", tokens) == (["caches"] if n_cached else None, rest)
    assert cache.fetch_nearest_cache("m", tokens) == (None, [1, 2, 3])


def test_what_a_plugin_took_is_saved_by_it_alone(patched_server: ModuleType) -> None:
    cache = patched_server.LRUPromptCache(10)
    cache.insert_cache("m", taken_by(taker := Saves()), ["caches"], cache_type="user")
    assert taker.saved == [([1, 2, 3], "user")]
    assert len(cache) == 0


def test_failures_are_logged_once_a_kind_and_the_server_goes_on(
    patched_server: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with plugged():
        cache, taker = patched_server.LRUPromptCache(10), Saves(error=OSError("full"))
        for _ in range(3):
            cache.insert_cache("m", taken_by(taker), ["caches"], cache_type="user")
    messages = [record.getMessage() for record in caplog.records if record.exc_info]
    assert messages == ["kvpersist: plugin saves failed in hook take_request; ignored"]
    assert caplog.records[0].name == "mlx_lm_kvpersist.host.manager"
    assert len(cache) == 0
