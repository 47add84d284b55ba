"""System prompts that several conversations begin with are pinned as sessions of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.match.block import Block, Root, block_key, pack_ids
from mlx_lm_kvpersist.request import insert as insert_module
from mlx_lm_kvpersist.request.insert import SYSTEM_SESSION, pin_system
from mlx_lm_kvpersist.request.lookup import RequestState, Sequence
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits, Turn
from mlx_lm_kvpersist.store.index import Leaf

ROOT = Root("fingerprint", "4b64")
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    made = BlockStore(tmp_path / "store", StoreLimits(1 << 30, 1 << 30))
    yield made
    made.close()


def sequence(store: BlockStore, first_id: int, question: str, n_system: int = 256) -> Sequence:
    """A stored conversation: a block of the system prompt, and one of 256 tokens after it."""
    parent, chain = ROOT.key, []
    for start, token in ((0, first_id), (256, 1000 + hash(question) % 1000)):
        packed = pack_ids([token] * 256)
        chain.append(Block(block_key(parent, packed), parent, start, packed, ""))
        parent = chain[-1].key
    arrays = {"0.k": mx.zeros(1)}
    mx.eval(arrays)
    keys = tuple(block.key for block in chain)
    turn = Turn(ROOT, tuple(chain), Leaf(question, keys[-1], 512, keys))
    store.save_turn(turn, [(block, arrays) for block in chain if block.key not in store])
    store.drain()
    messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": question}]
    state = RequestState(session=question, root=ROOT, messages=messages)
    return Sequence(state, 512, 0, chain, n_system)


def pinned(store: BlockStore) -> list[tuple[bytes, int]]:
    store.drain()
    return [
        (session.leaf, session.n_tokens)
        for session in store.index.sessions()
        if session.name == SYSTEM_SESSION and session.pinned
    ]


def test_the_second_conversation_pins_what_both_begin_with(store: BlockStore) -> None:
    asked: dict[bytes, int] = {}
    first = sequence(store, 1, "What?")
    for _ in range(2):  # its second turn is no second conversation
        pin_system(first, store, asked)
    assert pinned(store) == []
    second = sequence(store, 1, "Why?")
    pin_system(second, store, asked)
    assert pinned(store) == [(first.chain[0].key, 256)]
    pin_system(sequence(store, 2, "Other?"), store, asked)
    assert len(pinned(store)) == 1


def test_another_session_that_ends_there_changes_nothing(store: BlockStore) -> None:
    asked: dict[bytes, int] = {}
    first = sequence(store, 1, "What?")
    key = first.chain[0].key
    store.save_turn(Turn(ROOT, (first.chain[0],), Leaf("warmed", key, 256, (key,))), [])
    store.drain()
    pin_system(first, store, asked)
    pin_system(sequence(store, 1, "Why?"), store, asked)
    assert pinned(store) == [(key, 256)]


def test_a_user_who_unpins_it_is_heeded(store: BlockStore) -> None:
    asked: dict[bytes, int] = {}
    for question in ("What?", "Why?"):
        pin_system(sequence(store, 1, question), store, asked)
    store.drain()
    (session,) = (one for one in store.index.sessions() if one.name == SYSTEM_SESSION)
    store.disk.set_pinned(session, False)
    pin_system(sequence(store, 1, "When?"), store, asked)
    assert pinned(store) == []


@pytest.mark.parametrize("n_system", [0, 255])
def test_less_than_a_block_is_not_pinned(store: BlockStore, n_system: int) -> None:
    asked: dict[bytes, int] = {}
    for question in ("What?", "Why?"):
        pin_system(sequence(store, 1, question, n_system), store, asked)
    assert pinned(store) == [] and not asked


def test_the_oldest_system_prompt_is_watched_no_longer(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(insert_module, "_MAX_ASKED", 2)
    asked: dict[bytes, int] = {}
    for first_id in (1, 2, 3):
        pin_system(sequence(store, first_id, "What?"), store, asked)
    assert len(asked) == 2
    pin_system(sequence(store, 2, "Why?"), store, asked)
    assert len(pinned(store)) == 1
    pin_system(sequence(store, 1, "Why?"), store, asked)
    assert len(pinned(store)) == 1
