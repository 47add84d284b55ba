"""Put stored token ids in front of a prompt's own, when both decode to the same text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .text import TokenText
from .tree import Match

Encode = Callable[[str], list[int]]
"""Text to token ids, special tokens recognised but none added."""


@dataclass(frozen=True)
class Splice:
    """A prompt whose first `n_stored` ids come from the store.

    `boundaries` maps token boundaries of the rendered prompt behind the cut to those of `ids`, as
    far as both have one at the same character.
    """

    ids: list[int]
    n_stored: int
    boundaries: dict[int, int]


def splice(
    prompt: Sequence[int], text: str, match: Match, tokens: TokenText, encode: Encode
) -> Splice | None:
    """Return the prompt with the matched ids in front, or None if its text would change.

    `text` is what `prompt` decodes to. Where the prompt has a token boundary at the cut, its own
    ids follow; elsewhere the rest of the text is encoded anew.
    """
    stored = match.ids
    if list(prompt[: len(stored)]) == stored:
        return Splice(list(prompt), len(stored), {i: i for i in range(len(prompt) + 1)})
    rest = text[match.n_chars :]
    n_bytes_cut = len(text[: match.n_chars].encode())
    boundary = bisect_left([0, *tokens.n_bytes_ends(prompt)], n_bytes_cut)
    tail = list(prompt[boundary:])
    if tokens.decode(tail) != rest:
        encoded = _encode_rest(rest, tokens, encode)
        if encoded is None:
            return None
        tail = encoded
    if tokens.decode(stored + tail) != text:
        return None
    return Splice(stored + tail, len(stored), _shared_boundaries(prompt, stored, tail, tokens))


def _encode_rest(rest: str, tokens: TokenText, encode: Encode) -> list[int] | None:
    """Encode text from the middle of a prompt, or return None if no way keeps it as it is.

    SentencePiece-like tokenizers put a space in front of what they encode; behind a line break
    they do not.
    """
    ids = encode(rest)
    if tokens.decode(ids) == rest:
        return ids
    anchor = encode("\n")
    anchored = encode("\n" + rest)
    ids = anchored[len(anchor) :]
    if anchored[: len(anchor)] == anchor and tokens.decode(ids) == rest:
        return ids
    return None


def _shared_boundaries(
    prompt: Sequence[int], stored: list[int], tail: list[int], tokens: TokenText
) -> dict[int, int]:
    """Align the boundaries of `tail` with those of `prompt`, counting bytes from the end."""
    tail_ends = [0, *tokens.n_bytes_ends(tail)]
    place = {tail_ends[-1] - end: len(stored) + i for i, end in enumerate(tail_ends)}
    prompt_ends = [0, *tokens.n_bytes_ends(prompt)]
    to_end = [prompt_ends[-1] - end for end in prompt_ends]
    return {i: place[n] for i, n in enumerate(to_end) if n in place}
