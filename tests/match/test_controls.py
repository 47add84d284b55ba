"""Control tokens, and ordinary tokens with the same text: their ids and positions differ."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_lm_kvpersist.block import pack_ids
from mlx_lm_kvpersist.match import TokenText, match_prompt, splice

from .tree_in_memory import ROOT, MemoryTree

MARK, END = 10, 11
TOKENS = TokenText(
    {
        1: b"a",
        2: b"<",
        3: b"x",
        4: b">",
        5: "ü".encode(),
        6: b"\xc3",
        7: b"a<",
        MARK: b"<x>",
        END: b"<>",
    }.get,
    controls=(MARK, END),
)
SPELLED = [2, 3, 4]


def match_of(stored: list[list[int]], prompt: list[int], block_tokens: int = 2) -> Any:
    tree = MemoryTree(TOKENS, block_tokens)
    for ids in stored:
        tree.add(ids)
    return match_prompt(tree, ROOT, TOKENS.decode(prompt), TOKENS, pack_ids(prompt))


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 64])
@pytest.mark.parametrize("end", [[], [1], [END, 1]])
def test_match_ends_before_the_first_differing_control_token(
    block_tokens: int, end: list[int]
) -> None:
    mixed = [1, MARK, 5, *SPELLED, 1, *end]
    for variant in (
        [1, *SPELLED, 5, *SPELLED, 1, *end],
        [1, *SPELLED, 5, MARK, 1, *end],  # as many control tokens, but at other positions
    ):
        for stored, prompt in ((variant, mixed), (mixed, variant)):
            match = match_of([stored], [*prompt, 3], block_tokens)
            assert match.ids == [1]
    match = match_of([[1, MARK, 5, MARK, 1, *end]], [*mixed, 3], block_tokens)
    assert match.ids == [1, MARK, 5]


@pytest.mark.parametrize("block_tokens", [1, 2, 64])
def test_prompt_matches_the_branch_with_the_same_control_tokens(
    block_tokens: int,
) -> None:
    spelled, marked = [1, *SPELLED, 1, 1], [1, MARK, 1, 1]
    for prompt in (spelled, marked):
        assert match_of([spelled, marked], [*prompt, 3], block_tokens).ids == prompt


def test_control_token_after_an_incomplete_character_has_the_right_position() -> None:
    assert TOKENS.controls([1, 6, MARK, 5, END]) == [(2, MARK), (6, END)]
    assert TOKENS.controls([MARK, 1], pending=b"\xc3") == [(1, MARK)]


def test_remainder_encoded_with_other_control_tokens_is_not_spliced_in() -> None:
    """A tokenizer may encode text as control tokens that the prompt has as ordinary tokens."""
    tree = MemoryTree(TOKENS, 4)
    tree.add([1])
    prompt = [7, 3, 4]  # no token begins where the stored text ends
    text = TOKENS.decode(prompt)
    match = match_prompt(tree, ROOT, text, TOKENS, pack_ids(prompt))
    assert (match.ids, match.at_end) == ([1], True)
    for remainder, expected in (([2, 3, 4], [1, 2, 3, 4]), ([MARK], None)):
        assert TOKENS.decode([1, *remainder]) == text
        result = splice(prompt, text, match, TOKENS, {text[1:]: remainder}.__getitem__)
        assert (result.ids if result is not None else None) == expected
