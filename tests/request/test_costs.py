"""Measured rates decide how many tokens of a diverging conversation are reused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_lm_kvpersist.block import Block, Root, block_key, pack_ids
from mlx_lm_kvpersist.cache.geometry.kinds import GroupKind
from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision
from mlx_lm_kvpersist.cache.geometry.spec import LayerGroup, ModelCacheSpec, TensorShape
from mlx_lm_kvpersist.match import Match
from mlx_lm_kvpersist.request.lookup import MIN_TOKENS, tokens_to_reuse
from mlx_lm_kvpersist.request.model import LoadedModel
from mlx_lm_kvpersist.request.outcome import Reason
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.records import DISK, RAM

ROOT = Root("fingerprint", "full")
SHAPE = TensorShape(1, 64, "float32")
FULL = LayerGroup("0", GroupKind.FULL, "KVCache", (0,), SHAPE, SHAPE)
SLIDING = LayerGroup("1", GroupKind.SLIDING, "RotatingKVCache", (1,), SHAPE, SHAPE, window=256)
PLAIN = ModelCacheSpec((FULL,), [KVCache()])
WINDOWED = ModelCacheSpec((FULL, SLIDING), [KVCache(), RotatingKVCache(256)])
MODEL = LoadedModel(None, None, PLAIN, "fingerprint", None)
BLOCK_BYTES = 256 * PLAIN.bytes_per_token


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    store = BlockStore(tmp_path / "store", StoreLimits(1 << 30, 1 << 30))
    yield store
    store.close()


def blocks(first_id: int, *texts: str, parent: Block | None = None) -> list[Block]:
    """Return a chain of blocks of 256 tokens with these texts."""
    nodes: list[Block] = []
    for number, text in enumerate(texts):
        key = parent.key if parent else ROOT.key
        packed = pack_ids([first_id + number] * 256)
        start = parent.stop if parent else 0
        parent = Block(block_key(key, packed), key, start, packed, text)
        nodes.append(parent)
    return nodes


def keep_in_ram(store: BlockStore, nodes: list[Block]) -> None:
    store.commit(Commit(ROOT, tuple(nodes)), [(node, {"0.k": mx.zeros(1)}) for node in nodes])
    store.drain()


def reuse_of_model(
    store: BlockStore,
    nodes: list[Block],
    n_tokens: int,
    block_s: float,
    spec: ModelCacheSpec = PLAIN,
    hot_s: float = 0.001,
) -> tuple[int, Reason | None]:
    """Return the reuse for a model that computes 1,000 tokens a second.

    A block takes `block_s` to read from disk, and `hot_s` to read from RAM.
    """
    model = LoadedModel(None, None, spec, "fingerprint", None)
    model.speed.pace.learn(0, 512, 0.512)
    model.speed.rates[RAM] = BLOCK_BYTES / hot_s
    model.speed.rates[DISK] = BLOCK_BYTES / block_s
    match = Match(tuple(nodes), n_tokens, 0, False)
    return tokens_to_reuse(match, n_tokens, store, model)


@pytest.mark.parametrize(
    ("n_tokens", "block_s", "expected"),
    [
        (512, 0.1, (512, None)),
        (256 + 150, 0.1, (406, None)),
        (256 + 50, 0.1, (306, None)),
        (256, 0.1, (256, None)),
        (50, 0.1, (0, Reason.NOT_WORTH_IT)),
        (256 + 150, 0.3, (0, Reason.NOT_WORTH_IT)),
    ],
)
def test_blocks_on_disk_are_read_only_if_that_is_faster(
    store: BlockStore, n_tokens: int, block_s: float, expected: tuple[int, Reason | None]
) -> None:
    assert reuse_of_model(store, blocks(1, "a", "b"), n_tokens, block_s) == expected


def test_tokens_are_restored_while_rates_are_unknown(store: BlockStore) -> None:
    """Both rates may be unknown, or only the rate of the tier."""
    match = Match(tuple(blocks(1, "a", "b")), 306, 0, False)
    for learned in ("nothing", "pace"):
        model = LoadedModel(None, None, PLAIN, "fingerprint", None)
        if learned == "pace":
            model.speed.pace.learn(0, 512, 0.1)
        assert tokens_to_reuse(match, 306, store, model) == (306, None)


def test_tokens_at_slower_positions_are_worth_restoring(store: BlockStore) -> None:
    model = LoadedModel(None, None, PLAIN, "fingerprint", None)
    model.speed.rates[DISK] = BLOCK_BYTES / 0.1
    for position, block_s in ((0, 0.05), (256, 0.2)):
        for n_tokens in (256, 512):
            model.speed.pace.learn(position, n_tokens, block_s * n_tokens / 256)
    near, far = (Match(tuple(blocks(1, "a", "b")[:n]), 256 * n, 0, False) for n in (1, 2))
    assert tokens_to_reuse(near, 256, store, model) == (0, Reason.NOT_WORTH_IT)
    assert tokens_to_reuse(far, 512, store, model) == (512, None)


def test_blocks_in_ram_cost_no_disk_read(store: BlockStore) -> None:
    nodes = blocks(1, "a", "b")
    keep_in_ram(store, nodes)
    assert reuse_of_model(store, nodes, 50, 100.0) == (50, None)
    assert reuse_of_model(store, nodes, 256 + 50, 100.0) == (306, None)
    assert reuse_of_model(store, nodes, MIN_TOKENS, 100.0) == (MIN_TOKENS, None)
    assert reuse_of_model(store, nodes, MIN_TOKENS - 1, 100.0) == (0, None)
    store.pool.remove(nodes[0].key)
    # Reading the first block takes longer than computing both blocks.
    assert reuse_of_model(store, nodes, 256 + 50, 0.4) == (0, Reason.NOT_WORTH_IT)
    assert reuse_of_model(store, nodes, 256 + 50, 0.2) == (306, None)


def test_a_few_tokens_in_ram_are_computed_if_that_is_faster(store: BlockStore) -> None:
    nodes = blocks(1, "a", "b")
    keep_in_ram(store, nodes)
    assert reuse_of_model(store, nodes, 306, 0.1, hot_s=0.2) == (0, Reason.NOT_WORTH_IT)
    assert reuse_of_model(store, nodes, 406, 0.1, hot_s=0.2) == (406, None)
    # Two blocks, and a window as large as a block: 300 ms.
    assert reuse_of_model(store, nodes, 310, 9.0, WINDOWED, 0.1) == (310, None)
    assert reuse_of_model(store, nodes, 290, 9.0, WINDOWED, 0.1) == (0, Reason.NOT_WORTH_IT)


def test_an_unfinished_block_counts_at_full_precision(store: BlockStore) -> None:
    eight = replace(FULL, precision=KVPrecision.of(8, 64))
    quantized = ModelCacheSpec((eight,), [KVCache()])
    (whole,) = blocks(1, "a")
    unfinished = replace(whole, packed_ids=whole.packed_ids[:-4])
    # A block in 8 bits has 0.28 of BLOCK_BYTES.
    for node, n_tokens in ((whole, 100), (unfinished, 0)):
        assert reuse_of_model(store, [node], 100, 0.2, quantized)[0] == n_tokens


def test_window_checkpoints_add_to_the_time_of_a_restore(store: BlockStore) -> None:
    nodes = blocks(1, "a", "b")
    assert WINDOWED.bytes_per_checkpoint == BLOCK_BYTES
    # Two blocks, and a window as large as a block: 300 ms.
    assert reuse_of_model(store, nodes, 310, 0.1, WINDOWED) == (310, None)
    assert reuse_of_model(store, nodes, 290, 0.1, WINDOWED) == (0, Reason.NOT_WORTH_IT)
    keep_in_ram(store, nodes)
    assert reuse_of_model(store, nodes, 290, 100.0, WINDOWED) == (290, None)
    assert reuse_of_model(store, nodes, 2, 0.1, WINDOWED) == (0, None)
