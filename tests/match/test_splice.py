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
def test_a_splice_means_the_same_text(tokenizer: Any, token_text: TokenText, data: Any) -> None:
    """Whatever was sampled before, the spliced prompt decodes to the client's text."""
    tree = MemoryTree(token_text, block_tokens=4)
    stored = data.draw(sequences(tokenizer))
    tree.add(stored)
    history = token_text.decode(stored)
    cut = data.draw(st.integers(0, len(history)))
    asked = history[:cut] + data.draw(st.sampled_from(["", " more", "ü🎉", "\n", "d. E"]))
    prompt = list(tokenizer.encode(asked, add_special_tokens=False))
    text = token_text.decode(prompt)
    match = match_prompt(tree, ROOT, text, token_text)

    def encode(part: str) -> list[int]:
        return list(tokenizer.encode(part, add_special_tokens=False))

    result = splice(prompt, text, match, token_text, encode)
    if result is None:
        return
    ids, n_stored = result
    assert ids[:n_stored] == match.ids[:n_stored]
    assert n_stored == len(match.ids) or not match.at_end
    assert token_text.decode(ids) == text


def test_sampled_ids_survive_in_front_of_a_new_message(
    tokenizer: Any, token_text: TokenText
) -> None:
    """Spelling out a word gives other ids than encoding it: the stored ones are used."""

    def encode(part: str) -> list[int]:
        return list(tokenizer.encode(part, add_special_tokens=False))

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


def test_canonical_prompts_stay_as_they_are(tokenizer: Any, token_text: TokenText) -> None:
    prompt = list(tokenizer.encode("the same words again and again", add_special_tokens=False))
    tree = MemoryTree(token_text, block_tokens=4)
    tree.add(prompt[:7])
    text = token_text.decode(prompt)
    match = match_prompt(tree, ROOT, text, token_text)

    def never(part: str) -> list[int]:
        raise AssertionError(f"encoded {part!r}")

    result = splice(prompt, text, match, token_text, never)
    assert result == (prompt, 7)


@EXAMPLES
@given(data=st.data())
def test_a_prompt_that_parts_is_spelled_as_it_would_be_alone(
    tokenizer: Any, token_text: TokenText, data: Any
) -> None:
    """Where prompts diverge, no id shows that another prompt was stored before."""

    def encode(part: str) -> list[int]:
        return list(tokenizer.encode(part, add_special_tokens=False))

    words = st.sampled_from(
        ["abc", "abd", "1", "12", "120", " ", "conversation", "conver", "ü", "🎉"]
    )
    common = "".join(data.draw(st.lists(words, min_size=1, max_size=6)))
    one, other = (common + "".join(data.draw(st.lists(words, max_size=3))) for _ in range(2))
    tree = MemoryTree(token_text, block_tokens=4)
    tree.add([*encode(one), tokenizer.eos_token_id])
    prompt = encode(other)
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
    )
)


def spliced_in(stored: list[int], prompt: list[int], rest: list[int] | None = None) -> Any:
    """Splice a prompt after stored ids; `rest` are the ids of an encoded rest."""
    tree = MemoryTree(TOKENS, block_tokens=4)
    tree.add(stored)
    text = TOKENS.decode(prompt)

    def encode(part: str) -> list[int]:
        assert rest is not None and TOKENS.decode(rest) == part
        return rest

    return splice(prompt, text, match_prompt(tree, ROOT, text, TOKENS), TOKENS, encode)


def test_a_later_reply_with_an_incomplete_character_keeps_its_ids() -> None:
    """The reply ends inside a character, and is fed as the model's own ids."""
    assert spliced_in([0, 1], [2, 3, 4, 5]) == ([0, 1, 3, 4, 5], 2)


def test_a_rest_with_an_incomplete_character_is_encoded_again() -> None:
    """Encoded again, one invalid byte is a character of three bytes."""
    assert spliced_in([2], [0, 7, 4, 5], rest=[3, 6, 5]) == ([2, 3, 6, 5], 1)


def test_a_cut_within_a_character_keeps_the_prompts_ids() -> None:
    """The stored text begins with half of a character, and continues with other bytes."""
    assert spliced_in([8, 10, 5], [8, 9, 6]) == ([8, 9, 6], 1)


def test_a_block_whose_text_is_not_that_of_its_ids_is_not_spliced_in(
    tokenizer: Any, token_text: TokenText
) -> None:
    """A key covers ids, not text: a damaged index can claim another text of the same length."""

    def encode(part: str) -> list[int]:
        return list(tokenizer.encode(part, add_special_tokens=False))

    prompt = encode("\nbe kind to her and go on")
    text = token_text.decode(prompt)
    stored = [token_text_id(token_text, bytes([c])) for c in b"\nbe rude to him"]
    node = Block(block_key(ROOT, pack_ids(stored)), ROOT, 0, pack_ids(stored), text[:15])
    tree = MemoryTree(token_text, block_tokens=4)
    tree.add_node(node)
    match = match_prompt(tree, ROOT, text, token_text)
    assert (match.ids, match.n_chars, match.at_end) == (stored, 15, True)
    assert splice(prompt, text, match, token_text, encode) is None


def test_in_the_middle_the_prompt_keeps_its_spelling() -> None:
    """Another branch spelled "ab" as two tokens; the prompt's token "ab" ends there, too."""
    tokens = TokenText({1: b"a", 2: b"b", 3: b"ab", 4: b"c", 5: b"x", 6: b"y"})
    tree = MemoryTree(tokens, block_tokens=4)
    tree.add([5, 1, 2, 4])
    match = match_prompt(tree, ROOT, "xaby", tokens)
    assert (match.ids, match.at_end) == ([5, 1, 2], False)
    assert splice([5, 3, 6], "xaby", match, tokens, lambda part: []) == ([5, 3, 6], 1)
