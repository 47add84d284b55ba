"""An unfinished block is stored in full precision, and a conversation continues inside it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.block import Block, Record
from mlx_lm_kvpersist.cache.blocks import split
from mlx_lm_kvpersist.cache.geometry.spec import probe_model
from mlx_lm_kvpersist.host.hooks import REPLY
from mlx_lm_kvpersist.request.outcome import Kind, Reason
from mlx_lm_kvpersist.request.saver import RunningSequence
from mlx_lm_kvpersist.store.block_store import Commit
from models_check.build import build
from models_check.conversation import random_ids
from models_check.stored import StoredModel
from tests.store.test_tiers import ReadOnly
from tests.support.store_files import block_path, read_file, write_block

IDS = random_ids(3, 600)


built = functools.cache(build)
LOGITS: dict[int, mx.array] = {}
"""Logits of the whole text, by the id of a model, which lives as long as these tests."""


@pytest.fixture
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoredModel]:
    """A model of the class that the test names, with an empty store."""
    model = built(getattr(request, "param", "llama"))
    made = StoredModel(model, probe_model(model), tmp_path)
    yield made
    made.close()


def computed(stored: StoredModel, n_tokens: int) -> tuple[mx.array, list[Any]]:
    """Return the logits of the first tokens, [n, vocab], and the caches of these tokens."""
    caches = stored.spec.make_cache()
    starts = range(0, n_tokens, 256)
    chunks = [mx.array([IDS[start : min(start + 256, n_tokens)]]) for start in starts]
    logits = mx.concatenate([stored.model(x, cache=caches)[0] for x in chunks], axis=0)
    mx.eval(logits)
    return logits, caches


def expected_of(stored: StoredModel) -> mx.array:
    """Return the logits of the whole text, [n, vocab], computed once for each model."""
    if id(stored.model) not in LOGITS:
        LOGITS[id(stored.model)] = computed(stored, len(IDS))[0]
    return LOGITS[id(stored.model)]


def store_turn(stored: StoredModel, n_tokens: int) -> None:
    """Store a turn that ends there, and forget all blocks in RAM."""
    sequence = RunningSequence(stored.loaded.root, n_tokens - 5, session="s")
    caches = computed(stored, n_tokens)[1]
    stored.loaded.save(sequence, IDS[:n_tokens], caches, REPLY, stored.store)
    stored.restart()


def blocks_of(stored: StoredModel) -> list[Block]:
    """Return the only chain that is stored."""
    path: list[Block] = []
    parent = stored.loaded.root.key
    while children := stored.store.children(parent):
        path += children
        parent = path[-1].key
    return path


def check_restore(stored: StoredModel, n_tokens: int, n_reused: int, expected: mx.array) -> None:
    """Restore the text's first tokens; their last logits must be those of `expected`."""
    row = stored.row([IDS[:n_tokens]], 1, None)
    assert row.n_cached == n_reused
    logits = stored.model(mx.array([IDS[n_reused:n_tokens]]), cache=row.caches)[0, -1]
    reference = expected[n_tokens - 1]
    assert float(mx.abs(logits - reference).max()) <= 1e-3 * float(mx.abs(reference).max())


def test_a_prompt_can_continue_at_any_position_of_an_unfinished_block(stored: StoredModel) -> None:
    store_turn(stored, 511)
    expected = expected_of(stored)
    for n_tokens in range(258, 513):
        check_restore(stored, n_tokens, n_tokens - 1, expected)
    check_restore(stored, 257, 256, expected)
    check_restore(stored, 250, 0, expected)  # the first block is stored quantized


def test_only_whole_blocks_are_stored_quantized(stored: StoredModel) -> None:
    store_turn(stored, 300)
    files = sorted(stored.folder.rglob("*.safetensors"))
    assert len(files) == 2 and stored.store.index.totals().n_checkpoints == 0
    whole, unfinished = (read_file(block_path(stored.folder, x.key))[2] for x in blocks_of(stored))
    assert {name.split(".")[-1] for name in whole} == {"weights", "scales", "biases"}
    (group,) = stored.spec.full
    assert group.keys is not None
    assert unfinished.keys() == {"0.k", "0.v"}
    for x in unfinished.values():
        assert x.shape == (len(group.slots), group.keys.n_heads, 44, group.keys.dim)
        assert x.dtype == getattr(mx, group.keys.dtype)


def test_another_process_completes_an_unfinished_block(stored: StoredModel) -> None:
    store_turn(stored, 300)
    expected = expected_of(stored)
    row = stored.row([IDS[:590]], 1, None, "s")
    assert row.n_cached == 300
    for start, stop in ((300, 512), (512, 600)):
        stored.model(mx.array([IDS[start:stop]]), cache=row.caches)
    row.keeper(IDS, row.caches)
    stored.restart()
    assert [block.stop for block in blocks_of(stored)] == [256, 512, 600]
    assert len(list(stored.folder.rglob("*.safetensors"))) == 3
    for n_tokens, n_reused in ((600, 599), (590, 589), (400, 256)):
        check_restore(stored, n_tokens, n_reused, expected)


def test_a_repeated_prompt_continues_inside_a_block_its_reply_filled(stored: StoredModel) -> None:
    """The prompt's tokens in full precision stay only in RAM, while RAM has room."""
    sequence = RunningSequence(stored.loaded.root, 300, session="s")
    caches = computed(stored, 299)[1]
    stored.loaded.save(sequence, IDS[:299], caches, "user", stored.store)
    for start, stop in ((299, 512), (512, 600)):
        stored.model(mx.array([IDS[start:stop]]), cache=caches)
    stored.loaded.save(sequence, IDS, caches, REPLY, stored.store)
    stored.store.drain()
    expected = expected_of(stored)
    for n_tokens, n_reused in ((300, 299), (280, 279), (400, 299), (600, 599)):
        check_restore(stored, n_tokens, n_reused, expected)
    stored.store.pool.drop_chain(block.key for block in sequence.chain)
    assert len(stored.store.pool) == 0
    check_restore(stored, 300, 256, expected)
    stored.restart()
    assert [block.stop for block in blocks_of(stored)] == [256, 512, 600]
    check_restore(stored, 300, 256, expected)


def test_a_prompt_continues_inside_a_block_that_a_second_reply_filled(
    stored: StoredModel,
) -> None:
    """The first reply ends in the block of the prompt's end; the second begins with the first."""
    expected = expected_of(stored)
    for n_tokens, n_reused in ((310, 0), (600, 299)):
        row = stored.row([IDS[:300]], 1, None, "s")
        assert row.n_cached == n_reused
        starts = [n_reused, *(stop for stop in (256, 299, 512) if n_reused < stop < n_tokens)]
        for start, stop in zip(starts, [*starts[1:], n_tokens], strict=True):
            stored.model(mx.array([IDS[start:stop]]), cache=row.caches)
            if stop == 299:
                row.keeper(IDS[:stop], row.caches)
        row.keeper(IDS[:n_tokens], row.caches)
        stored.store.drain()
    check_restore(stored, 300, 299, expected)


@pytest.mark.parametrize("n_tokens", [250, 300])
def test_a_prompt_that_ends_in_a_filled_block_has_an_explanation(
    stored: StoredModel, n_tokens: int
) -> None:
    """The stored text contains the whole prompt, but the block is computed from its start."""
    store_turn(stored, 600)
    stored.row([IDS[:n_tokens]], 1, None)
    (outcome,) = stored.outcomes
    assert outcome.n_reused == n_tokens // 256 * 256 and outcome.divergence is None
    assert outcome.kind is not Kind.DIVERGE
    assert outcome.reason is not None or outcome.detail


def test_the_reason_is_inside_block_although_the_last_token_differs(
    stored: StoredModel,
) -> None:
    store_turn(stored, 600)
    stored.row([[*IDS[:299], IDS[299] + 1]], 1, None)
    (outcome,) = stored.outcomes
    assert (outcome.n_reused, outcome.kind) == (256, Kind.EXTEND)
    assert outcome.reason is Reason.INSIDE_BLOCK


@pytest.mark.parametrize("stored", ["gemma3_text", "falcon_h1", "qwen3_next"], indirect=True)
def test_models_with_checkpoints_continue_inside_a_block(stored: StoredModel) -> None:
    """Each turn runs in another process. Blocks first end at checkpoints, then become whole."""
    expected = expected_of(stored)
    n_before = 0
    for n_tokens in (100, 200, 300, 555):
        row = stored.row([IDS[: n_tokens - 5]], 1, None, "s")
        assert row.n_cached == n_before
        for start in [n_before, *(x for x in (256, 512) if n_before < x < n_tokens)]:
            stop = min(n_tokens, start + 256 - start % 256)
            stored.model(mx.array([IDS[start:stop]]), cache=row.caches)
        row.keeper(IDS[:n_tokens], row.caches)
        stored.restart()
        check_restore(stored, n_tokens + 3, n_tokens, expected)
        n_before = n_tokens


@pytest.mark.parametrize("stored", ["llama", "gemma3_text", "falcon_h1"], indirect=True)
def test_a_turn_after_read_only_blocks_is_restored_without_their_tier(
    stored: StoredModel,
) -> None:
    expected, tier = expected_of(stored), ReadOnly()
    store_turn(stored, 300)
    blocks = blocks_of(stored)
    checkpoints = stored.store.checkpoints([block.key for block in blocks]).values()
    records: list[Record] = [*blocks, *chain.from_iterable(checkpoints)]
    for record in records:
        tier.held[record.key] = record, stored.store.disk_tier.load(record, stored.loaded.root)
    stored.store.disk.remove_session(stored.store.index.sessions()[0])
    stored.restart()
    stored.store.add(tier)
    row = stored.row([IDS[:580]], 1, None, "s")
    assert row.n_cached == 300
    for start, stop in ((300, 512), (512, 590)):
        stored.model(mx.array([IDS[start:stop]]), cache=row.caches)
    stored.store.pool.clear()
    row.keeper(IDS[:590], row.caches)
    stored.restart()
    assert blocks_of(stored)[-1].stop == 590
    check_restore(stored, 593, 590, expected)


def damage_file(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def pack_file(stored: StoredModel, path: Path) -> None:
    """Give the file the form of a whole block."""
    block, root, _ = read_file(path)
    assert isinstance(block, Block)
    at = [(block.start, block.stop)]
    (arrays,) = split(stored.spec.full, computed(stored, block.stop)[1], at)
    path.unlink()
    write_block(path, block, root, arrays)


@pytest.mark.parametrize("form", ["damaged", "packed"])
def test_a_damaged_or_packed_unfinished_block_is_recomputed(stored: StoredModel, form: str) -> None:
    store_turn(stored, 300)
    stored.store.drain()  # the opened store first looks for rows without a file
    path = block_path(stored.folder, blocks_of(stored)[-1].key)
    damage_file(path) if form == "damaged" else pack_file(stored, path)
    expected = expected_of(stored)
    check_restore(stored, 305, 256, expected)
    assert stored.outcomes[-1].reason is Reason.DAMAGED
    store_turn(stored, 300)
    check_restore(stored, 305, 300, expected)


def test_a_cache_trimmed_over_a_block_end_stores_full_precision(
    stored: StoredModel,
) -> None:
    sequence = RunningSequence(stored.loaded.root, 200, session="s")
    caches = computed(stored, 520)[1]
    for cache in caches:
        cache.trim(20)
    stored.loaded.save(sequence, IDS[:500], caches, REPLY, stored.store)
    stored.restart()
    assert [block.stop for block in blocks_of(stored)] == [256, 500]
    assert [session.n_tokens for session in stored.store.index.sessions()] == [500]
    check_restore(stored, 505, 500, expected_of(stored))


@pytest.mark.parametrize("stored", ["llama", "gemma3_text"], indirect=True)
def test_each_commit_has_only_the_blocks_since_the_previous_commit(
    stored: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for models with and without checkpoints."""
    commits: list[Commit] = []
    commit = stored.store.commit

    def record(new: Commit, *args: Any) -> None:
        commits.append(new)
        commit(new, *args)

    monkeypatch.setattr(stored.store, "commit", record)
    sequence = RunningSequence(stored.loaded.root, 515, session="s")
    for n_tokens, cache_type in ((300, "user"), (520, "user"), (600, REPLY)):
        caches = computed(stored, n_tokens)[1]
        stored.loaded.save(sequence, IDS[:n_tokens], caches, cache_type, stored.store)
    written = [block for commit in commits for block in commit.blocks]
    assert written == sequence.chain and len(commits) == 3
    assert [commit.parent for commit in commits[1:]] == [c.blocks[-1].key for c in commits[:-1]]
    assert commits[-1].leaf is not None and commits[-1].leaf.key == sequence.chain[-1].key
