"""Prompts that wait for blocks of another prompt: for which prompts, and until when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.block import Root, pack_ids
from mlx_lm_kvpersist.request.saver import (
    MIN_TOKENS_BETWEEN,
    CheckpointSaver,
    RunningSequence,
    Saver,
)
from mlx_lm_kvpersist.request.serving import RequestState, Stage, awaits_another

ROOT = Root("model", "4b64")


class Waiting:
    """A lookup's knowledge of a prompt."""

    def __init__(self, ids: list[int], n_found: int = 0, *, saver: Any = Saver) -> None:
        self.stored = SimpleNamespace(packed_ids=pack_ids(ids), n_tokens=n_found)
        self.root, self.model = ROOT, SimpleNamespace(saver=saver)

    def waits(self, *others: RequestState) -> bool:
        lookup: Any = self
        known: dict[RequestState, int] = {}
        waits = awaits_another(lookup, others, known)
        assert awaits_another(lookup, others, known) == waits  # this time from `known`
        return waits


def begun(ids: list[int], n_system: int = 0) -> RequestState:
    """Return a request whose prompt is being computed."""
    sequence = RunningSequence(ROOT, len(ids), n_system=n_system, packed_ids=pack_ids(ids))
    return RequestState(root=ROOT, stage=Stage.PREFILL, sequence=sequence)


def saved(state: RequestState, n_tokens: int) -> None:
    block: Any = SimpleNamespace(stop=n_tokens)
    assert state.sequence is not None
    state.sequence.chain = [block]


IDS = list(range(3000))


def test_a_prompt_waits_until_what_it_shares_is_stored() -> None:
    taken = begun(IDS)
    same = Waiting([*IDS[:1100], *range(9000, 9100)])
    assert same.waits(taken)
    saved(taken, 768)
    assert same.waits(taken)
    saved(taken, 1024)  # 1,100 tokens are four whole blocks
    assert not same.waits(taken)


def test_a_shared_system_prompt_is_awaited_to_its_last_token() -> None:
    """Its end is stored although it is not a whole block, so nobody computes it again."""
    taken = begun(IDS, n_system=1090)
    same = Waiting([*IDS[:1100], *range(9000, 9100)])
    saved(taken, 1024)
    assert same.waits(taken)
    saved(taken, 1090)
    assert not same.waits(taken)


def test_nobody_waits_for_a_prompt_of_another_tenant() -> None:
    taken = begun(IDS)
    other = Waiting(IDS)
    assert other.waits(taken)
    other.root = Root("model", "4b64", namespace="other")
    assert not other.waits(taken)


@pytest.mark.parametrize(
    "found", [Waiting(IDS[:511]), Waiting(IDS, n_found=2600), Waiting(list(range(1, 3000)))]
)
def test_nobody_waits_for_less_than_two_blocks(found: Waiting) -> None:
    taken = begun(IDS)
    assert not found.waits(taken)


@pytest.mark.parametrize("stage", [Stage.DECODE, Stage.PARKED, Stage.DONE])
def test_nobody_waits_for_a_prompt_that_is_computed_no_further(stage: Stage) -> None:
    taken = begun(IDS)
    same = Waiting(IDS)
    assert same.waits(taken)
    taken.move(stage)
    assert not same.waits(taken)


def test_models_with_checkpoints_share_what_ends_at_one() -> None:
    taken = begun(IDS, n_system=2053)
    same = Waiting(IDS[:2500], saver=CheckpointSaver)
    assert same.waits(taken)
    saved(taken, 2048)  # too near the system prompt's end for another checkpoint
    assert not same.waits(taken)


@pytest.mark.parametrize(("n_common", "waits"), [(511, False), (512, True), (767, True)])
def test_two_whole_blocks_are_worth_waiting_for(n_common: int, waits: bool) -> None:
    taken = begun(IDS)
    same = Waiting([*IDS[:n_common], *range(9000, 9100)])
    assert same.waits(taken) == waits
    same.stored.n_tokens = 1
    assert not same.waits(taken)


@pytest.mark.parametrize(
    ("n_system", "n_shared"), [(1100, 1100), (1101, 1024), (2000, 1024)], ids=str
)
def test_a_system_prompt_that_is_not_shared_to_its_end_is_not_awaited(
    n_system: int, n_shared: int
) -> None:
    taken = begun(IDS, n_system=n_system)
    same = Waiting([*IDS[:1100], *range(9000, 9100)])
    saved(taken, n_shared - MIN_TOKENS_BETWEEN)
    assert same.waits(taken)
    saved(taken, n_shared - MIN_TOKENS_BETWEEN + 1)  # no checkpoint is nearer than that
    assert not same.waits(taken)
