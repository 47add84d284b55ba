"""A prompt waits while another request computes blocks that both share."""

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
    """A lookup of a prompt that may wait."""

    def __init__(self, ids: list[int], n_found: int = 0, *, saver: Any = Saver) -> None:
        self.stored = SimpleNamespace(packed_ids=pack_ids(ids), n_tokens=n_found)
        self.root, self.model = ROOT, SimpleNamespace(saver=saver)

    def waits(self, *others: RequestState) -> bool:
        lookup: Any = self
        known: dict[RequestState, int] = {}
        waits = awaits_another(lookup, others, known)
        assert awaits_another(lookup, others, known) == waits  # this time from `known`
        return waits


def in_prefill(ids: list[int], n_system: int = 0) -> RequestState:
    """Return a request whose prompt is being computed."""
    sequence = RunningSequence(ROOT, len(ids), n_system=n_system, packed_ids=pack_ids(ids))
    return RequestState(root=ROOT, stage=Stage.PREFILL, sequence=sequence)


def save_up_to(state: RequestState, n_tokens: int) -> None:
    block: Any = SimpleNamespace(stop=n_tokens)
    assert state.sequence is not None
    state.sequence.chain = [block]


IDS = list(range(3000))


def test_a_prompt_waits_until_its_shared_blocks_are_stored() -> None:
    computing = in_prefill(IDS)
    same = Waiting([*IDS[:1100], *range(9000, 9100)])
    assert same.waits(computing)
    save_up_to(computing, 768)
    assert same.waits(computing)
    save_up_to(computing, 1024)  # 1,100 tokens are four whole blocks
    assert not same.waits(computing)


def test_a_prompt_waits_for_all_of_a_shared_system_prompt() -> None:
    """The end of a system prompt is stored although it is not the end of a whole block."""
    computing = in_prefill(IDS, n_system=1090)
    same = Waiting([*IDS[:1100], *range(9000, 9100)])
    save_up_to(computing, 1024)
    assert same.waits(computing)
    save_up_to(computing, 1090)
    assert not same.waits(computing)


def test_a_prompt_does_not_wait_for_another_tenant() -> None:
    computing = in_prefill(IDS)
    other = Waiting(IDS)
    assert other.waits(computing)
    other.root = Root("model", "4b64", namespace="other")
    assert not other.waits(computing)


@pytest.mark.parametrize("waiting", [Waiting(IDS, n_found=2600), Waiting(list(range(1, 3000)))])
def test_a_prompt_does_not_wait_for_less_than_two_blocks(waiting: Waiting) -> None:
    computing = in_prefill(IDS)
    assert not waiting.waits(computing)


@pytest.mark.parametrize("stage", [Stage.DECODE, Stage.PARKED, Stage.DONE])
def test_a_prompt_does_not_wait_for_requests_after_prefill(stage: Stage) -> None:
    computing = in_prefill(IDS)
    same = Waiting(IDS)
    assert same.waits(computing)
    computing.move(stage)
    assert not same.waits(computing)


def test_with_checkpoints_waiting_ends_at_the_last_shared_checkpoint() -> None:
    computing = in_prefill(IDS, n_system=2053)
    same = Waiting(IDS[:2500], saver=CheckpointSaver)
    assert same.waits(computing)
    save_up_to(computing, 2048)  # too near the system prompt's end for another checkpoint
    assert not same.waits(computing)


@pytest.mark.parametrize(("n_common", "waits"), [(511, False), (512, True), (767, True)])
def test_a_prompt_waits_only_if_two_whole_blocks_are_missing(n_common: int, waits: bool) -> None:
    computing = in_prefill(IDS)
    same = Waiting([*IDS[:n_common], *range(9000, 9100)])
    assert same.waits(computing) == waits
    same.stored.n_tokens = 1
    assert not same.waits(computing)


@pytest.mark.parametrize(
    ("n_system", "n_shared"), [(1100, 1100), (1101, 1024), (2000, 1024)], ids=str
)
def test_a_system_prompt_counts_only_if_shared_to_its_end(n_system: int, n_shared: int) -> None:
    computing = in_prefill(IDS, n_system=n_system)
    same = Waiting([*IDS[:1100], *range(9000, 9100)])
    save_up_to(computing, n_shared - MIN_TOKENS_BETWEEN)
    assert same.waits(computing)
    save_up_to(computing, n_shared - MIN_TOKENS_BETWEEN + 1)  # no checkpoint is nearer than that
    assert not same.waits(computing)
