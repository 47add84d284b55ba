"""The reports about a request: the header, the sentence, the divergence and the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.block import Block, Root, block_key, pack_ids
from mlx_lm_kvpersist.cache.blocks import BLOCK_TOKENS
from mlx_lm_kvpersist.cache.geometry.precision import layout_in_words
from mlx_lm_kvpersist.match import NO_MATCH, Match
from mlx_lm_kvpersist.request.outcome import (
    MIN_ALIKE_CHARS,
    MIN_ALIKE_TOKENS,
    Divergence,
    Kind,
    Outcome,
    Reason,
    divergence_at,
    why_not_stored,
)
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits

DIVERGED = Reason.DIVERGED.text


@pytest.mark.parametrize(
    ("outcome", "tier", "header", "sentence"),
    [
        (
            Outcome(Kind.MISS, 1200),
            "cold",
            "outcome=MISS; tier=cold; reused=0; restored=0; restore_ms=0.0",
            "computed all 1,200 tokens",
        ),
        (
            Outcome(Kind.MISS, 7, reason=Reason.NOTHING_ALIKE, restore_ms=1.25),
            "cold",
            "outcome=MISS; tier=cold; reused=0; restored=0; restore_ms=1.2; reason=new",
            "computed all 7 tokens: no stored prompt begins like it",
        ),
        (
            Outcome(Kind.EXTEND, 1078, 1054, tier="ram"),
            "ram",
            "outcome=EXTEND; tier=ram; reused=1054; restored=0; restore_ms=0.0",
            "reused 1,054 of 1,078 tokens from RAM, 24 computed",
        ),
        (
            Outcome(Kind.DIVERGE, 50, 40, 39, 1234.4, Reason.DIVERGED, tier="disk"),
            "disk",
            "outcome=DIVERGE; tier=disk; reused=40; restored=39; restore_ms=1234.4; "
            "reason=diverged",
            f"reused 40 of 50 tokens from RAM and disk in 1,234 ms, 10 computed ({DIVERGED})",
        ),
        (
            Outcome(Kind.EXACT, 41, 40, 40, 3.0, tier="disk"),
            "disk",
            "outcome=EXACT; tier=disk; reused=40; restored=40; restore_ms=3.0",
            "reused 40 of 41 tokens from disk in 3 ms, 1 computed",
        ),
        (
            Outcome(Kind.STOCK, 9, reason=Reason.NOT_KEPT, detail="an image"),
            "cold",
            "outcome=STOCK; tier=cold; reused=0; restored=0; restore_ms=0.0; reason=not-kept",
            "served as in the stock server: an image",
        ),
        (
            Outcome(Kind.STOCK, 9, reason=Reason.NOT_KEPT),
            "cold",
            "outcome=STOCK; tier=cold; reused=0; restored=0; restore_ms=0.0; reason=not-kept",
            f"served as in the stock server: {Reason.NOT_KEPT.text}",
        ),
    ],
)
def test_an_outcome_has_a_header_and_a_sentence(
    outcome: Outcome, tier: str, header: str, sentence: str
) -> None:
    assert outcome.tier == tier
    assert outcome.header == header
    assert outcome.sentence(None) == sentence
    assert outcome.sentence("") == sentence
    assert outcome.sentence('"é" ' + 90 * "x", is_kept=False) == (
        f'{sentence}, not kept, session "\\"é\\" {75 * "x"}…"'
    )


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": None},
    {"role": "user", "content": "  "},
    {"role": "assistant", "content": "never rendered"},
    {"role": "user", "content": " Hi there  "},
    {"role": "user", "content": "Be brief."},
]
TEXT = "<s>Be brief.<u>Hi there<u>Be brief.<a>" + 30 * "z" + "  " + 30 * "z"


@pytest.mark.parametrize(
    ("char", "message", "role", "message_char"),
    [
        (0, None, None, None),
        (2, None, None, None),
        (3, 0, "system", 0),
        (11, 0, "system", 8),
        (12, None, None, None),
        (14, None, None, None),
        (15, 4, "user", 0),
        (22, 4, "user", 7),
        (23, None, None, None),
        (26, 5, "user", 0),
        (34, 5, "user", 8),
        (35, None, None, None),
        (90, None, None, None),
    ],
)
def test_a_divergence_names_the_message_of_its_character(
    char: int, message: int | None, role: str | None, message_char: int | None
) -> None:
    """Trimmed messages are found; messages that were not rendered are skipped."""
    nearest = replace(NO_MATCH, n_agreed=char, stored_next="stored")
    divergence = divergence_at(TEXT, nearest, MESSAGES)
    assert divergence is not None
    asked = TEXT[char : char + 40]
    assert divergence == Divergence(char, message, role, message_char, "stored", asked)


def test_a_divergence_in_an_untrimmed_first_message_is_found() -> None:
    nearest = replace(NO_MATCH, n_agreed=1, stored_next="x")
    divergence = divergence_at("  Hi there", nearest, [{"role": "user", "content": "  Hi"}])
    assert divergence is not None
    assert (divergence.message, divergence.message_char) == (0, 1)


ROOT = Root("fingerprint", "4b64")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    made = BlockStore(tmp_path / "store", StoreLimits(1 << 30, 1 << 30))
    yield made
    made.close()


def block_of(root: Root, text: str) -> Block:
    packed = pack_ids([1] * 20)
    return Block(block_key(root.key, packed), root.key, 0, packed, text)


def save(store: BlockStore, root: Root, *blocks: Block) -> None:
    arrays = {"0.k": mx.zeros(1)}
    mx.eval(arrays)
    store.commit(Commit(root, blocks), [(block, arrays) for block in blocks])
    store.drain()


STORED_TEXT = "The quick brown fox jumps over the lazy dog, and nobody minds it at all, so far."


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (replace(ROOT, namespace="them"), Reason.OTHER_NAMESPACE),
        (replace(ROOT, session="theirs"), Reason.OTHER_NAMESPACE),
        (replace(ROOT, fingerprint="another"), Reason.OTHER_MODEL),
        (replace(ROOT, layout="8b64"), Reason.OTHER_PRECISION),
        (replace(ROOT, layout="8b64", fingerprint="another"), Reason.OTHER_MODEL),
        (replace(ROOT, with_text=False), Reason.NOTHING_ALIKE),
    ],
)
def test_the_reason_names_the_part_of_the_root_that_differs(
    store: BlockStore, other: Root, reason: Reason
) -> None:
    save(store, other, block_of(other, STORED_TEXT))
    actual, detail = why_not_stored([1, 2], STORED_TEXT, NO_MATCH, ROOT, store)
    assert actual is reason
    assert bool(detail) == (reason is Reason.OTHER_PRECISION)
    # A template's first words are in every conversation.
    alike = STORED_TEXT[: MIN_ALIKE_CHARS - 1] + "?" * 40
    assert why_not_stored([1, 2], alike, NO_MATCH, ROOT, store) == (Reason.NOTHING_ALIKE, "")
    enough = STORED_TEXT[:MIN_ALIKE_CHARS] + "?" * 40
    assert why_not_stored([1, 2], enough, NO_MATCH, ROOT, store) == (actual, detail)
    assert why_not_stored([1, 2], None, NO_MATCH, ROOT, store) == (Reason.NOTHING_ALIKE, "")


@pytest.mark.parametrize(("layout", "own"), [("k6rv4rb64", "k6rv4rb64,c256"), ("4b32", "4b64")])
def test_the_detail_distinguishes_layouts_with_the_same_description(
    store: BlockStore, layout: str, own: str
) -> None:
    root, other = replace(ROOT, layout=own), replace(ROOT, layout=layout)
    save(store, other, block_of(other, STORED_TEXT))
    _, detail = why_not_stored([1, 2], STORED_TEXT, NO_MATCH, root, store)
    words = layout_in_words(own)
    assert f": {words}, in an older format or other groups; now {words}" in detail


def test_a_short_block_of_another_root_must_match_completely(store: BlockStore) -> None:
    other = replace(ROOT, namespace="them")
    save(store, other, block_of(other, "Hello."))
    assert why_not_stored([1], "Hello. You", NO_MATCH, ROOT, store)[0] is Reason.OTHER_NAMESPACE
    assert why_not_stored([1], "Hello, you", NO_MATCH, ROOT, store)[0] is Reason.NOTHING_ALIKE


def test_the_reason_names_the_least_different_root(store: BlockStore) -> None:
    others = (
        replace(ROOT, layout="8b64", fingerprint="another"),
        replace(ROOT, layout="8b64"),
    )
    for other in others:
        save(store, other, block_of(other, STORED_TEXT))
    assert why_not_stored([1], STORED_TEXT, NO_MATCH, ROOT, store)[0] is Reason.OTHER_PRECISION


@pytest.mark.parametrize("foreign", [{"namespace": "them"}, {"session": "theirs"}])
@pytest.mark.parametrize("earlier", [{}, {"fingerprint": "another"}, {"layout": "8b64"}])
def test_the_reported_reason_does_not_depend_on_other_tenants(
    store: BlockStore,
    foreign: dict[str, Any],
    earlier: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other tenants store more blocks, and in more trees than are searched."""
    monkeypatch.setattr("mlx_lm_kvpersist.request.outcome._MAX_ROOTS", 2)
    if earlier:
        other = replace(ROOT, **earlier)
        save(store, other, block_of(other, STORED_TEXT))
    alone = why_not_stored([1], STORED_TEXT, NO_MATCH, ROOT, store)
    for n in range(3):
        other = replace(ROOT, fingerprint=f"fingerprint{n or ''}", **foreign)
        longer = Block(block_key(other.key, b"abcd"), other.key, 0, b"abcd", STORED_TEXT + "More.")
        save(store, other, block_of(other, STORED_TEXT), longer)
        with_others = why_not_stored([1], STORED_TEXT, NO_MATCH, ROOT, store)
        assert (with_others[0].word, with_others[1]) == (alone[0].word, alone[1])
    assert earlier or with_others[0] is Reason.OTHER_NAMESPACE, (
        "the operator's why does not name it"
    )


@pytest.mark.parametrize(
    ("n_tokens", "n_agreed", "reason"),
    [
        (MIN_ALIKE_TOKENS - 1, MIN_ALIKE_CHARS - 1, Reason.NOTHING_ALIKE),
        (MIN_ALIKE_TOKENS, 0, Reason.DIVERGED),
        (0, MIN_ALIKE_CHARS, Reason.DIVERGED),
    ],
)
def test_a_prompt_diverges_if_more_than_the_template_matches(
    store: BlockStore, n_tokens: int, n_agreed: int, reason: Reason
) -> None:
    match = Match((), n_tokens, 0, False, n_agreed)
    assert why_not_stored([1, 2], STORED_TEXT, match, ROOT, store) == (reason, "")


def test_the_reason_is_evicted_if_the_next_block_was_evicted(store: BlockStore) -> None:
    """The evicted block is searched after the last full block of the match."""
    ids = list(range(2 * BLOCK_TOKENS + 9))
    parent, start, path = ROOT.key, 0, []
    for stop in (BLOCK_TOKENS, 2 * BLOCK_TOKENS, len(ids)):
        packed = pack_ids(ids[start:stop])
        path.append(Block(block_key(parent, packed), parent, start, packed, "x"))
        parent, start = path[-1].key, stop
    save(store, ROOT, *path)
    store.disk.make_room(store.limits.max_disk_bytes - store.disk.reserve_bytes)
    for n_left in (2, 1, 0):
        match = Match(tuple(path[:n_left]), n_left * BLOCK_TOKENS, 0, False)
        assert why_not_stored(ids, None, match, ROOT, store) == (Reason.EVICTED, "")
    whole = Match(tuple(path), len(ids), 0, False)
    assert why_not_stored(ids[: 2 * BLOCK_TOKENS], None, whole, ROOT, store)[0] is Reason.DIVERGED
