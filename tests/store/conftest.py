from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.block import Block, Checkpoint, Root, block_key, pack_ids
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.store.records import Leaf

ROOT = Root("fingerprint", "4b64")


def chain(*blocks: list[int], parent: bytes = ROOT.key) -> list[Block]:
    """Return the blocks of a conversation, one for each list of ids."""
    nodes: list[Block] = []
    start = 0
    for ids in blocks:
        packed = pack_ids(ids)
        text = "".join(f"<{i}>" for i in ids)
        node = Block(block_key(parent, packed), parent, start, packed, text)
        nodes.append(node)
        parent, start = node.key, node.stop
    return nodes


def arrays_of(node: Block) -> dict[str, mx.array]:
    """Return arrays that differ from the arrays of every other block."""
    seed = int.from_bytes(node.key[:4], "little")
    arrays = {
        "0.k.weights": mx.random.randint(0, 1 << 30, (2, 64, node.n_tokens, 128), mx.uint32),
        "0.k.scales": mx.random.normal((2, 1, node.n_tokens, 1), key=mx.random.key(seed)),
    }
    mx.eval(arrays)
    return arrays


def leaves(index: Index) -> list[tuple[float, bytes]]:
    """Return time of use and key of all leaf blocks, in the order of eviction."""
    unused = heapq.merge(*(index.unused(model) for model in index.models()))
    return [(used, key) for used, is_checkpoint, _, key, _ in unused if not is_checkpoint]


def unused_checkpoints(index: Index) -> list[tuple[float, bytes]]:
    """Return time of use and block of all checkpoints, in the order of eviction."""
    unused = heapq.merge(*(index.unused(model) for model in index.models()))
    return [(used, block) for used, is_checkpoint, _, _, block in unused if is_checkpoint]


def state(node: Block) -> Checkpoint:
    """Return the checkpoint with the state of recurrent layers after a block."""
    return Checkpoint.at(node.key, "state", 0)


def window(node: Block) -> Checkpoint:
    """Return the checkpoint with a block's tokens for layers with a window of 512."""
    return Checkpoint.at(node.key, "window-512", node.n_tokens)


def arrays_of_checkpoint(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """Return arrays that no other checkpoint has, with the dtypes of states."""
    key = mx.random.key(int.from_bytes(checkpoint.key[:4], "little"))
    arrays = {
        "0.conv": mx.random.normal((2, 1, 3, 64), mx.bfloat16, key=key),
        "0.ssm": mx.random.normal((2, 1, 4, 32, 32), mx.float32, key=key),
    }
    mx.eval(arrays)
    return arrays


def checkpoint_files(folder: Path) -> set[str]:
    """Return the names of the checkpoints' files in a store."""
    return {path.name for path in (folder / "checkpoints").glob("*/*")}


def names(*checkpoints: Checkpoint) -> set[str]:
    """Return the file names of these checkpoints."""
    return {f"{checkpoint.key.hex()}.safetensors" for checkpoint in checkpoints}


def save_turn(
    store: BlockStore,
    nodes: list[Block],
    name: str | None = None,
    checkpoints: Sequence[Checkpoint] = (),
    superseded: Sequence[Checkpoint] = (),
    **leaf: object,
) -> dict[bytes, dict[str, mx.array]]:
    """Commit and write a turn; return the arrays of new blocks and checkpoints by key."""
    content = {node.key: arrays_of(node) for node in nodes if node.key not in store}
    new = [(node, content[node.key]) for node in nodes if node.key in content]
    known = {
        checkpoint
        for of_block in store.checkpoints([checkpoint.block for checkpoint in checkpoints]).values()
        for checkpoint in of_block
    }
    new_checkpoints = [
        (checkpoint, arrays_of_checkpoint(checkpoint))
        for checkpoint in checkpoints
        if checkpoint not in known
    ]
    end = Leaf(name, nodes[-1].key, nodes[-1].stop, **leaf)  # type: ignore[arg-type]
    turn = Commit(
        ROOT, tuple(nodes), end, checkpoints=tuple(checkpoints), superseded=tuple(superseded)
    )
    store.commit(turn, [*new, *new_checkpoints])
    store.drain()
    return content | {checkpoint.key: arrays for checkpoint, arrays in new_checkpoints}


@pytest.fixture
def limits() -> StoreLimits:
    return StoreLimits(max_ram_bytes=4 << 20, max_disk_bytes=4 << 20)


@pytest.fixture
def store(tmp_path: Path, limits: StoreLimits) -> Iterator[BlockStore]:
    store = BlockStore(tmp_path / "store", limits)
    yield store
    store.close()
