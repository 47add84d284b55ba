"""Prompts with images: an image matches as a whole, by its full hash; text matches by text."""

from __future__ import annotations

from hashlib import sha256
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_lm_kvpersist.block import Block, block_key, pack_ids, unpack_ids
from mlx_lm_kvpersist.image_ids import GOES_ON, before_image, first_id
from mlx_lm_kvpersist.match import REPLACEMENT, TokenText, match_prompt, splice

from .conftest import EXAMPLES
from .test_tree import sequences
from .tree_in_memory import ROOT, MemoryTree


def image(number: int, n_tokens: int) -> list[int]:
    digest = sha256(number.to_bytes(4, "big")).digest()
    return [first_id(digest), *[GOES_ON] * (n_tokens - 1)]


IMAGES = [image(number, n_tokens) for number, n_tokens in enumerate([1, 2, 5, 11])]


def image_ids_of(ids: list[int]) -> list[int]:
    return [token for token in ids if token < 0]


def prompts_with_images(tokenizer: Any) -> st.SearchStrategy[list[int]]:
    """Token ids of text in any spelling, with images in between."""
    parts = st.lists(st.sampled_from(IMAGES) | sequences(tokenizer), min_size=1, max_size=5)
    return parts.map(lambda ids: sum(ids, [5]))


@given(st.lists(st.sampled_from(IMAGES) | st.lists(st.integers(0, 2**31 - 1))))
def test_packed_ids_with_images_unpack_to_the_same_ids(parts: list[list[int]]) -> None:
    ids = list(chain.from_iterable(parts))
    packed = pack_ids(ids)
    assert unpack_ids(packed) == ids
    block = Block(block_key(ROOT, packed), ROOT, 3, packed)
    assert (block.n_tokens, block.ids) == (len(ids), ids)
    assert all(packed.startswith(pack_ids(ids[:n])) for n in range(len(ids)))


@given(st.binary(max_size=200))
def test_unpacking_damaged_ids_raises_no_exception(packed: bytes) -> None:
    unpack_ids(packed[: len(packed) // 4 * 4])


def test_packed_ids_differ_for_every_bit_of_an_image_hash() -> None:
    """mlx-lm keeps 60 bits of the hash; a block's key covers all 256 bits."""
    (first,) = image(0, 1)
    packed = [pack_ids([-(-first ^ 1 << bit)]) for bit in range(256)]
    assert len({pack_ids([first]), *packed}) == 257


def test_text_of_an_image_comes_from_its_first_token(token_text: TokenText) -> None:
    ids = [5, *IMAGES[2], 6]
    assert token_text.covers(ids) and not token_text.covers([*ids, 10**6])
    text = token_text.decode(ids)
    assert text == token_text.known_text(ids)
    assert token_text.feed(ids[3:], token_text.feed(ids[:3])[1])[0] == token_text.decode([6])
    assert token_text.decode(IMAGES[1]) == f"\ufffc1{sha256(bytes([0, 0, 0, 1])).hexdigest()}"


@EXAMPLES
@given(data=st.data())
def test_match_is_the_longest_that_does_not_end_inside_an_image(
    tokenizer: Any, token_text: TokenText, data: Any
) -> None:
    tree = MemoryTree(token_text, block_tokens=data.draw(st.sampled_from([1, 3, 8])))
    stored = data.draw(st.lists(prompts_with_images(tokenizer), min_size=1, max_size=3))
    base = data.draw(st.sampled_from(stored))
    stored[0] = stored[0][: data.draw(st.integers(0, len(stored[0])))]
    for ids in stored:
        tree.add(ids)
    n_kept = before_image(base, data.draw(st.integers(0, len(base))))
    prompt = base[:n_kept] + data.draw(prompts_with_images(tokenizer))
    longest = max(
        n
        for ids in stored
        for n in range(len(ids) + 1)
        if ids[:n] == prompt[:n] and before_image(prompt, n) == n
    )
    by_ids = match_prompt(tree, ROOT, pack_ids(prompt))
    assert by_ids.ids == prompt[: by_ids.n_tokens] and by_ids.n_tokens == longest
    assert before_image(prompt, longest) == longest

    def encode(content: str) -> list[int]:
        return list(tokenizer.encode(content, add_special_tokens=False))

    text = token_text.decode(prompt)
    match = match_prompt(tree, ROOT, text, token_text, pack_ids(prompt))
    if pack_ids(prompt).startswith(match.packed_ids):
        assert before_image(prompt, match.n_tokens) == match.n_tokens
        is_whole = REPLACEMENT not in token_text.decode(prompt[:longest])
        assert match.n_tokens >= longest or not is_whole  # the match may end inside a character
        return
    assert text.startswith(token_text.decode(match.ids))
    result = splice(prompt, text, match, token_text, encode)
    if result is not None:
        assert token_text.decode(result.ids) == text and image_ids_of(result.ids) == image_ids_of(
            prompt
        )
        assert before_image(result.ids, result.n_stored) == result.n_stored


@pytest.mark.parametrize("n_tokens", [1, 2, 5, 11, 300])
def test_image_at_the_end_of_the_match_is_matched_as_a_whole(
    token_text: TokenText, n_tokens: int
) -> None:
    tree = MemoryTree(token_text, block_tokens=4)
    with_image = [7, 8, *image(3, n_tokens)]
    tree.add([*with_image, 9])
    prompt = [*with_image, 11]
    text = token_text.decode(prompt)
    match = match_prompt(tree, ROOT, text, token_text, pack_ids(prompt))
    assert match.ids == with_image


def test_stored_spelling_is_used_before_and_after_an_image(
    tokenizer: Any, token_text: TokenText
) -> None:
    """The prompt gets the reply's sampled ids, before an image and after it."""
    word = [i for i in tokenizer.encode(" conversation", add_special_tokens=False)]
    spelled = [
        next(i for i in range(600) if token_text.to_bytes([i]) == bytes([byte]))
        for byte in token_text.to_bytes(word)
    ]
    assert spelled != word
    end = [tokenizer.eos_token_id]
    tree = MemoryTree(token_text, block_tokens=4)
    stored = [*end, *spelled, *end, *IMAGES[3], *end, *spelled, *end]
    tree.add(stored)
    prompt = [*end, *word, *end, *IMAGES[3], *end, *word, *end, 9]
    text = token_text.decode(prompt)
    match = match_prompt(tree, ROOT, text, token_text, pack_ids(prompt))
    result = splice(prompt, text, match, token_text, lambda content: [])
    assert result is not None and result.ids == [*stored, 9]


def test_image_marker_written_as_text_does_not_match_an_image(
    tokenizer: Any, token_text: TokenText
) -> None:
    """Text that equals an image's marker keeps its own ids, and an image keeps its ids."""
    with_image = [5, *IMAGES[2], 6]
    text = token_text.decode(with_image)
    as_text = list(tokenizer.encode(text, add_special_tokens=False))
    if token_text.decode(as_text) != text:
        pytest.skip("this tokenizer puts a space in front")
    for stored, prompt in ((with_image, as_text), (as_text, with_image)):
        tree = MemoryTree(token_text, block_tokens=4)
        tree.add(stored)
        match = match_prompt(tree, ROOT, text, token_text, pack_ids(prompt))
        assert match.ids == with_image[:1]
        prompt_text = text + token_text.decode([7])
        result = splice([*prompt, 7], prompt_text, match, token_text, lambda content: [])
        assert result is not None and result.ids == [*prompt, 7]
        by_text = match_prompt(tree, ROOT, text, token_text)
        assert by_text.ids == stored
        assert splice([*prompt, 7], prompt_text, by_text, token_text, lambda content: []) is None
