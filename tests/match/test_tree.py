"""Matches in the tree of blocks, compared with a search over all stored prefixes."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_lm_kvpersist.block import Block, block_key, pack_ids
from mlx_lm_kvpersist.match import TokenText, common_prefix, match_prompt

from .conftest import EXAMPLES
from .tree_in_memory import ROOT, MemoryTree

SENTENCES = ["Grüße, 世界 🎉", " and so on", "\n\n", "naïve café", "🎉🎊", "abc abd", " ", "  x"]


def sequences(tokenizer: Any) -> st.SearchStrategy[list[int]]:
    """Ids of text, random ids (with incomplete characters), and sequences of both."""
    texts = st.lists(st.sampled_from(SENTENCES), max_size=4).map("".join)
    canonical = texts.map(lambda text: list(tokenizer.encode(text, add_special_tokens=False)))
    sampled = st.lists(st.integers(0, 599), max_size=12)
    parts = st.lists(canonical | sampled, min_size=1, max_size=4)
    return parts.map(lambda ids: list(chain(*ids)))


def longest_by_trying(stored: list[list[int]], text: str, tokens: TokenText) -> int:
    """Return the length of the longest stored prefix of `text` that ends with a whole token."""
    best = 0
    for ids in stored:
        for n in range(len(ids) + 1):
            prefix = tokens.decode(ids[:n])
            if text.startswith(prefix):
                best = max(best, len(prefix))
    return best


@EXAMPLES
@given(data=st.data())
def test_match_is_the_longest_stored_prefix_of_the_text(
    tokenizer: Any, token_text: TokenText, data: Any
) -> None:
    tree = MemoryTree(token_text, block_tokens=data.draw(st.sampled_from([1, 3, 8])))
    stored = data.draw(st.lists(sequences(tokenizer), min_size=1, max_size=4))
    for ids in stored:
        tree.add(ids)
    base = token_text.decode(data.draw(st.sampled_from(stored)))
    cut = data.draw(st.integers(0, len(base)))
    text = base[:cut] + token_text.decode(data.draw(sequences(tokenizer)))
    match = match_prompt(tree, ROOT, text, token_text)
    assert token_text.decode(match.ids) == text[: match.n_chars]
    assert match.n_chars == longest_by_trying(stored, text, token_text)


@EXAMPLES
@given(data=st.data())
def test_match_is_the_longest_stored_prefix_of_the_ids(
    tokenizer: Any, token_text: TokenText, data: Any
) -> None:
    tree = MemoryTree(token_text, block_tokens=4)
    stored = data.draw(st.lists(sequences(tokenizer), min_size=1, max_size=4))
    for ids in stored:
        tree.add(ids)
    base = data.draw(st.sampled_from(stored))
    prompt = base[: data.draw(st.integers(0, len(base)))] + data.draw(sequences(tokenizer))
    match = match_prompt(tree, ROOT, pack_ids(prompt))
    expected = max(common_prefix(pack_ids(ids), pack_ids(prompt), 0) // 4 for ids in stored)
    assert match.n_tokens == expected
    assert match.ids == prompt[: match.n_tokens]


def test_at_end_tells_whether_stored_tokens_continue(tokenizer: Any, token_text: TokenText) -> None:
    tree = MemoryTree(token_text, block_tokens=4)
    ids = tokenizer.encode("one two three four five six", add_special_tokens=False)
    tree.add(ids)
    text = token_text.decode(ids)
    assert match_prompt(tree, ROOT, text + " seven", token_text).at_end
    assert not match_prompt(tree, ROOT, text[:-3] + "!", token_text).at_end
    other = tokenizer.encode("nothing alike", add_special_tokens=False)
    assert match_prompt(tree, ROOT, token_text.decode(other)[1:], token_text).path == ()


def test_blocks_with_the_prompts_ids_match_without_decoding(
    tokenizer: Any, token_text: TokenText, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt in RAM is matched without decoding its tokens."""
    tree = MemoryTree(token_text, block_tokens=4)
    ids = tokenizer.encode("one two three four five six", add_special_tokens=False)
    tree.add(ids)
    prompt = [*ids, *tokenizer.encode(" seven", add_special_tokens=False)]
    text = token_text.decode(prompt)
    expected = match_prompt(tree, ROOT, text, token_text)
    checked: list[list[int]] = []

    def covers(_: TokenText, ids: list[int]) -> bool:
        checked.append(ids)
        return True

    monkeypatch.setattr(TokenText, "covers", covers)
    monkeypatch.setattr(TokenText, "ends", covers)
    assert match_prompt(tree, ROOT, text, token_text, packed_ids=pack_ids(prompt)) == expected
    assert expected.ids == ids and not checked
    other = pack_ids([ids[0] + 1, *prompt[1:]])
    assert match_prompt(tree, ROOT, text, token_text, packed_ids=other) == expected
    assert checked == [ids[:4]]


def test_block_with_the_prompts_ids_may_end_inside_a_character() -> None:
    tokens = TokenText({0: b"a", 1: b"\xc3", 2: b"\xa9", 3: b"\xc3\xa9", 4: b"aa"}.get)
    tree = MemoryTree(tokens, block_tokens=2)
    tree.add([0, 1])
    same_ids, other_ids = [0, 1, 2], [0, 3]
    match = match_prompt(tree, ROOT, "aé", tokens, pack_ids(same_ids))
    assert (match.n_tokens, match.n_chars, match.at_end) == (2, 1, True)
    match = match_prompt(tree, ROOT, "aé", tokens, pack_ids(other_ids))
    assert (match.n_tokens, match.n_chars, match.at_end) == (1, 1, False)
    tree = MemoryTree(tokens, block_tokens=2)
    tree.add([4, 0, 0, 1])
    for first, n_tokens in (([4, 0], 4), ([0, 4], 3)):  # the same text in other ids
        prompt = [*first, 0, 1, 2]
        match = match_prompt(tree, ROOT, "aaaaé", tokens, pack_ids(prompt))
        assert match.n_tokens == n_tokens


def test_packed_ids_match_only_as_whole_tokens(token_text: TokenText) -> None:
    tree = MemoryTree(token_text, block_tokens=2)
    tree.add([5, 7])
    assert match_prompt(tree, ROOT, pack_ids([5, 256 + 7])).n_tokens == 1
    tree.add([1, 2, 7])
    match = match_prompt(tree, ROOT, pack_ids([1, 2, 256 + 7]))
    assert (len(match.path), match.n_tokens) == (1, 2)


def test_match_reports_the_stored_text_after_a_divergence(token_text: TokenText) -> None:
    tree = MemoryTree(token_text, block_tokens=2)
    tree.add([token_text_id(token_text, letter.encode()) for letter in "abcdef"])
    for n_agreed, stored_next in ((1, "b"), (2, "cd"), (3, "d"), (4, "ef"), (5, "f"), (6, "")):
        match = match_prompt(tree, ROOT, "abcdef"[:n_agreed] + "!", token_text)
        assert (match.n_agreed, match.stored_next) == (n_agreed, stored_next)


def token_text_id(tokens: TokenText, piece: bytes) -> int:
    return next(i for i in range(600) if tokens.to_bytes([i]) == piece)


@pytest.mark.parametrize("equal", [0, 1, 7, 8, 9, 100])
def test_common_prefix_counts_equal_characters(equal: int) -> None:
    content = "x" * equal + "y" * 5
    prompt = "--" + "x" * equal + "z" * 50
    assert common_prefix(content, prompt, 2) == equal


@EXAMPLES
@given(data=st.data())
def test_text_match_ends_before_an_unknown_token(token_text: TokenText, data: Any) -> None:
    """Neither the text without the unknown token nor its replacement character matches further."""
    known = st.integers(0, 599).filter(lambda i: token_text.covers([i]))
    before, after = (data.draw(st.lists(known, min_size=1, max_size=6)) for _ in range(2))
    tree = MemoryTree(token_text, block_tokens=data.draw(st.sampled_from([1, 3, 8])))
    stored = [*before, 10**6, *after]
    tree.add(stored)
    for text in (token_text.decode(before + after), token_text.decode(stored)):
        match = match_prompt(tree, ROOT, text, token_text)
        assert match.ids == stored[: match.n_tokens] and match.n_tokens <= len(before)
        # Text before the unknown token matches, so a question is found after any reply.
        assert match.n_chars == longest_by_trying([before], text, token_text)
    assert match_prompt(tree, ROOT, pack_ids(stored)).n_tokens == len(stored)


@pytest.mark.parametrize("wrong_field", ["start", "ids", "parent ids"])
def test_block_that_contradicts_its_key_is_not_matched(
    token_text: TokenText, wrong_field: str
) -> None:
    """A damaged index can have a wrong position or wrong ids for a block."""
    spelled = [token_text_id(token_text, piece) for piece in (b"a", b"b", b"c", b"d")]
    first, second, other = pack_ids(spelled[:2]), pack_ids(spelled[2:]), pack_ids(spelled[1:3])
    parent_ids = other if wrong_field == "parent ids" else first
    parent = Block(block_key(ROOT, parent_ids), ROOT, 0, first, "ab")
    key = block_key(parent.key, other if wrong_field == "ids" else second)
    child = Block(key, parent.key, 3 if wrong_field == "start" else 2, second, "cd")
    tree = MemoryTree(token_text, block_tokens=2)
    for node in (parent, child):
        tree.add_node(node)
    n_valid = 0 if wrong_field == "parent ids" else 2
    assert match_prompt(tree, ROOT, pack_ids([*spelled, 5])).n_tokens == n_valid
    assert match_prompt(tree, ROOT, "abcde", token_text).n_tokens == n_valid


def test_blocks_that_agree_with_their_keys_are_matched(token_text: TokenText) -> None:
    """The test above finds fewer blocks only because of its wrong fields."""
    spelled = [token_text_id(token_text, piece) for piece in (b"a", b"b", b"c", b"d")]
    tree = MemoryTree(token_text, block_tokens=2)
    tree.add(spelled)
    assert match_prompt(tree, ROOT, pack_ids([*spelled, 5])).n_tokens == 4
    assert match_prompt(tree, ROOT, "abcde", token_text).n_tokens == 4
