"""Models that continue only from checkpoints: which ones are written, kept and found."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_lm_kvpersist.block import Block, Checkpoint, Root, block_key, pack_ids
from mlx_lm_kvpersist.cache.geometry.kinds import GroupKind
from mlx_lm_kvpersist.cache.geometry.spec import (
    LayerGroup,
    ModelCacheSpec,
    TensorShape,
    probe_model,
)
from mlx_lm_kvpersist.cache.live.packed import GRID
from mlx_lm_kvpersist.cache.measuring.prefill_memory import CHECKPOINT_EVERY
from mlx_lm_kvpersist.request.outcome import Reason
from mlx_lm_kvpersist.request.saver import (
    MAX_BRANCHES,
    MAX_CHECKPOINTS,
    STATE,
    CheckpointSaver,
    RestorePoint,
    RunningSequence,
    window_kind,
)
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from models_check.build import build
from models_check.conversation import random_ids
from models_check.drive import Row, alone
from models_check.stored import StoredModel
from tests.support import keeps_short_chunks, settle, writer_held

WINDOW = 16
SHAPE = TensorShape(1, 32, "float32")
SLIDING = LayerGroup("0", GroupKind.SLIDING, "RotatingKVCache", (0,), SHAPE, SHAPE, window=WINDOW)
RECURRENT = LayerGroup("1", GroupKind.RECURRENT, "ArraysCache", (1,), states=(((3,), "float32"),))


def spec_of(*groups: LayerGroup) -> ModelCacheSpec:
    return ModelCacheSpec(groups, [])


def chain_of(lengths: list[int]) -> list[Block]:
    chain: list[Block] = []
    for n_tokens in lengths:
        parent = chain[-1].key if chain else b"root"
        start = chain[-1].stop if chain else 0
        packed = pack_ids(range(start, start + n_tokens))
        chain.append(Block(block_key(parent, packed), parent, start, packed, ""))
    return chain


@dataclass
class Checkpoints:
    """A store that has only checkpoints."""

    spec: ModelCacheSpec
    by_block: dict[bytes, list[Checkpoint]] = field(default_factory=dict)
    forked: set[bytes] = field(default_factory=set)
    ended: set[bytes] = field(default_factory=set)
    unsafe: set[bytes] = field(default_factory=set)

    def find(
        self, chain: list[Block], n_tokens: int, lost: Collection[bytes] = ()
    ) -> RestorePoint | None:
        return CheckpointSaver(self.spec, None).find(chain, n_tokens, cast(BlockStore, self), lost)

    def superseded(self, chain: list[Block]) -> list[Checkpoint]:
        saver, store = CheckpointSaver(self.spec, None), cast(BlockStore, self)
        sequence = RunningSequence(Root("model", "layout"), 0, chain=chain, session="own")
        return saver.superseded(sequence, self.by_block, store)

    def add(self, node: Block, kind: str, n_tokens: int = 0) -> Checkpoint:
        checkpoint = Checkpoint.at(node.key, kind, n_tokens)
        self.by_block.setdefault(node.key, []).append(checkpoint)
        return checkpoint

    def checkpoints(self, blocks: list[bytes]) -> dict[bytes, list[Checkpoint]]:
        return {key: list(self.by_block[key]) for key in blocks if key in self.by_block}

    def children(self, parent: bytes, limit: int) -> list[Block]:
        return []

    def forks(self, chain: list[Block]) -> set[bytes]:
        return self.forked

    def is_safe(self, key: bytes) -> bool:
        return key not in self.unsafe

    def ends(self, chain: list[Block], session: str | None) -> set[bytes]:
        return self.ended


@settings(max_examples=80)
@given(data=st.data())
def test_a_window_is_restorable_if_all_its_tokens_are_stored(data: st.DataObject) -> None:
    chain = chain_of(data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=8)))
    store = Checkpoints(spec_of(SLIDING))
    stored: set[int] = set()
    for node in chain:
        for n_tokens in data.draw(st.lists(st.integers(1, node.n_tokens), max_size=2, unique=True)):
            store.add(node, window_kind(WINDOW), n_tokens)
            stored |= set(range(node.stop - n_tokens, node.stop))
    total = chain[-1].stop
    wanted = data.draw(st.integers(1, total))

    def is_restorable(n_tokens: int) -> bool:
        return stored >= set(range(max(0, n_tokens - WINDOW), n_tokens))

    ends = [n for n in (wanted, *(node.stop for node in chain)) if n <= wanted]
    expected = max((n for n in ends if is_restorable(n)), default=None)
    point = store.find(chain, wanted)
    assert (point and point.n_tokens) == expected
    if point is None:
        return
    covered: list[int] = []
    start_of = {node.key: node.stop for node in chain}
    for piece in point.needed:
        assert piece.window == WINDOW and isinstance(piece.record, Checkpoint)
        first = start_of[piece.record.block] - piece.record.n_tokens
        covered += range(first + piece.start, first + piece.stop)
    assert covered == list(range(max(0, point.n_tokens - WINDOW), point.n_tokens))


def test_a_state_is_restorable_only_at_the_end_of_its_block() -> None:
    chain, store = chain_of([20, 20, 20]), Checkpoints(spec_of(RECURRENT))
    state = store.add(chain[1], STATE)
    point = store.find(chain, 60)
    assert point and point.n_tokens == 40 and [piece.record for piece in point.needed] == [state]
    assert store.find(chain, 39) is None
    assert store.find(chain, 60, {state.key}) is None


def test_a_model_with_windows_and_states_needs_both_checkpoints() -> None:
    chain, store = chain_of([20, 20]), Checkpoints(spec_of(SLIDING, RECURRENT))
    store.add(chain[1], STATE)
    assert store.find(chain, 40) is None
    store.add(chain[1], window_kind(WINDOW), 16)
    point = store.find(chain, 40)
    assert point and len(point.needed) == 2


def test_old_checkpoints_are_deleted_except_the_first_and_at_branches() -> None:
    chain, store = chain_of([20] * 12), Checkpoints(spec_of(SLIDING, RECURRENT))
    for node in chain:
        store.add(node, STATE)
        store.add(node, window_kind(WINDOW), 16)
    store.forked = {chain[3].key}
    deleted = {checkpoint.block for checkpoint in store.superseded(chain)}
    kept = {0, 3, *range(12 - MAX_CHECKPOINTS, 12)}
    assert deleted == {node.key for i, node in enumerate(chain) if i not in kept}
    store.by_block = {k: v for k, v in store.by_block.items() if k not in deleted}
    for i, node in enumerate(chain):
        point = store.find(chain, node.stop)
        assert point and (point.n_tokens == node.stop) == (i in kept)


def test_a_checkpoint_at_the_end_of_another_session_is_kept() -> None:
    chain, store = chain_of([20] * 12), Checkpoints(spec_of(RECURRENT))
    for node in chain:
        store.add(node, STATE)
    store.ended = {chain[2].key}
    deleted = {checkpoint.block for checkpoint in store.superseded(chain)}
    kept = {0, 2, *range(12 - MAX_CHECKPOINTS, 12)}
    assert deleted == {node.key for i, node in enumerate(chain) if i not in kept}


def test_the_last_checkpoint_before_a_branch_or_end_is_kept() -> None:
    """The branch itself may have no checkpoint, or a checkpoint that is only in RAM."""
    chain, store = chain_of([20] * 20), Checkpoints(spec_of(RECURRENT))
    states = {i: store.add(node, STATE) for i, node in enumerate(chain) if i not in (5, 6)}
    store.unsafe = {states[i].key for i in (8, 9, 10)}
    store.forked, store.ended = {chain[6].key}, {chain[9].key}
    deleted = {checkpoint.block for checkpoint in store.superseded(chain)}
    kept = {0, 4, 7, 9, *range(20 - MAX_CHECKPOINTS, 20)}
    assert deleted == {node.key for i, node in enumerate(chain) if i in states and i not in kept}


def test_only_the_newest_branches_keep_their_checkpoints() -> None:
    chain, store = chain_of([20] * 20), Checkpoints(spec_of(RECURRENT))
    for node in chain:
        store.add(node, STATE)
    store.forked = {node.key for node in chain}
    deleted = {checkpoint.block for checkpoint in store.superseded(chain)}
    kept = {0, *range(20 - MAX_CHECKPOINTS - MAX_BRANCHES, 20)}
    assert deleted == {node.key for i, node in enumerate(chain) if i not in kept}


def test_temporary_checkpoints_of_a_prompt_are_deleted_except_at_branches() -> None:
    chain = chain_of([CHECKPOINT_EVERY, 30, CHECKPOINT_EVERY - 30, CHECKPOINT_EVERY])
    store = Checkpoints(spec_of(RECURRENT))
    for node in chain:
        store.add(node, STATE)
    assert {checkpoint.block for checkpoint in store.superseded(chain)} == {
        chain[0].key,
        chain[2].key,
    }
    store.forked = {chain[0].key}
    assert {checkpoint.block for checkpoint in store.superseded(chain)} == {chain[2].key}


def test_windows_that_a_kept_checkpoint_needs_are_kept() -> None:
    chain, store = chain_of([6] * 12), Checkpoints(spec_of(SLIDING))
    for node in chain:
        store.add(node, STATE)
        store.add(node, window_kind(WINDOW), 6)
    deleted = {checkpoint.block for checkpoint in store.superseded(chain)}
    # The oldest kept checkpoint ends at block 12 - MAX_CHECKPOINTS. It needs only the windows of
    # the two blocks before that.
    first = 12 - MAX_CHECKPOINTS
    assert deleted == {node.key for node in chain[1:first]}
    kept = {
        checkpoint.block for checkpoints in store.by_block.values() for checkpoint in checkpoints
    } - deleted
    deleted_later = store.superseded(chain)
    assert {checkpoint.block for checkpoint in deleted_later if checkpoint.kind != STATE} == {
        node.key for node in chain[1 : first - 2]
    }
    assert len(kept) == 1 + MAX_CHECKPOINTS


FAMILIES = ["gemma3_text", "qwen3_next", "mamba2"]
if keeps_short_chunks():
    FAMILIES.append("llama4")


@cache
def built(name: str, window: int | None = None) -> tuple[Any, ModelCacheSpec]:
    """Return a model of the zoo, perhaps with a window of another length, and its spec."""
    model = build(name, config={"sliding_window": window} if window else {})
    return model, probe_model(model)


@pytest.fixture(params=FAMILIES)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoredModel]:
    model_with_store = StoredModel(*built(request.param), tmp_path)
    yield model_with_store
    model_with_store.close()


def have_conversation(stored: StoredModel, n_turns: int, n_user: int = 21) -> list[list[int]]:
    """Have a conversation; return its ids after each turn."""
    system = random_ids(1, 40)
    history: list[int] = []
    histories: list[list[int]] = []
    for turn in range(n_turns):
        user = random_ids(100 + turn, n_user)
        reply = stored.answer([system, [*history, *user]], n_new=6)
        history += [*user, *reply.ids]
        histories.append([*system, *history])
    return histories


def checkpoints_of(stored: StoredModel, ids: list[int]) -> list[Checkpoint]:
    keys, parent = [], stored.loaded.root.key
    while parent is not None:
        children = [n for n in stored.store.children(parent) if n.ids == ids[n.start : n.stop]]
        parent = children[0].key if children else None  # type: ignore[assignment]
        keys += [parent] if parent else []
    return [
        checkpoint
        for checkpoints in stored.store.checkpoints(keys).values()
        for checkpoint in checkpoints
    ]


def next_logits(stored: StoredModel, ids: list[int], row: Row) -> np.ndarray[Any, Any]:
    return np.array(stored.model(mx.array([ids[row.n_cached :]]), cache=row.caches)[0, -1])


def assert_right(stored: StoredModel, ids: list[int], row: Row) -> None:
    scratch = stored.spec.make_cache()
    for start in range(0, len(ids), GRID):
        logits = stored.model(mx.array([ids[start : start + GRID]]), cache=scratch)
    expected = np.array(logits[0, -1])
    restored = next_logits(stored, ids, row)
    assert np.abs(restored - expected).max() <= 1e-3 * np.abs(expected).max()


def test_the_number_of_checkpoints_does_not_grow_with_turns(stored: StoredModel) -> None:
    counts = []
    for n_turns in (6, 12):
        whole = have_conversation(stored, n_turns)[-1]
        stored.store.drain()
        counts.append(len(checkpoints_of(stored, whole)))
    # Each resume point has a state, and a window in two blocks.
    assert all(MAX_CHECKPOINTS <= count <= 3 * (MAX_CHECKPOINTS + 1) for count in counts)


def test_every_turn_continues_from_the_end_of_the_previous_turn(stored: StoredModel) -> None:
    have_conversation(stored, 5)
    assert [outcome.n_reused for outcome in stored.outcomes] == [0, 67, 94, 121, 148]


def test_a_repeated_prompt_continues_from_its_last_checkpoint(stored: StoredModel) -> None:
    histories = have_conversation(stored, 3)
    prompt = histories[-1][:-6]
    row = stored.row([prompt], 1, None)
    if hasattr(stored.spec.template[0], "merge"):
        assert row.n_cached == len(prompt) - 1
    else:
        # A model that is served alone saves a prompt only with the reply.
        assert row.n_cached == len(histories[-2])
    assert_right(stored, prompt, row)


def test_an_edit_of_an_old_turn_continues_from_the_first_checkpoint(stored: StoredModel) -> None:
    histories = have_conversation(stored, 8)
    stored.store.drain()
    ids = [*histories[1], *random_ids(7, 9)]
    row = stored.row([ids], 1, None)
    # A model that is served alone saves a prompt only with the reply, not after the system prompt.
    is_batched = hasattr(stored.spec.template[0], "merge")
    assert row.n_cached == (40 if is_batched else len(histories[0]))
    assert stored.outcomes[-1].reason is Reason.NO_CHECKPOINT
    assert_right(stored, ids, row)


def test_old_checkpoints_are_deleted_while_the_writer_is_blocked(stored: StoredModel) -> None:
    """The session's leaf on disk is an early turn, and must not count as another session's end."""
    histories = have_conversation(stored, 1)
    stored.store.drain()
    with writer_held(stored.store):
        assert have_conversation(stored, 8)[0] == histories[0]
    row = stored.row([[*histories[0], *random_ids(7, 9)]], 1, None)
    is_batched = hasattr(stored.spec.template[0], "merge")
    assert row.n_cached == (40 if is_batched else len(histories[0]))


def test_a_damaged_checkpoint_costs_only_its_resume_point(stored: StoredModel) -> None:
    histories = have_conversation(stored, 4)
    stored.restart()
    chain = _path(stored, histories[-1])
    point = stored.loaded.saver.find(chain, len(histories[-1]), stored.store)
    assert point is not None and point.n_tokens == len(histories[-1])
    for checkpoint in [
        piece.record for piece in point.needed if isinstance(piece.record, Checkpoint)
    ][-1:]:
        name = f"{checkpoint.key.hex()}.safetensors"
        (path,) = stored.folder.rglob(name)
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    ids = [*histories[-1], *random_ids(7, 9)]
    row = stored.row([ids], 1, None)
    assert 0 < row.n_cached < len(histories[-1])
    assert stored.outcomes[-1].reason is Reason.DAMAGED
    assert_right(stored, ids, row)


def test_all_missing_checkpoints_are_saved_with_the_next_turn(tmp_path: Path) -> None:
    """The index still has the checkpoints after the first missing ones."""
    stored = StoredModel(*built("gemma3_text", 1500), tmp_path)
    prompt, reply = [random_ids(1, 40), random_ids(2, 1400)], random_ids(3, 6)
    stored.answer(prompt, 6, reply)
    stored.store.drain()
    stored.store.pool.clear()
    for path in (tmp_path / "checkpoints").rglob("*.safetensors"):
        path.unlink()
    whole = stored.answer(prompt, 6, reply).tokens
    stored.restart()
    row = stored.row([[*whole, *random_ids(7, 9)]], 1, None)
    assert row.n_cached == len(whole)
    assert_right(stored, [*whole, *random_ids(7, 9)], row)
    stored.close()


def test_a_long_prompt_keeps_only_the_windows_before_its_checkpoints(tmp_path: Path) -> None:
    model, spec = built("gemma3_text")
    stored = StoredModel(model, spec, tmp_path)
    (window,) = stored.spec.sliding
    reply = alone(model, stored.row([random_ids(1, 40), random_ids(2, 2000)], 6, None))
    stored.store.drain()
    n_kept = sum(checkpoint.n_tokens for checkpoint in checkpoints_of(stored, reply.tokens))
    stored.close()
    # The checkpoints are at 40, 2039 and 2045. Each has a window before it (the last two overlap),
    # and the newest tokens in full precision.
    assert n_kept <= 3 * window + 40 + 247 + 253


def test_windows_of_several_blocks_keep_the_newest_turns_and_system_prompt(tmp_path: Path) -> None:
    """Ends of blocks inside a long window do not count as checkpoints."""
    stored = StoredModel(*built("gemma3_text", 300), tmp_path)
    histories = have_conversation(stored, 5, n_user=270)
    stored.store.drain()
    for n_back in range(3):
        ids = [*histories[-1 - n_back], *random_ids(7 + n_back, 40)]
        row = stored.row([ids], 1, None)
        assert row.n_cached == len(histories[-1 - n_back])
        assert_right(stored, ids, row)
    fresh = stored.row([[*random_ids(1, 40), *random_ids(8, 30)]], 1, None)
    assert fresh.n_cached == 40
    stored.close()


TOKENS_PER_S = 100.0
MAX_LOSS_S = 1.0
SYSTEM = random_ids(1, 40)


@pytest.fixture
def postponing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoredModel]:
    """A model whose checkpoints are written if a kill would lose 100 tokens or more."""
    name, _, window = request.param.partition("/")
    limits = StoreLimits(1 << 30, 1 << 30, max_loss_s=MAX_LOSS_S)
    stored = StoredModel(*built(name, int(window) if window else None), tmp_path, limits)
    for n_tokens in (512, 1024, 512, 1024):
        stored.loaded.speed.pace.learn(1, n_tokens, n_tokens / TOKENS_PER_S)
    yield stored
    stored.close()


@contextmanager
def killed(stored: StoredModel) -> Iterator[StoredModel]:
    """Yield the store as a kill leaves it after the writer's queue is empty."""
    settle(stored.store.writer)
    other = StoredModel(stored.model, stored.spec, stored.folder)
    yield other
    other.close()


@pytest.mark.parametrize("postponing", ["gemma3_text", "qwen3_next"], indirect=True)
def test_a_kill_loses_at_most_the_allowed_tokens(postponing: StoredModel) -> None:
    """Every turn is checked, up to its end and up to the end of its prompt."""
    system, history = random_ids(1, 40), list[int]()
    most = MAX_LOSS_S * TOKENS_PER_S
    written = set[bytes]()
    n_lost: list[int] = []
    for turn in range(14):
        user = random_ids(100 + turn, 21)
        prompt = [*system, *history, *user]
        reply = postponing.answer([system, [*history, *user]], n_new=6)
        assert postponing.outcomes[-1].n_reused == (len(prompt) - 21 if turn else 0)
        history += [*user, *reply.ids]
        whole = [*system, *history]
        with killed(postponing) as left:
            written |= left.store.index.keys("checkpoints")
            for ids in (whole, prompt):
                row = left.row([[*ids, *random_ids(7, 9)]], 1, None)
                n_lost.append(len(ids) - row.n_cached)
            if turn % 6 == 5:
                assert_right(left, [*prompt, *random_ids(7, 9)], row)
    assert max(n_lost) <= most and max(n_lost) > most / 2
    # One state, and one window in two blocks, are written for each `most` tokens, not each turn.
    assert len(written) <= 3 * len(whole) / most + 3
    postponing.store.drain()
    with killed(postponing) as left:
        row = left.row([[*whole, *random_ids(7, 9)]], 1, None)
        assert row.n_cached == len(whole)
        assert_right(left, [*whole, *random_ids(7, 9)], row)


def test_a_first_checkpoint_is_written_at_once_unless_temporary(tmp_path: Path) -> None:
    """A temporary checkpoint is postponed if computing it again is fast, even the first."""
    limits = StoreLimits(1 << 30, 1 << 30, max_loss_s=MAX_LOSS_S)
    stored = StoredModel(*built("mamba2"), tmp_path, limits)
    for n_tokens in (512, 1024, 512, 1024):
        stored.loaded.speed.pace.learn(1, n_tokens, n_tokens / (100 * TOKENS_PER_S))
    ids = random_ids(1, CHECKPOINT_EVERY)
    for cache_type, n_written in (("prefill", 0), ("user", 1)):
        prompt = ids if cache_type == "prefill" else ids[:-7]
        caches = stored.spec.make_cache()
        mx.eval(stored.model(mx.array([prompt]), cache=caches))
        sequence = RunningSequence(stored.loaded.root, len(ids) + 1, 0, [])
        stored.loaded.save(sequence, prompt, caches, cache_type, stored.store)
        settle(stored.store.writer)
        assert len(list((tmp_path / "checkpoints").rglob("*.safetensors"))) == n_written
    stored.close()


def n_reusable_after_kill(postponing: StoredModel, ids: list[int]) -> int:
    """Return the number of these tokens that can be reused after a kill."""
    with killed(postponing) as left:
        return left.row([[*ids, *random_ids(7, 9)]], 1, None).n_cached


@pytest.mark.parametrize("postponing", ["gemma3_text/30"], indirect=True)
def test_only_the_needed_end_of_each_window_is_written(postponing: StoredModel) -> None:
    """RAM has the windows of whole turns; a restore needs only their ends."""
    postponing.store.writer.now = lambda: 0.0
    whole = have_conversation(postponing, 9)[-1]
    with killed(postponing) as left:
        checkpoints = checkpoints_of(left, whole)
    n_points = sum(checkpoint.kind == STATE for checkpoint in checkpoints)
    assert n_points >= 3 and sum(checkpoint.n_tokens for checkpoint in checkpoints) == 30 * n_points


def add_turn(postponing: StoredModel, session: str, history: list[int], seed: int) -> list[int]:
    """Have a turn of a session; return the history with this turn."""
    user = random_ids(seed, 21)
    row = postponing.row([SYSTEM, [*history, *user]], 6, None, session)
    reply = alone(postponing.model, row, postponing.spec.batches)
    return [*history, *user, *reply.ids]


@pytest.mark.parametrize(
    ("postponing", "is_evicted"),
    [
        pytest.param("gemma3_text", False, id="windows, in RAM"),
        pytest.param("mamba2", True, id="states, evicted from RAM"),
        pytest.param("gemma3_text", True, marks=pytest.mark.slow, id="windows, evicted from RAM"),
        pytest.param("mamba2", False, marks=pytest.mark.slow, id="states, in RAM"),
    ],
    indirect=["postponing"],
)
def test_a_long_session_costs_other_sessions_at_most_the_allowed_loss(
    postponing: StoredModel, is_evicted: bool
) -> None:
    """The other ends (system prompt, session, branch) are far before the end of the session."""
    history = list[int]()
    for seed in range(100, 109):
        history = add_turn(postponing, "first", history, seed)
    ends = [SYSTEM, [*SYSTEM, *history]]
    for seed in range(200, 209):
        history = add_turn(postponing, "second", history, seed)
    history, before = add_turn(postponing, "second", history, 300), history
    ends += [[*SYSTEM, *history], [*SYSTEM, *add_turn(postponing, "third", before, 301)]]
    for seed in range(400, 425):
        if is_evicted:
            settle(postponing.store.writer)
            postponing.store.pool.release(1 << 40)
        history = add_turn(postponing, "second", history, seed)
    lost = [len(ids) - n_reusable_after_kill(postponing, ids) for ids in ends]
    assert lost[0] == 0 and max(lost) <= MAX_LOSS_S * TOKENS_PER_S


@pytest.mark.parametrize("postponing", ["mamba2"], indirect=True)
def test_regenerated_replies_leave_no_extra_checkpoints(postponing: StoredModel) -> None:
    prompt = [random_ids(1, 40), random_ids(2, 21)]
    for seed in range(5):
        postponing.answer(prompt, 6, random_ids(10 + seed, 6))
    postponing.store.drain()
    # The ends of the system prompt, of the user's message and of the last reply.
    assert postponing.store.disk.index.totals().n_checkpoints <= 3
    assert len(list((postponing.folder / "checkpoints").rglob("*.safetensors"))) <= 3


@pytest.mark.parametrize("stored", ["gemma3_text", "mamba2"], indirect=True)
@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_second_reply_keeps_a_pinned_or_other_sessions_reply(
    stored: StoredModel, is_pinned: bool
) -> None:
    prompt, histories = [random_ids(1, 40), random_ids(2, 21)], list[list[int]]()
    for seed, session in enumerate(["zoo", "zoo" if is_pinned else "another"]):
        row = stored.row(prompt, 6, random_ids(10 + seed, 6), session)
        histories.append(alone(stored.model, row, stored.spec.batches).tokens)
        stored.store.drain()
        if is_pinned:
            stored.store.disk.set_pinned(stored.store.index.sessions()[0], True)
    for whole in histories:
        row = stored.row([[*whole, *random_ids(7, 9)]], 1, None)
        assert row.n_cached == len(whole)


@pytest.mark.parametrize(
    "stored",
    ["gemma3_text", pytest.param("qwen3_next", marks=pytest.mark.slow), "mamba2"],
    indirect=True,
)
def test_checkpoints_do_not_accumulate_if_templates_drop_reasoning(stored: StoredModel) -> None:
    """Replies come back without their first tokens, so every turn is a branch.

    A model that is served alone has no checkpoint before a reply, and computes such a turn again.
    """
    system, history, counts = random_ids(1, 40), [], []  # type: ignore[var-annotated]
    for turn in range(22):
        user = random_ids(100 + turn, 21)
        reply = stored.answer([system, [*history, *user]], n_new=6)
        history += [*user, *reply.ids[3:]]
        stored.store.drain()
        counts.append(stored.store.index.totals().n_checkpoints)
    assert max(counts[14:]) <= max(counts[:14]) + 2


def _path(stored: StoredModel, ids: list[int]) -> list[Block]:
    path: list[Block] = []
    parent = stored.loaded.root.key
    while True:
        children = [n for n in stored.store.children(parent) if n.ids == ids[n.start : n.stop]]
        if not children:
            return path
        path.append(children[0])
        parent = children[0].key
