from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mlx_lm_kvpersist.block import Block, block_key, pack_ids
from mlx_lm_kvpersist.match import TokenText, match_prompt, splice

from .conftest import EXAMPLES
from .test_tree import sequences, token_text_id
from .tree_in_memory import ROOT, MemoryTree


@EXAMPLES
@given(data=st.data())
def test_spliced_prompt_decodes_to_the_clients_text(
    tokenizer: Any, token_text: TokenText, data: Any
) -> None:
    tree = MemoryTree(token_text, block_tokens=4)
    stored = data.draw(sequences(tokenizer))
    tree.add(stored)
    history = token_text.decode(stored)
    cut = data.draw(st.integers(0, len(history)))
    client_text = history[:cut] + data.draw(st.sampled_from(["", " more", "ü🎉", "\n", "d. E"]))
    prompt = list(tokenizer.encode(client_text, add_special_tokens=False))
    text = token_text.decode(prompt)
    match = match_prompt(tree, ROOT, text, token_text)

    def encode(content: str) -> list[int]:
        return list(tokenizer.encode(content, add_special_tokens=False))

    result = splice(prompt, text, match, token_text, encode)
    if result is None:
        return
    ids, n_stored = result
    assert ids[:n_stored] == match.ids[:n_stored]
    assert n_stored == len(match.ids) or not match.at_end
    assert token_text.decode(ids) == text


def test_sampled_ids_are_kept_before_a_new_message(tokenizer: Any, token_text: TokenText) -> None:
    """The word is stored as single-byte tokens; the prompt gets these ids, not the encoded ids."""

    def encode(content: str) -> list[int]:
        return list(tokenizer.encode(content, add_special_tokens=False))

    word = "conversation"
    id_of = {token_text.to_bytes([i]): i for i in range(600)}
    stored = [*encode("Hi"), *(id_of[bytes([c])] for c in word.encode()), tokenizer.eos_token_id]
    tree = MemoryTree(token_text, block_tokens=4)
    tree.add(stored)
    prompt = encode(f"Hi{word}{tokenizer.eos_token}next")
    text = token_text.decode(prompt)
    match = match_prompt(tree, ROOT, text, token_text)
    result = splice(prompt, text, match, token_text, encode)
    assert result is not None
    ids, n_stored = result
    assert n_stored == len(stored)
    assert ids[:n_stored] == stored
    assert ids != prompt
    n_next = len(ids) - n_stored
    assert ids[-n_next:] == prompt[-n_next:]


def test_canonical_prompt_is_neither_changed_nor_encoded_again(
    tokenizer: Any, token_text: TokenText
) -> None:
    prompt = list(tokenizer.encode("the same words again and again", add_special_tokens=False))
    tree = MemoryTree(token_text, block_tokens=4)
    tree.add(prompt[:7])
    text = token_text.decode(prompt)
    match = match_prompt(tree, ROOT, text, token_text)

    def never(content: str) -> list[int]:
        raise AssertionError(f"encoded {content!r}")

    result = splice(prompt, text, match, token_text, never)
    assert result == (prompt, 7)


@EXAMPLES
@given(data=st.data())
def test_prompt_that_diverges_from_stored_text_keeps_its_ids(
    tokenizer: Any, token_text: TokenText, data: Any
) -> None:
    """The ids after a divergence do not show that another prompt was stored before."""

    def encode(content: str) -> list[int]:
        return list(tokenizer.encode(content, add_special_tokens=False))

    words = st.sampled_from(
        ["abc", "abd", "1", "12", "120", " ", "conversation", "conver", "ü", "🎉"]
    )
    common = "".join(data.draw(st.lists(words, min_size=1, max_size=6)))
    stored_text, prompt_text = (
        common + "".join(data.draw(st.lists(words, max_size=3))) for _ in range(2)
    )
    tree = MemoryTree(token_text, block_tokens=4)
    tree.add([*encode(stored_text), tokenizer.eos_token_id])
    prompt = encode(prompt_text)
    text = token_text.decode(prompt)
    match = match_prompt(tree, ROOT, text, token_text)
    result = splice(prompt, text, match, token_text, encode)
    if result is not None and not match.at_end:
        assert result[0] == prompt


TOKENS = TokenText(
    dict(
        enumerate(
            [
                *(b"H", b"i", b"Hi", b"\n", b"\xf0", b"x", "\ufffd".encode(), b"i\n"),
                *(b"\xc2", b"\xb8", b"\xb8\xd1"),
            ]
        )
    ).get
)


def splice_after(stored: list[int], prompt: list[int], remainder: list[int] | None = None) -> Any:
    """Splice a prompt after stored ids; the text after them is encoded as `remainder`."""
    tree = MemoryTree(TOKENS, block_tokens=4)
    tree.add(stored)
    text = TOKENS.decode(prompt)

    def encode(content: str) -> list[int]:
        assert remainder is not None and TOKENS.decode(remainder) == content
        return remainder

    return splice(prompt, text, match_prompt(tree, ROOT, text, TOKENS), TOKENS, encode)


def test_later_reply_with_an_incomplete_character_keeps_its_ids() -> None:
    """The reply ends inside a character, and the prompt has its sampled ids."""
    assert splice_after([0, 1], [2, 3, 4, 5]) == ([0, 1, 3, 4, 5], 2)


def test_remainder_with_an_incomplete_character_is_encoded_again() -> None:
    """An invalid byte is encoded again as a replacement character of three bytes."""
    assert splice_after([2], [0, 7, 4, 5], remainder=[3, 6, 5]) == ([2, 3, 6, 5], 1)


def test_cut_inside_a_character_keeps_the_prompts_ids() -> None:
    """The stored text begins with half of a character, and continues with other bytes."""
    assert splice_after([8, 10, 5], [8, 9, 6]) == ([8, 9, 6], 1)


def test_block_whose_text_contradicts_its_ids_is_not_spliced_in(
    tokenizer: Any, token_text: TokenText
) -> None:
    """A key covers ids, not text: a damaged index can have another text of the same length."""

    def encode(content: str) -> list[int]:
        return list(tokenizer.encode(content, add_special_tokens=False))

    prompt = encode("\nbe kind to her and go on")
    text = token_text.decode(prompt)
    stored = [token_text_id(token_text, bytes([c])) for c in b"\nbe rude to him"]
    node = Block(block_key(ROOT, pack_ids(stored)), ROOT, 0, pack_ids(stored), text[:15])
    tree = MemoryTree(token_text, block_tokens=4)
    tree.add_node(node)
    match = match_prompt(tree, ROOT, text, token_text)
    assert (match.ids, match.n_chars, match.at_end) == (stored, 15, True)
    assert splice(prompt, text, match, token_text, encode) is None


def test_prompt_keeps_its_ids_if_the_match_ends_inside_stored_text() -> None:
    """The stored text has "ab" as two tokens; the prompt has "ab" as one token."""
    tokens = TokenText({1: b"a", 2: b"b", 3: b"ab", 4: b"c", 5: b"x", 6: b"y"}.get)
    tree = MemoryTree(tokens, block_tokens=4)
    tree.add([5, 1, 2, 4])
    match = match_prompt(tree, ROOT, "xaby", tokens)
    assert (match.ids, match.at_end) == ([5, 1, 2], False)
    assert splice([5, 3, 6], "xaby", match, tokens, lambda content: []) == ([5, 3, 6], 1)
