"""Control tokens and their spellings: equal texts, which differ by ids and positions."""

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
    },
    controls=(MARK, END),
)
SPELLED = [2, 3, 4]


def matched(stored: list[list[int]], prompt: list[int], block_tokens: int = 2) -> Any:
    tree = MemoryTree(TOKENS, block_tokens)
    for ids in stored:
        tree.add(ids)
    return match_prompt(tree, ROOT, TOKENS.decode(prompt), TOKENS, pack_ids(prompt))


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 64])
@pytest.mark.parametrize("end", [[], [1], [END, 1]])
def test_a_match_ends_before_the_first_difference(block_tokens: int, end: list[int]) -> None:
    own = [1, MARK, 5, *SPELLED, 1, *end]
    for stored in (
        [1, *SPELLED, 5, *SPELLED, 1, *end],
        [1, *SPELLED, 5, MARK, 1, *end],  # as many control tokens, at other positions
    ):
        for held, asked in ((stored, own), (own, stored)):
            match = matched([held], [*asked, 3], block_tokens)
            assert match.ids == [1]
    match = matched([[1, MARK, 5, MARK, 1, *end]], [*own, 3], block_tokens)
    assert match.ids == [1, MARK, 5]


@pytest.mark.parametrize("block_tokens", [1, 2, 64])
def test_of_two_branches_with_one_text_that_with_the_control_tokens_is_matched(
    block_tokens: int,
) -> None:
    spelled, own = [1, *SPELLED, 1, 1], [1, MARK, 1, 1]
    for prompt in (spelled, own):
        assert matched([spelled, own], [*prompt, 3], block_tokens).ids == prompt


def test_a_control_token_behind_half_a_character_has_its_place() -> None:
    assert TOKENS.controls([1, 6, MARK, 5, END]) == [(2, MARK), (6, END)]
    assert TOKENS.controls([MARK, 1], pending=b"\xc3") == [(1, MARK)]


def test_a_rest_that_is_encoded_with_other_control_tokens_is_not_spliced_in() -> None:
    """A tokenizer may find control tokens in text that the prompt has as ordinary tokens."""
    tree = MemoryTree(TOKENS, 4)
    tree.add([1])
    prompt = [7, 3, 4]  # no token begins where the stored text ends
    text = TOKENS.decode(prompt)
    match = match_prompt(tree, ROOT, text, TOKENS, pack_ids(prompt))
    assert (match.ids, match.at_end) == ([1], True)
    for rest, expected in (([2, 3, 4], [1, 2, 3, 4]), ([MARK], None)):
        assert TOKENS.decode([1, *rest]) == text
        result = splice(prompt, text, match, TOKENS, {text[1:]: rest}.__getitem__)
        assert (result.ids if result is not None else None) == expected
