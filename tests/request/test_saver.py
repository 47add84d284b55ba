"""An unfinished block is stored as the model computed it, and a conversation continues in it."""

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
    """A model of the class that the test names in front of an empty store."""
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


def keep(stored: StoredModel, n_tokens: int) -> None:
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


def check(stored: StoredModel, n_tokens: int, n_reused: int, expected: mx.array) -> None:
    """Ask for the text's first tokens; the last logits must be as `expected` of the whole text."""
    row = stored.row([IDS[:n_tokens]], 1, None)
    assert row.n_cached == n_reused
    found = stored.model(mx.array([IDS[n_reused:n_tokens]]), cache=row.caches)[0, -1]
    right = expected[n_tokens - 1]
    assert float(mx.abs(found - right).max()) <= 1e-3 * float(mx.abs(right).max())


def test_every_position_of_an_unfinished_block_is_restored(stored: StoredModel) -> None:
    keep(stored, 511)
    expected = expected_of(stored)
    for n_tokens in range(258, 513):
        check(stored, n_tokens, n_tokens - 1, expected)
    check(stored, 257, 256, expected)
    check(stored, 250, 0, expected)  # the first block is stored quantized


def test_a_block_has_one_file_in_one_of_two_forms(stored: StoredModel) -> None:
    keep(stored, 300)
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


def test_an_unfinished_block_becomes_whole_in_another_process(stored: StoredModel) -> None:
    keep(stored, 300)
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
        check(stored, n_tokens, n_reused, expected)


def test_a_prompt_goes_on_within_the_block_that_its_reply_has_filled(stored: StoredModel) -> None:
    """The tokens as computed are in RAM alone, as long as there is room."""
    sequence = RunningSequence(stored.loaded.root, 300, session="s")
    caches = computed(stored, 299)[1]
    stored.loaded.save(sequence, IDS[:299], caches, "user", stored.store)
    for start, stop in ((299, 512), (512, 600)):
        stored.model(mx.array([IDS[start:stop]]), cache=caches)
    stored.loaded.save(sequence, IDS, caches, REPLY, stored.store)
    stored.store.drain()
    expected = expected_of(stored)
    for n_tokens, n_reused in ((300, 299), (280, 279), (400, 299), (600, 599)):
        check(stored, n_tokens, n_reused, expected)
    stored.store.pool.drop_chain(block.key for block in sequence.chain)
    assert len(stored.store.pool) == 0
    check(stored, 300, 256, expected)
    stored.restart()
    assert [block.stop for block in blocks_of(stored)] == [256, 512, 600]
    check(stored, 300, 256, expected)


def test_a_prompt_goes_on_within_a_block_that_a_second_longer_reply_has_filled(
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
    check(stored, 300, 299, expected)


@pytest.mark.parametrize("n_tokens", [250, 300])
def test_the_outcome_of_a_prompt_that_ends_in_a_filled_block_is_explained(
    stored: StoredModel, n_tokens: int
) -> None:
    """The prompt differs nowhere from what is stored, and is computed from the block's start."""
    keep(stored, 600)
    stored.row([IDS[:n_tokens]], 1, None)
    (outcome,) = stored.outcomes
    assert outcome.n_reused == n_tokens // 256 * 256 and outcome.divergence is None
    assert outcome.kind is not Kind.DIVERGE
    assert outcome.reason is not None or outcome.detail


def test_a_last_token_that_differs_is_not_why_a_filled_block_is_not_reused(
    stored: StoredModel,
) -> None:
    keep(stored, 600)
    stored.row([[*IDS[:299], IDS[299] + 1]], 1, None)
    (outcome,) = stored.outcomes
    assert (outcome.n_reused, outcome.kind) == (256, Kind.EXTEND)
    assert outcome.reason is Reason.INSIDE_BLOCK


@pytest.mark.parametrize("stored", ["gemma3_text", "falcon_h1", "qwen3_next"], indirect=True)
def test_models_with_checkpoints_go_on_within_a_block(stored: StoredModel) -> None:
    """Each turn in another process: the block ends at checkpoints, and then becomes whole."""
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
        check(stored, n_tokens + 3, n_tokens, expected)
        n_before = n_tokens


@pytest.mark.parametrize("stored", ["llama", "gemma3_text", "falcon_h1"], indirect=True)
def test_a_turn_that_continues_blocks_of_a_read_only_tier_is_restored_without_it(
    stored: StoredModel,
) -> None:
    expected, tier = expected_of(stored), ReadOnly()
    keep(stored, 300)
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
    check(stored, 593, 590, expected)


def damaged(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def packed(stored: StoredModel, path: Path) -> None:
    """Give the file the form of a whole block."""
    block, root, _ = read_file(path)
    assert isinstance(block, Block)
    at = [(block.start, block.stop)]
    (arrays,) = split(stored.spec.full, computed(stored, block.stop)[1], at)
    path.unlink()
    write_block(path, block, root, arrays)


@pytest.mark.parametrize("form", ["damaged", "packed"])
def test_an_unfinished_block_that_is_not_right_is_computed_again(
    stored: StoredModel, form: str
) -> None:
    keep(stored, 300)
    stored.store.drain()  # it looks for rows without a file when it is opened
    path = block_path(stored.folder, blocks_of(stored)[-1].key)
    damaged(path) if form == "damaged" else packed(stored, path)
    expected = expected_of(stored)
    check(stored, 305, 256, expected)
    assert stored.outcomes[-1].reason is Reason.DAMAGED
    keep(stored, 300)
    check(stored, 305, 300, expected)


def test_what_was_cut_back_over_a_blocks_end_is_stored_as_it_was_computed(
    stored: StoredModel,
) -> None:
    sequence = RunningSequence(stored.loaded.root, 200, session="s")
    caches = computed(stored, 520)[1]
    for cache in caches:
        cache.trim(20)
    stored.loaded.save(sequence, IDS[:500], caches, REPLY, stored.store)
    stored.restart()
    assert [block.stop for block in blocks_of(stored)] == [256, 500]
    assert [one.n_tokens for one in stored.store.index.sessions()] == [500]
    check(stored, 505, 500, expected_of(stored))


@pytest.mark.parametrize("stored", ["llama", "gemma3_text"], indirect=True)
def test_a_commit_has_the_blocks_that_are_new_since_the_one_before(
    stored: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any conversation, with checkpoints and without."""
    commits: list[Commit] = []
    commit = stored.store.commit

    def seen(new: Commit, *args: Any) -> None:
        commits.append(new)
        commit(new, *args)

    monkeypatch.setattr(stored.store, "commit", seen)
    sequence = RunningSequence(stored.loaded.root, 515, session="s")
    for n_tokens, cache_type in ((300, "user"), (520, "user"), (600, REPLY)):
        caches = computed(stored, n_tokens)[1]
        stored.loaded.save(sequence, IDS[:n_tokens], caches, cache_type, stored.store)
    written = [block for commit in commits for block in commit.blocks]
    assert written == sequence.chain and len(commits) == 3
    assert [commit.parent for commit in commits[1:]] == [c.blocks[-1].key for c in commits[:-1]]
    assert commits[-1].leaf is not None and commits[-1].leaf.key == sequence.chain[-1].key
