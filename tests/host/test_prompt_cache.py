"""The prompt cache: plugins first, nothing raised, and never a fetch that leaves no token."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import pytest
from mlx_lm.models.cache import KVCache

from mlx_lm_kvpersist.host.hookspecs import hookimpl
from mlx_lm_kvpersist.host.prompt import RequestTokens
from tests.support.host import plugged


class Answers:
    """Fetches and keeps what the test says."""

    def __init__(self, fetch: Any = None, insert: Any = None) -> None:
        self.fetch, self.insert = fetch, insert

    @hookimpl
    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> Any:
        if isinstance(self.fetch, Exception):
            raise self.fetch
        return self.fetch

    @hookimpl
    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], cache_type: str
    ) -> Any:
        if isinstance(self.insert, Exception):
            raise self.insert
        return self.insert


def filled_cache(server: ModuleType, n_tokens: int) -> tuple[Any, list[Any]]:
    """Return a prompt cache that holds tokens 0 … n_tokens - 1, kept by stock."""
    import mlx.core as mx

    cache = server.LRUPromptCache(10)
    layer = KVCache()
    layer.update_and_fetch(mx.zeros((1, 1, n_tokens, 4)), mx.zeros((1, 1, n_tokens, 4)))
    cache.insert_cache("m", list(range(n_tokens)), [layer], cache_type="assistant")
    return cache, [layer]


def test_none_means_stock(patched_server: ModuleType) -> None:
    with plugged(Answers()):
        cache, _ = filled_cache(patched_server, 8)
        found, rest = cache.fetch_nearest_cache("m", [*range(8), 100, 101])
    assert rest == [100, 101]
    assert found[0].offset == 8


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


@pytest.mark.parametrize(
    "fetched",
    [
        ("cache", []),
        ("cache", [2]),
        ("cache", [0, 1, 2, 3]),
        (None, [3]),
        "no tuple",
        ("cache",),
    ],
)
def test_a_wrong_answer_is_a_miss(
    patched_server: ModuleType, fetched: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with plugged(Answers(fetch=fetched)):
        cache = patched_server.LRUPromptCache(10)
        assert cache.fetch_nearest_cache("m", [1, 2, 3]) == (None, [1, 2, 3])
    assert "fetch_nearest_cache returned a rest that is not an end" in caplog.text


@pytest.mark.parametrize("fetched", [(["cache"], [3]), (["cache"], [1, 2, 3]), (None, [1, 2, 3])])
def test_a_right_answer_is_passed_on(patched_server: ModuleType, fetched: Any) -> None:
    with plugged(Answers(fetch=fetched)):
        cache = patched_server.LRUPromptCache(10)
        assert cache.fetch_nearest_cache("m", [1, 2, 3]) == fetched


def test_failures_are_logged_once_a_kind_and_stock_goes_on(
    patched_server: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with plugged(Answers(fetch=KeyError("lost"), insert=OSError("full"))):
        cache, _ = filled_cache(patched_server, 4)
        for _ in range(3):
            found, rest = cache.fetch_nearest_cache("m", [0, 1, 2, 3, 9])
            assert (found[0].offset, rest) == (4, [9])
    messages = [record.getMessage() for record in caplog.records if record.exc_info]
    assert messages == [
        "hook insert_cache failed, the stock server's way is used",
        "hook fetch_nearest_cache failed, the stock server's way is used",
    ]
    assert caplog.records[0].name == "mlx_lm_kvpersist.host.manager"


@pytest.mark.parametrize(("answer", "n_kept"), [(None, 1), (True, 0), (False, 0)])
def test_stock_keeps_only_what_no_plugin_answers_for(
    patched_server: ModuleType, answer: bool | None, n_kept: int
) -> None:
    with plugged(Answers(insert=answer)):
        cache, _ = filled_cache(patched_server, 4)
    assert len(cache) == n_kept


def test_stock_does_not_keep_the_request(patched_server: ModuleType) -> None:
    cache, layers = filled_cache(patched_server, 4)
    tokens = RequestTokens([5, 6, 7], request="the body of a request")
    cache.insert_cache("m", tokens, layers, cache_type="user")
    kept = [tokens for lru in cache._lru._lrus.values() for _, tokens in lru]
    assert [type(tokens) for tokens in kept] == [list, list]
