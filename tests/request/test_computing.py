"""Prompts that wait for what another computes: for whom, and for whom not any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.block import Root
from mlx_lm_kvpersist.host.prompt import Prompt
from mlx_lm_kvpersist.request.checkpoint_saver import MIN_TOKENS_BETWEEN, CheckpointSaver
from mlx_lm_kvpersist.request.computing import Computing, common_length
from mlx_lm_kvpersist.request.prefix_saver import PrefixSaver
from mlx_lm_kvpersist.request.state import RequestState, RunningSequence

ROOT = Root("model", "4b64")


class Found:
    """What a lookup knows of a prompt."""

    def __init__(self, ids: list[int], n_found: int = 0, *, saver: Any = PrefixSaver) -> None:
        self.fed = Prompt(ids, [ids], ["user"])
        self.n_found, self.root = n_found, ROOT
        self.model = SimpleNamespace(saver=saver)
        self.n_shared: dict[int, Any] = {}


def begun(ids: list[int], n_system: int = 0) -> RunningSequence:
    """Return a request whose prompt is being computed."""
    state = RequestState(root=ROOT)
    return RunningSequence(state, len(ids), n_system=n_system, ids=tuple(ids))


def saved(sequence: RunningSequence, n_tokens: int) -> None:
    block: Any = SimpleNamespace(stop=n_tokens)
    sequence.chain = [block]


IDS = list(range(3000))


def test_a_prompt_waits_until_what_it_shares_is_stored() -> None:
    computing = Computing()
    taken = begun(IDS)
    computing.add(taken)
    same: Any = Found([*IDS[:1100], *range(9000, 9100)])
    assert computing.awaited(same)
    saved(taken, 768)
    assert computing.awaited(same)
    saved(taken, 1024)  # 1,100 tokens are four whole blocks
    assert not computing.awaited(same)


def test_a_shared_system_prompt_is_awaited_to_its_last_token() -> None:
    """Its end is stored though it is no whole block: nobody needs to compute it again."""
    computing = Computing()
    taken = begun(IDS, n_system=1090)
    computing.add(taken)
    same: Any = Found([*IDS[:1100], *range(9000, 9100)])
    saved(taken, 1024)
    assert computing.awaited(same)
    saved(taken, 1090)
    assert not computing.awaited(same)


def test_nobody_waits_for_a_prompt_of_another_tenant() -> None:
    computing = Computing()
    computing.add(begun(IDS))
    other: Any = Found(IDS)
    assert computing.awaited(other)
    other.root = Root("model", "4b64", namespace="other")
    assert not computing.awaited(other)


@pytest.mark.parametrize(
    "found", [Found(IDS[:511]), Found(IDS, n_found=2600), Found(list(range(1, 3000)))]
)
def test_nobody_waits_for_less_than_two_blocks(found: Any) -> None:
    computing = Computing()
    computing.add(begun(IDS))
    assert not computing.awaited(found)


@pytest.mark.parametrize("end", ["computed", "over"])
def test_nobody_waits_for_a_prompt_that_is_computed_no_further(end: str) -> None:
    computing = Computing()
    computing.add(taken := begun(IDS))
    same: Any = Found(IDS)
    assert computing.awaited(same)
    if end == "computed":
        taken.is_computed = True
    else:
        taken.request.is_over = True
    assert not computing.awaited(same)


def test_models_with_checkpoints_share_what_ends_at_one() -> None:
    computing = Computing()
    taken = begun(IDS, n_system=2053)
    computing.add(taken)
    same: Any = Found(IDS[:2500], saver=CheckpointSaver)
    assert computing.awaited(same)
    saved(taken, 2048)  # the end of the system prompt is too near to be another one
    assert not computing.awaited(same)


@pytest.mark.parametrize(("n_common", "waits"), [(511, False), (512, True), (767, True)])
def test_two_whole_blocks_are_worth_waiting_for(n_common: int, waits: bool) -> None:
    computing = Computing()
    computing.add(begun(IDS))
    same: Any = Found([*IDS[:n_common], *range(9000, 9100)])
    assert computing.awaited(same) == waits
    same.n_found = 1
    assert not computing.awaited(same)


@pytest.mark.parametrize(
    ("n_system", "n_shared"), [(1100, 1100), (1101, 1024), (2000, 1024)], ids=str
)
def test_a_system_prompt_that_is_not_shared_to_its_end_is_not_awaited(
    n_system: int, n_shared: int
) -> None:
    computing = Computing()
    taken = begun(IDS, n_system=n_system)
    computing.add(taken)
    same: Any = Found([*IDS[:1100], *range(9000, 9100)])
    saved(taken, n_shared - MIN_TOKENS_BETWEEN)
    assert computing.awaited(same)
    saved(taken, n_shared - MIN_TOKENS_BETWEEN + 1)  # no checkpoint is made nearer than that
    assert not computing.awaited(same)


def test_common_lengths() -> None:
    assert [common_length(IDS, other) for other in ([], IDS, IDS[:7], [0, 1, 5])] == [0, 3000, 7, 2]
