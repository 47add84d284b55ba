"""Turns whose arrays are derived from their ids, for a store without a model.

As a program, this module writes turns to a store until it is killed, and logs committed turns:
python -m tests.attack.turns STORE LOG SEED N_TURNS [KEY]. KEY (hexadecimal) encrypts the store.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_lm_kvpersist.block import Block, Checkpoint, Record, Root, block_key, pack_ids
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit
from mlx_lm_kvpersist.store.encryption import Cipher
from mlx_lm_kvpersist.store.files import read_file
from mlx_lm_kvpersist.store.folder import PLAIN, Encryption, OwnFiles
from mlx_lm_kvpersist.store.records import Leaf, StoreLimits

ROOT = Root("written-by-turns", "4b32")
SESSIONS = ("anna", "ben", "carl", "dora", "emil")
LIMITS = StoreLimits(max_ram_bytes=1 << 24, max_disk_bytes=1 << 30)
BLOCK_TOKENS = 16
_N_SHARED = 2 * BLOCK_TOKENS  # whole blocks that all sessions begin with


def session_ids(session: str, n_tokens: int) -> list[int]:
    """Return the first tokens of a session: the same at every call."""
    shared = list(range(1, _N_SHARED + 1))
    rng = random.Random(session)
    return (shared + [rng.randrange(1000) for _ in range(n_tokens)])[:n_tokens]


def chain_of(ids: Sequence[int]) -> list[Block]:
    """Cut ids into the nodes of a conversation."""
    nodes: list[Block] = []
    parent = ROOT.key
    for start in range(0, len(ids), BLOCK_TOKENS):
        packed = pack_ids(ids[start : start + BLOCK_TOKENS])
        text = "".join(f"<{i}>" for i in ids[start : start + BLOCK_TOKENS])
        nodes.append(Block(block_key(parent, packed), parent, start, packed, text))
        parent = nodes[-1].key
    return nodes


def expected_block_arrays(node: Block) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays that a block must have."""
    rng = np.random.default_rng(int.from_bytes(node.key, "little"))
    shape = (2, 1, node.n_tokens)
    return {
        "0.k.weights": rng.integers(0, 1 << 32, (*shape, 4), np.uint32),
        "0.k.scales": rng.standard_normal((*shape, 1), np.float32),
    }


def state(node: Block) -> Checkpoint:
    return Checkpoint.at(node.key, "state", 0)


def window(node: Block) -> Checkpoint:
    return Checkpoint.at(node.key, "window-32", BLOCK_TOKENS)


def expected_checkpoint_arrays(checkpoint: Checkpoint) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays that a checkpoint must have."""
    rng = np.random.default_rng(int.from_bytes(checkpoint.key, "little"))
    return {
        "0.conv": rng.standard_normal((2, 1, 3, 8), np.float32),
        "0.ssm": rng.standard_normal((2, 1, 4, 64), np.float32),
    }


def arrays_of(record: Record) -> dict[str, mx.array]:
    plain = (
        expected_checkpoint_arrays(record)
        if isinstance(record, Checkpoint)
        else expected_block_arrays(record)
    )
    arrays = {name: mx.array(array) for name, array in plain.items()}
    mx.eval(arrays)
    return arrays


def keep_turn(store: BlockStore, session: str, n_before: int, n_tokens: int) -> None:
    """Commit a turn that makes a session `n_tokens` long. It has a state at its end, which replaces
    the earlier state, and the shared beginning has a window.
    """
    chain = chain_of(session_ids(session, n_tokens))
    old_tail = chain_of(session_ids(session, n_before))[-1:]
    replaced = [
        (tail.key, node.key)
        for tail in old_tail
        for node in chain
        if tail.parent == node.parent and tail.key != node.key
    ]
    new = [(node, arrays_of(node)) for node in chain if node.key not in store]
    leaf = Leaf(session, chain[-1].key, n_tokens, tuple(replaced))
    replies = {chain[-1].key: chain[-1].packed_ids}
    checkpoints = expected_checkpoints(chain)
    superseded = tuple(state(tail) for tail in old_tail)
    known = store.checkpoints([node.key for node in chain])
    new_checkpoints = [
        (checkpoint, arrays_of(checkpoint))
        for checkpoint in checkpoints
        if checkpoint not in known.get(checkpoint.block, ())
    ]
    turn = Commit(ROOT, tuple(chain), leaf, replies, checkpoints, superseded)
    store.commit(turn, [*new, *new_checkpoints])


def expected_checkpoints(chain: Sequence[Block]) -> tuple[Checkpoint, ...]:
    """Return the checkpoints that a session of these blocks has."""
    return window(chain[0]), state(chain[-1])


def session_lengths(store: BlockStore) -> dict[str, int]:
    return {session.name: session.n_tokens for session in store.index.sessions() if session.name}


def check_committed(
    folder: Path,
    committed: dict[str, int],
    limits: StoreLimits = LIMITS,
    encryption: Encryption = PLAIN,
) -> None:
    """Open a store after a kill; check that it has all committed turns and nothing else."""
    store = BlockStore(folder, limits, encryption=encryption)
    store.drain()
    sessions = {session.name or "": session for session in store.index.sessions()}
    assert len(sessions) == len(store.index.sessions()), "a session exists twice"
    reachable: set[bytes] = set()
    checkpoints: set[Checkpoint] = set()
    for name, n_tokens in committed.items():
        assert name in sessions, f"the session {name} is lost"
        assert sessions[name].n_tokens >= n_tokens, f"the last turn of {name} is lost"
    for name, session in sessions.items():
        expected = chain_of(session_ids(name, session.n_tokens))
        assert [node for node, _ in store.index.chain(session.leaf)] == expected, name
        key = expected[-1].key
        assert store.replies(ROOT.key, [key])[key] == expected[-1].packed_ids
        for node in expected:
            _check_block(folder, node, encryption)
            reachable.add(node.key)
        checkpoints.update(expected_checkpoints(expected))
        stored = store.checkpoints([node.key for node in expected])
        assert {checkpoint for group in stored.values() for checkpoint in group} <= checkpoints
    assert store.index.keys() == reachable
    assert store.index.keys("checkpoints") == {checkpoint.key for checkpoint in checkpoints}
    for checkpoint in checkpoints:
        check_checkpoint(folder, checkpoint, encryption)
    files = {path.name for path in (folder / "blocks").rglob("*") if path.is_file()}
    assert files == {f"{encryption.file_name(key)}.safetensors" for key in reachable}
    files = {path.name for path in (folder / "checkpoints").rglob("*") if path.is_file()}
    assert files == {
        f"{encryption.file_name(checkpoint.key)}.safetensors" for checkpoint in checkpoints
    }
    ids_of_sessions = {f"{session.id}.json" for session in sessions.values()}
    assert {path.name for path in (folder / "sessions").glob("*")} == ids_of_sessions
    assert store.blocks_quarantined == 0
    store.close()


def _check_block(folder: Path, node: Block, encryption: Encryption) -> None:
    files = OwnFiles(folder, encryption)
    stored, root, arrays = read_file(files.path_of(node.key, node.folder), files)
    assert (stored, root) == (node, ROOT)
    check_arrays(arrays, expected_block_arrays(node))


def check_checkpoint(folder: Path, checkpoint: Checkpoint, encryption: Encryption = PLAIN) -> None:
    files = OwnFiles(folder, encryption)
    stored, root, arrays = read_file(files.path_of(checkpoint.key, checkpoint.folder), files)
    assert (stored, root) == (checkpoint, ROOT)
    check_arrays(arrays, expected_checkpoint_arrays(checkpoint))


def check_arrays(arrays: Mapping[str, mx.array], expected: dict[str, np.ndarray[Any, Any]]) -> None:
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array(arrays[name]).tobytes() == array.tobytes(), name


def write_turns(folder: Path, log: int, seed: int, n_turns: int, encryption: Encryption) -> None:
    """Write turns of all sessions, up to three at a time, and log each committed turn."""
    rng = random.Random(seed)
    store = BlockStore(folder, LIMITS, encryption=encryption)
    os.write(log, b"open 0\n")
    lengths = session_lengths(store)
    while n_turns > 0:
        together = rng.sample(SESSIONS, rng.randrange(1, 4))
        for session in together:
            before = lengths.get(session, 0)
            lengths[session] = (before or _N_SHARED) + rng.randrange(1, 60)
            keep_turn(store, session, before, lengths[session])
        store.drain()
        assert store.turns_not_saved == 0
        os.write(log, "".join(f"{name} {lengths[name]}\n" for name in together).encode())
        n_turns -= len(together)
    store.close()


if __name__ == "__main__":
    descriptor = os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    key = "".join(sys.argv[5:])
    made = Cipher(bytes.fromhex(key)) if key else PLAIN
    write_turns(Path(sys.argv[1]), descriptor, int(sys.argv[3]), int(sys.argv[4]), made)
