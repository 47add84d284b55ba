from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from mlx_lm_kvpersist.match import REPLACEMENT, TokenText, _sentencepiece_piece

from .conftest import EXAMPLES

TEXTS = ["Hello world", "Grüße, 世界 🎉!\n\n  tabs\tand  spaces ", '{"a": [1, 2.5, "ü"]}', "é" * 9]


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_returns_the_encoded_text(
    tokenizer: Any, token_text: TokenText, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    # SentencePiece-like tokenizers add a leading space, which the ids include.
    assert token_text.decode(ids).removeprefix(" ") == text


def test_special_tokens_decode_to_their_names(tokenizer: Any, token_text: TokenText) -> None:
    eos = tokenizer.eos_token_id
    assert token_text.decode([eos, eos]) == tokenizer.eos_token * 2


def test_unknown_ids_decode_to_replacement_characters(token_text: TokenText) -> None:
    unknown = 10**6
    assert not token_text.covers([1, unknown])
    assert token_text.decode([unknown]) == REPLACEMENT
    assert token_text.n_bytes_ends([unknown, unknown]) == [1, 2]


def test_a_token_that_is_one_invalid_byte_is_known() -> None:
    text = TokenText({0: b"\xff", 1: b""}.get)
    assert text.covers([0])
    assert not any(text.covers([i]) for i in (1, 2))
    assert text.decode([0, 1, 2]) == 3 * REPLACEMENT
    assert text.control_places([0, 1, 0, 2]) == [1, 3]


@pytest.mark.parametrize(
    ("decoder", "token", "piece"),
    [("ByteLevel", "é", "é".encode()), ("Metaspace", "\u2581x", b" x")],
)
def test_only_byte_level_tokenizers_have_added_tokens_without_stand_ins(
    decoder: str, token: str, piece: bytes
) -> None:
    state = {"__getstate__": lambda: json.dumps({"type": decoder})}
    backend = SimpleNamespace(decoder=SimpleNamespace(**state), id_to_token=lambda _: token)
    text = TokenText.of(SimpleNamespace(backend_tokenizer=backend, get_added_vocab={token: 7}.copy))
    assert text is not None and text.to_bytes([7]) == piece
    assert text.control_places([6, 7]) == [1]


def test_the_vocabulary_is_not_read_at_once(
    tokenizer: Any, token_text: TokenText, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading 262,144 tokens takes 0.4 s."""
    plain = tokenizer._tokenizer
    monkeypatch.setattr(plain, "get_vocab", None)
    for source in (tokenizer, plain):
        text = TokenText.of(source)
        assert text is not None
        ids = tokenizer.encode(TEXTS[1])
        assert text.decode(ids) == token_text.decode(ids)
        assert text.controls(ids) == token_text.controls(ids)


def with_holes(tokenizer: Any, ids: dict[str, int]) -> Any:
    """Return a copy of a tokenizer in which some tokens have other ids."""
    content = json.loads(tokenizer._tokenizer.backend_tokenizer.to_str())
    vocab = content["model"]["vocab"]
    vocab.update({token: i for token, i in ids.items() if token in vocab})
    for added in content["added_tokens"]:
        added["id"] = ids.get(added["content"], added["id"])
    content["post_processor"] = None
    changed = Tokenizer.from_str(json.dumps(content))
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=changed))


@EXAMPLES
@given(data=st.data())
def test_vocabulary_with_unused_ids_is_decoded_correctly(
    tokenizer: Any, token_text: TokenText, data: Any
) -> None:
    specials = sorted(tokenizer._tokenizer.get_added_vocab())
    order = data.draw(st.permutations(specials))
    gap = data.draw(st.integers(0, 9000))
    moved = with_holes(tokenizer, {token: 8020 + gap + n for n, token in enumerate(order)})
    assert len(moved._tokenizer) < 8000
    text = TokenText.of(moved)
    assert text is not None
    words = st.sampled_from([*specials, "user", "assistant\n", "hi", "\n", "ü🎉"])
    content = "".join(data.draw(st.lists(words, max_size=12)))
    ids = moved.encode(content, add_special_tokens=False)
    before = tokenizer.encode(content, add_special_tokens=False)
    assert text.covers(ids)
    assert text.decode(ids) == token_text.decode(before)
    hole = data.draw(st.integers(700, 8019))
    assert not text.covers([*ids, hole])


@EXAMPLES
@given(data=st.data())
def test_feeding_ids_in_two_parts_gives_the_same_text(token_text: TokenText, data: Any) -> None:
    ids = data.draw(st.lists(st.integers(0, 599), max_size=40))
    cut = data.draw(st.integers(0, len(ids)))
    head, pending = token_text.feed(ids[:cut])
    tail, incomplete = token_text.feed(ids[cut:], pending)
    assert head + tail + incomplete.decode("utf-8", "replace") == token_text.decode(ids)
    ends = token_text.ends(ids[cut:], pending)
    assert [n for n, _ in ends] == [
        len(token_text.feed(ids[cut:stop], pending)[0]) for stop in range(cut + 1, len(ids) + 1)
    ]


def test_bytes_stay_pending_only_if_they_can_begin_a_character() -> None:
    """If no more bytes follow, pending bytes are decoded to one replacement character."""
    text = TokenText({i: bytes([i]) for i in range(256)}.get)
    beginnings = [[0xE0], [0xED], [0xEF], [0xF0], [0xF4], [0xF0, 0x9F]]
    for ids in ([*start, last] for start in beginnings for last in range(0x70, 0x100)):
        head, pending = text.feed(ids)
        assert head + REPLACEMENT * bool(pending) == text.decode(ids)
        n_chars, incomplete = text.ends(ids)[-1]
        assert n_chars + incomplete == len(text.decode(ids))


def test_tokenizer_without_a_known_decoder_is_refused() -> None:
    class Slow:
        pass

    assert TokenText.of(Slow()) is None


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("<0x41>", b"A"),
        ("<0xfF>", b"\xff"),
        ("<0xzz>", b"<0xzz>"),
        ("<0x 1>", b"<0x 1>"),
        ("<0x41;", b"<0x41;"),
        ("\u2581<0x41>", b" <0x41>"),
        ("[0x41>", b"[0x41>"),
    ],
)
def test_only_sentencepiece_byte_tokens_become_single_bytes(token: str, expected: bytes) -> None:
    assert _sentencepiece_piece(token) == expected
