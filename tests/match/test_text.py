from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_lm_kvpersist.match.text import TokenText

TEXTS = ["Hello world", "Grüße, 世界 🎉!\n\n  tabs\tand  spaces ", '{"a": [1, 2.5, "ü"]}', "é" * 9]


@pytest.mark.parametrize("text", TEXTS)
def test_decodes_what_the_tokenizer_encodes(
    tokenizer: Any, token_text: TokenText, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    # SentencePiece-like tokenizers put a space in front; it is part of what the ids mean.
    assert token_text.decode(ids).removeprefix(" ") == text


def test_special_tokens_keep_their_spelling(tokenizer: Any, token_text: TokenText) -> None:
    eos = tokenizer.eos_token_id
    assert token_text.decode([eos, eos]) == tokenizer.eos_token * 2


def test_unknown_ids_have_no_text(token_text: TokenText) -> None:
    assert token_text.decode([10**6]) == ""


@given(data=st.data())
def test_feeding_in_parts_equals_decoding_the_whole(token_text: TokenText, data: Any) -> None:
    ids = data.draw(st.lists(st.integers(0, 599), max_size=40))
    cut = data.draw(st.integers(0, len(ids)))
    head, pending = token_text.feed(ids[:cut])
    tail, rest = token_text.feed(ids[cut:], pending)
    assert head + tail + rest.decode("utf-8", "replace") == token_text.decode(ids)
    ends = token_text.ends(ids[cut:], pending)
    assert [n for n, _ in ends] == [
        len(token_text.feed(ids[cut:stop], pending)[0]) for stop in range(cut + 1, len(ids) + 1)
    ]


def test_a_tokenizer_without_a_known_decoder_is_refused() -> None:
    class Slow:
        pass

    assert TokenText.of(Slow()) is None
