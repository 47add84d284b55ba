"""The ids that stand for an image in a prompt: a patch token alone does not identify an image.

The first id of an image is its digest as a negative number, and each further token of the image has
the id GOES_ON. So the ids identify a prompt completely, and keys, indexes and comparisons of ids
need no rule for images.
"""

from __future__ import annotations

from collections.abc import Sequence

GOES_ON = -1
"""The id of all tokens of an image except the first."""

MARK = "\ufffc"
"""Begins the text of an image: the character for embedded objects (Unicode 15, 23.8)."""

_N_WORDS = 9
"""The number of words of an image's packed first id; each word has 30 bits, and is below -1."""
_WORD = (1 << 30) - 1


def first_id(digest: bytes) -> int:
    """Return the id of an image's first token, for a digest of 32 bytes: at most -(2**256)."""
    return -int.from_bytes(b"\1" + digest, "big")


def text_of(token_id: int) -> str:
    """Return the text of an image's token: the digest in hex for the first token, otherwise ""."""
    return "" if token_id == GOES_ON else f"{MARK}{-token_id:x}"


def words_of(token_id: int) -> list[int]:
    """Return an id as words of 32 bits; the first id of an image takes several."""
    if token_id >= GOES_ON:
        return [token_id]
    shifts = range(30 * (_N_WORDS - 1), -1, -30)
    return [-2 - (-token_id >> shift & _WORD) for shift in shifts]


def ids_of(words: Sequence[int]) -> list[int]:
    """Return the ids from which `words_of` made words; damaged words give wrong ids."""
    ids, place = [], 0
    while place < len(words):
        n_words = 1 if words[place] >= GOES_ON else _N_WORDS
        value = 0
        for word in words[place : place + n_words]:
            value = value << 30 | -2 - word & _WORD
        ids.append(words[place] if n_words == 1 else -value)
        place += n_words
    return ids


def before_image(ids: Sequence[int], n_tokens: int) -> int:
    """Return how many of the first `n_tokens` tokens to use, so that no image is cut."""
    if n_tokens < len(ids) and ids[n_tokens] == GOES_ON:
        while n_tokens and ids[n_tokens] == GOES_ON:
            n_tokens -= 1
    return n_tokens
