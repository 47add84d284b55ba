"""The bytes of token ids, so that text can be cut at token ends."""

from __future__ import annotations

import codecs
import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, compress, count, takewhile
from typing import Any

from .. import image_ids

REPLACEMENT = "\ufffd"
"""Stands for an incomplete or invalid UTF-8 sequence (Unicode 15, section 3.9)."""

_UNKNOWN = b"\xff"
"""Stands for a token without known bytes: an invalid byte, never nothing."""


class _Pieces(dict[int, bytes]):
    """The bytes of tokens by their ids; an image has its digest at its first token."""

    def __missing__(self, token_id: int) -> bytes:
        return _UNKNOWN if token_id >= 0 else image_ids.text_of(token_id).encode()


class _Decoder(codecs.BufferedIncrementalDecoder):
    """UTF-8, in parts."""

    def _buffer_decode(self, data: Any, errors: str, final: bool) -> tuple[str, int]:
        text, n_used = codecs.utf_8_decode(data, errors, final)
        if data[n_used : n_used + 1] == b"\xed" and data[n_used + 1 : n_used + 2] >= b"\xa0":
            # Half a surrogate: CPython waits for more bytes, although no byte can complete it.
            return text + 2 * REPLACEMENT, n_used + 2
        return text, n_used


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """The bytes of every token of a vocabulary, by token id; ids may have holes between them.

    Decoding is UTF-8 with replacement characters, the way a client sees a reply. The bytes at the
    end of a sequence that wait for the rest of a character are called `pending`. Ids without known
    bytes decode to a replacement character: ask `covers` before comparing texts.

    `image_ids` defines the text of an image. Ordinary tokens can spell this text, and the text of
    control tokens: two texts are the same only if their `controls` are the same too. The tokenizer
    finds control tokens in a text before all other tokens.
    """

    def __init__(self, pieces: Mapping[int, bytes], controls: Iterable[int] = ()) -> None:
        self._pieces = _Pieces({i: piece for i, piece in pieces.items() if piece})
        self._plain = self._pieces.keys() - controls

    @classmethod
    def of(cls, tokenizer: Any) -> TokenText | None:
        """Read the vocabulary of a Hugging Face fast tokenizer, also in mlx-lm's wrapper.

        None unless its decoder is like byte-level BPE's or SentencePiece's.
        """
        tokenizer = getattr(tokenizer, "_tokenizer", tokenizer)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or backend.decoder is None:
            return None
        kinds = _decoder_kinds(json.loads(backend.decoder.__getstate__()))
        if "ByteLevel" in kinds:
            to_bytes = _byte_level_piece
        elif "Metaspace" in kinds or {"Replace", "ByteFallback"} <= kinds:
            to_bytes = _sentencepiece_piece
        else:
            return None
        # Not range(len(tokenizer)): the largest id can be larger than the number of tokens.
        pieces = {i: to_bytes(token) for token, i in tokenizer.get_vocab().items()}
        added = tokenizer.get_added_vocab()
        if to_bytes is _byte_level_piece:  # added tokens have no stand-in characters
            pieces |= {i: content.encode() for content, i in added.items()}
        return cls(pieces, added.values())

    def covers(self, ids: Iterable[int]) -> bool:
        """Whether the bytes of all tokens are known, so that their text identifies them."""
        return all(i < 0 or i in self._pieces for i in set(ids))

    def control_places(self, ids: Sequence[int]) -> list[int]:
        """Return the places of control tokens, tokens of images, and unknown tokens among ids."""
        controls = set(ids) - self._plain
        return list(compress(count(), map(controls.__contains__, ids))) if controls else []

    def controls(self, ids: Sequence[int], pending: bytes = b"") -> list[tuple[int, int]]:
        """Return these tokens (an image's first), with the number of characters before each."""
        controls, n_chars, start = [], 0, 0
        for place in self.control_places(ids):
            text, pending = self.feed(ids[start : place + 1], pending)
            n_chars, start = n_chars + len(text), place + 1
            if ids[place] != image_ids.GOES_ON:
                controls.append((n_chars - len(self.decode(ids[place:start])), ids[place]))
        return controls

    def n_bytes_ends(self, ids: Iterable[int]) -> list[int]:
        """Return the byte offset at which each token ends."""
        return list(accumulate(len(self._pieces[i]) for i in ids))

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of a sequence, with an invalid byte for a token without known bytes."""
        return b"".join(map(self._pieces.__getitem__, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of a whole sequence; an incomplete character at its end is replaced."""
        return self.to_bytes(ids).decode("utf-8", "replace")

    def known_text(self, ids: Sequence[int]) -> str | None:
        """Return `decode` of the ids, or None unless the bytes of all tokens are known."""
        return self.to_bytes(ids).decode("utf-8", "replace") if self.covers(ids) else None

    def known_beginning(self, ids: Iterable[int], pending: bytes = b"") -> str:
        """Return the characters that are complete before the first token without known bytes."""
        return self.feed(takewhile(lambda i: i < 0 or i in self._pieces, ids), pending)[0]

    def feed(self, ids: Iterable[int], pending: bytes = b"") -> tuple[str, bytes]:
        """Decode the next tokens of a sequence; return their text and the bytes left pending."""
        decoder = _Decoder("replace")
        decoder.setstate((pending, 0))
        text = decoder.decode(self.to_bytes(ids))
        return text, decoder.getstate()[0]

    def ends(
        self, ids: Iterable[int], pending: bytes = b"", max_chars: float = math.inf
    ) -> list[tuple[int, bool]]:
        """Return for each token how many characters are complete, and whether bytes are pending.

        The list ends with the first token that ends after `max_chars`.
        """
        decoder = _Decoder("replace")
        decoder.setstate((pending, 0))
        ends, n_chars = [], 0
        for token_id in ids:
            n_chars += len(decoder.decode(self._pieces[token_id]))
            ends.append((n_chars, bool(decoder.getstate()[0])))
            if n_chars > max_chars:
                break
        return ends


def n_chars_alike(
    stored: Sequence[tuple[int, int]], own: Sequence[tuple[int, int]], position: int, n_chars: int
) -> int:
    """Return how many of `n_chars` equal characters have the same control tokens.

    stored: `TokenText.controls` of the block at `position`. own: the controls of the prompt.
    """
    first, stop = (bisect_left(own, (end,)) for end in (position, position + n_chars))
    controls = {(start - position, token_id) for start, token_id in own[first:stop]}
    return min([n_chars, *(start for start, _ in controls.symmetric_difference(stored))])


def _decoder_kinds(decoder: dict[str, Any]) -> set[str]:
    kinds = {decoder["type"]}
    for inner in decoder.get("decoders", ()):
        kinds |= _decoder_kinds(inner)
    return kinds


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""The bytes that stand for themselves in GPT-2's vocabulary. U+0100 and the characters after it
stand for the rest, in order (openai/gpt-2, src/encoder.py, bytes_to_unicode)."""
_OTHERS = sorted({*range(0x100)}.difference(_PRINTABLE))
_LATIN_1 = {
    **{byte: chr(byte if byte in _PRINTABLE else 0x100) for byte in range(0x100)},
    **{0x100 + n: chr(byte) for n, byte in enumerate(_OTHERS)},
}
"""From a stand-in character to its byte in Latin-1; other characters have no such byte."""


def _byte_level_piece(token: str) -> bytes:
    try:
        return token.translate(_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _sentencepiece_piece(token: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace("\u2581", " ").encode()
