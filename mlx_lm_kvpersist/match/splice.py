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

    `text` is what `prompt` decodes to. A cut in the middle of what is stored moves back to the end
    of a token that the prompt has, too, and the prompt's own ids follow. So they do behind the end
    of what is stored, if one of them begins there; if not, the rest of the text is encoded anew.
    """
    stored = match.ids
    if list(prompt[: len(stored)]) == stored:
        return Splice(list(prompt), len(stored), {i: i for i in range(len(prompt) + 1)})
    if match.at_end:
        rest = text[match.n_chars :]
        tail = _own_tail(prompt, rest, tokens) or _encode_rest(rest, tokens, encode)
    else:
        # What follows can change how the last word is cut into tokens. Spelled as in the other
        # prompt, the same text would get another reply than it gets alone.
        n_stored, tail = _common_boundary(prompt, stored, tokens)
        stored = stored[:n_stored]
    if tail is None or not stored or tokens.decode(stored + tail) != text:
        return None
    return Splice(stored + tail, len(stored), _shared_boundaries(prompt, stored, tail, tokens))


def _own_tail(prompt: Sequence[int], rest: str, tokens: TokenText) -> list[int] | None:
    """Return the last of the prompt's own ids that decode to `rest`, if any do."""
    n_bytes = len(rest.encode())
    ends = tokens.n_bytes_ends(reversed(prompt))
    place = bisect_left([0, *ends], n_bytes)
    tail = list(prompt[len(prompt) - place :])
    return tail if tokens.decode(tail) == rest else None


def _common_boundary(
    prompt: Sequence[int], stored: Sequence[int], tokens: TokenText
) -> tuple[int, list[int]]:
    """Return how many stored ids end with a token that the prompt has there, and its ids behind."""
    place = {end: i for i, end in enumerate(tokens.n_bytes_ends(prompt), start=1)}
    ends = tokens.n_bytes_ends(stored)
    for n in range(len(stored), 0, -1):
        i = place.get(ends[n - 1])
        if i is not None and prompt[i - 1] == stored[n - 1]:
            return n, list(prompt[i:])
    return 0, list(prompt)


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
