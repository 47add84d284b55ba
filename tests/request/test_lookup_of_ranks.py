"""Ranks exchange few messages to agree on the tokens that they restore."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlx_lm_kvpersist.host.hooks import Prompt
from mlx_lm_kvpersist.ranks import Ranks
from mlx_lm_kvpersist.request import lookup as lookup_module
from mlx_lm_kvpersist.request.lookup import Lookup, Reuse

from .conftest import Conversations

pytestmark = pytest.mark.parametrize("loaded", ["byte-level"], indirect=True)


class TwoRanks(Ranks):
    """Rank 0 of two. The other rank reports the same, but at most `n_other` tokens."""

    def __init__(self, n_other: int = 1 << 40) -> None:
        super().__init__(2, 0)
        self.n_other, self.topics = n_other, list[str]()

    def _exchange(self, value: int, payload: bytes, what: str) -> list[tuple[int, int, bytes]]:
        self.topics.append(what)
        other = value if what == "the canary" else min(value, 2 * self.n_other + value % 2)
        return [(number, len(payload), payload) for number in (value, other)]


IDS = [5 + n % 200 for n in range(700)]


def restored(talk: Conversations, ranks: Ranks) -> Reuse:
    prompt = Prompt([*IDS, 5, 6, 7], [[*IDS, 5, 6, 7]], ["user"])
    loaded = replace(talk.loaded, ranks=ranks)
    lookup = Lookup(prompt, talk.root, talk.store, loaded, n_worth=len(IDS))
    lookup.hold()
    return lookup.restore()


@pytest.fixture
def stored(talk: Conversations) -> Conversations:
    talk.remember(IDS, 600)
    return talk


def test_a_restore_from_ram_takes_one_exchange(stored: Conversations) -> None:
    ranks = TwoRanks()
    assert restored(stored, ranks).outcome.n_reused >= 600
    assert ranks.topics == ["how much is restored"]


def test_a_restore_from_disk_also_agrees_on_the_canary(stored: Conversations) -> None:
    ranks = TwoRanks()
    stored.forget_hot_blocks()
    assert restored(stored, ranks).outcome.n_reused >= 600
    assert ranks.topics == ["how much is restored", "the canary"]


@pytest.mark.parametrize("step", ["_point", "_joined"])
def test_a_failed_lookup_restores_nothing_after_one_exchange(
    stored: Conversations, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*args: Any) -> Any:
        raise OSError("no index")

    ranks = TwoRanks()
    monkeypatch.setattr(lookup_module.Lookup, step, fail)
    assert restored(stored, ranks).outcome.n_reused == 0
    assert ranks.topics == ["how much is restored"]


def test_both_ranks_restore_the_smaller_number_of_tokens(stored: Conversations) -> None:
    ranks = TwoRanks(n_other=300)
    reuse = restored(stored, ranks)
    assert 0 < reuse.outcome.n_reused <= 300 and reuse.caches is not None
    assert all(cache.size() == reuse.outcome.n_reused for cache in reuse.caches)
    assert ranks.topics == ["how much is restored"] * 2
