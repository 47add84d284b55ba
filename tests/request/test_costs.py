"""How many tokens of a diverging conversation are reused, by measured rates."""

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


def keep_hot(store: BlockStore, nodes: list[Block]) -> None:
    store.commit(Commit(ROOT, tuple(nodes)), [(node, {"0.k": mx.zeros(1)}) for node in nodes])
    store.drain()


def tokens_of_model(
    store: BlockStore,
    nodes: list[Block],
    n_tokens: int,
    block_s: float,
    spec: ModelCacheSpec = PLAIN,
    hot_s: float = 0.001,
) -> tuple[int, Reason | None]:
    """Return the reuse for a model that computes 1,000 tokens a second.

    It reads a block in `block_s`, and from RAM in `hot_s`.
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
def test_blocks_on_disk_are_read_where_that_is_quicker(
    store: BlockStore, n_tokens: int, block_s: float, expected: tuple[int, Reason | None]
) -> None:
    assert tokens_of_model(store, blocks(1, "a", "b"), n_tokens, block_s) == expected


def test_what_is_unknown_is_restored(store: BlockStore) -> None:
    """The unknown may be the time to compute, or to read from a tier."""
    match = Match(tuple(blocks(1, "a", "b")), 306, 0, False)
    for learned in ("nothing", "pace"):
        model = LoadedModel(None, None, PLAIN, "fingerprint", None)
        if learned == "pace":
            model.speed.pace.learn(0, 512, 0.1)
        assert tokens_to_reuse(match, 306, store, model) == (306, None)


def test_tokens_far_from_the_start_are_worth_more(store: BlockStore) -> None:
    model = LoadedModel(None, None, PLAIN, "fingerprint", None)
    model.speed.rates[DISK] = BLOCK_BYTES / 0.1
    for position, block_s in ((0, 0.05), (256, 0.2)):
        for n_tokens in (256, 512):
            model.speed.pace.learn(position, n_tokens, block_s * n_tokens / 256)
    near, far = (Match(tuple(blocks(1, "a", "b")[:n]), 256 * n, 0, False) for n in (1, 2))
    assert tokens_to_reuse(near, 256, store, model) == (0, Reason.NOT_WORTH_IT)
    assert tokens_to_reuse(far, 512, store, model) == (512, None)


def test_blocks_in_ram_are_not_read(store: BlockStore) -> None:
    nodes = blocks(1, "a", "b")
    keep_hot(store, nodes)
    assert tokens_of_model(store, nodes, 50, 100.0) == (50, None)
    assert tokens_of_model(store, nodes, 256 + 50, 100.0) == (306, None)
    assert tokens_of_model(store, nodes, MIN_TOKENS, 100.0) == (MIN_TOKENS, None)
    assert tokens_of_model(store, nodes, MIN_TOKENS - 1, 100.0) == (0, None)
    store.pool.remove(nodes[0].key)
    # Reading the first takes longer than computing both.
    assert tokens_of_model(store, nodes, 256 + 50, 0.4) == (0, Reason.NOT_WORTH_IT)
    assert tokens_of_model(store, nodes, 256 + 50, 0.2) == (306, None)


def test_even_from_ram_a_few_tokens_can_take_longer_than_to_compute_them(store: BlockStore) -> None:
    nodes = blocks(1, "a", "b")
    keep_hot(store, nodes)
    assert tokens_of_model(store, nodes, 306, 0.1, hot_s=0.2) == (0, Reason.NOT_WORTH_IT)
    assert tokens_of_model(store, nodes, 406, 0.1, hot_s=0.2) == (406, None)
    # Two blocks and a window of as many bytes: 300 ms.
    assert tokens_of_model(store, nodes, 310, 9.0, WINDOWED, 0.1) == (310, None)
    assert tokens_of_model(store, nodes, 290, 9.0, WINDOWED, 0.1) == (0, Reason.NOT_WORTH_IT)


def test_an_unfinished_block_has_more_bytes(store: BlockStore) -> None:
    eight = replace(FULL, precision=KVPrecision.of(8, 64))
    quantized = ModelCacheSpec((eight,), [KVCache()])
    (whole,) = blocks(1, "a")
    unfinished = replace(whole, packed_ids=whole.packed_ids[:-4])
    # A block in 8 bits has 0.28 of BLOCK_BYTES.
    for node, n_tokens in ((whole, 100), (unfinished, 0)):
        assert tokens_of_model(store, [node], 100, 0.2, quantized)[0] == n_tokens


def test_windows_are_read_too_and_are_all_or_nothing(store: BlockStore) -> None:
    nodes = blocks(1, "a", "b")
    assert WINDOWED.bytes_per_checkpoint == BLOCK_BYTES
    # Two blocks and a window of as many bytes: 300 ms.
    assert tokens_of_model(store, nodes, 310, 0.1, WINDOWED) == (310, None)
    assert tokens_of_model(store, nodes, 290, 0.1, WINDOWED) == (0, Reason.NOT_WORTH_IT)
    keep_hot(store, nodes)
    assert tokens_of_model(store, nodes, 290, 100.0, WINDOWED) == (290, None)
    assert tokens_of_model(store, nodes, 2, 0.1, WINDOWED) == (0, None)
