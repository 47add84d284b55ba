"""Match a prompt with the tree of stored blocks, and put the stored ids in front of its own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal, Protocol, TypeVar

from ..block import Block, unpack_ids
from .text import REPLACEMENT, TokenText

Content = TypeVar("Content", str, bytes)
Encode = Callable[[str], list[int]]
"""Text to token ids, special tokens recognised but none added."""

SHOWN_CHARS = 40
"""At most so many characters of what is stored are shown where a prompt diverges from it."""

AHEAD = 8192
"""Characters or bytes of a prompt that are shown to a source: more than a block has."""


class BlockSource(Protocol):
    """Where the walk finds blocks."""

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> Sequence[Block]:
        """Return the blocks that continue `parent`, at most `limit`.

        With the text or the packed ids that lie ahead, those that have nothing more in common
        with it than others may be left out.
        """
        ...


@dataclass(frozen=True)
class Match:
    """The stored blocks that begin as the prompt does.

    Of `path`, the first `n_tokens` tokens are to be used; they decode to the first `n_chars`
    characters of the prompt. `at_end` says that nothing is stored beyond them on this branch.
    Where something is, it agrees with the prompt for `n_agreed` characters and goes on with
    `stored_next`; that can be a few more than a token's end allows to use.
    """

    path: tuple[Block, ...]
    n_tokens: int
    n_chars: int
    at_end: bool
    n_agreed: int = 0
    stored_next: str = ""

    @property
    def packed_ids(self) -> bytes:
        """The ids of these tokens; see `pack_ids`."""
        return b"".join(node.packed_ids for node in self.path)[: 4 * self.n_tokens]

    @property
    def ids(self) -> list[int]:
        return unpack_ids(self.packed_ids)


NO_MATCH = Match(path=(), n_tokens=0, n_chars=0, at_end=False)


def match_text(
    source: BlockSource,
    root: bytes,
    text: str,
    tokens: TokenText,
    prefer: Collection[bytes] = (),
    packed_ids: bytes = b"",
) -> Match:
    """Find the longest stored prefix of `text` that ends where a token ends.

    Of equally long ones, a branch through a block in `prefer` wins. `packed_ids` are the prompt's
    own ids, if `tokens` covers them all: it then covers every block that has the same ids.
    """
    best, best_rank = NO_MATCH, (0, False)
    steps = _steps(source, root, text, prefer, tokens, packed_ids)
    for step in steps:
        node, n_tokens, n_chars = step.node, step.node.n_tokens, step.n_equal
        # A character that is incomplete in the store may count for one more.
        if (step.position + n_chars + 1, True) < best_rank:
            break
        if n_chars < len(node.text) or node.pending:
            pending = step.before.node.pending if step.before else b""
            ends = tokens.ends(node.ids, pending, n_chars)
            following = text[step.position : step.position + n_chars + 1]
            n_tokens, n_chars = _cut(ends, following, n_chars)
        rank = (step.position + n_chars, step.preferred)
        if n_tokens and rank > best_rank:
            best, best_rank = step.match(n_tokens, step.position + n_chars, source), rank
    if not steps:
        return best
    farthest = steps[0]
    stored_next = farthest.node.text[farthest.n_equal :][:SHOWN_CHARS]
    for child in source.children(farthest.node.key, limit=1) if not stored_next else ():
        stored_next = child.text[:SHOWN_CHARS]
    return replace(best, n_agreed=farthest.position + farthest.n_equal, stored_next=stored_next)


def match_ids(
    source: BlockSource, root: bytes, packed_ids: bytes, prefer: Collection[bytes] = ()
) -> Match:
    """Find the longest stored prefix of token ids. `n_chars` of the match is 0."""
    best, best_rank = NO_MATCH, (0, False)
    for step in _steps(source, root, packed_ids, prefer):
        if (step.position + step.n_equal, True) < best_rank:
            break
        n_tokens = step.n_equal // 4
        rank = (step.position + n_tokens * 4, step.preferred)
        if n_tokens and rank > best_rank:
            best, best_rank = step.match(n_tokens, 0, source), rank
    return best


@dataclass(frozen=True)
class _Step:
    """A block whose first `n_equal` characters (or bytes of ids) stand at `position`."""

    node: Block
    before: _Step | None
    position: int
    n_equal: int
    preferred: bool

    def match(self, n_tokens: int, n_chars: int, source: BlockSource) -> Match:
        path, step = [self.node], self.before
        while step is not None:
            path.append(step.node)
            step = step.before
        used_up = n_tokens == self.node.n_tokens and not source.children(self.node.key, limit=1)
        return Match(tuple(reversed(path)), self.node.start + n_tokens, n_chars, used_up)


def _steps(
    source: BlockSource,
    root: bytes,
    prompt: Content,
    prefer: Collection[bytes],
    tokens: TokenText | None = None,
    packed_ids: bytes = b"",
) -> list[_Step]:
    """Return all blocks that agree with the prompt, at least in part, those farthest in first.

    The prompt is a text for `tokens`, or packed ids. A damaged index may lie: only blocks that
    stand where they say, and are what their keys say, are followed.
    """
    steps: list[_Step] = []
    open_ends: list[tuple[bytes, int, _Step | None]] = [(root, 0, None)]
    while open_ends:
        parent, position, before = open_ends.pop()
        n_tokens = before.node.stop if before else 0
        for node in source.children(parent, prompt[position : position + AHEAD]):
            if node.start != n_tokens or not node.is_genuine:
                continue
            content: Any = node.packed_ids
            is_known = True
            if tokens is not None:
                content = node.text
                is_full_precision = packed_ids.startswith(node.packed_ids, 4 * n_tokens)
                is_known = is_full_precision or tokens.covers(node.ids)
                if not is_known:
                    # The text of an unknown token does not tell its id; what is before it counts.
                    content = tokens.known_beginning(
                        node.ids, before.node.pending if before else b""
                    )
            whole = is_known and prompt.startswith(content, position)
            n_equal = len(content) if whole else common_prefix(content, prompt, position)
            step = _Step(node, before, position, n_equal, node.key in prefer)
            steps.append(step)
            if whole:
                open_ends.append((node.key, position + n_equal, step))
    return sorted(steps, key=lambda step: (-step.position - step.n_equal, not step.preferred))


def common_prefix(content: Content, prompt: Content, position: int) -> int:
    """Return how many items of `content` equal `prompt` from `position` on (bisecting slices)."""
    low, high = 0, min(len(content), len(prompt) - position)
    while low < high:
        middle = (low + high + 1) // 2
        if content[low:middle] == prompt[position + low : position + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _cut(ends: list[tuple[int, bool]], text: str, n_equal: int) -> tuple[int, int]:
    """Return tokens and characters up to the last token that ends within `n_equal` characters.

    A token that ends inside a character counts if the prompt has a replacement character there,
    as a client does that was sent an incomplete one.
    """
    for n_tokens in range(len(ends), 0, -1):
        n_chars, incomplete = ends[n_tokens - 1]
        if n_chars > n_equal:
            continue
        if not incomplete:
            return n_tokens, n_chars
        if text[n_chars : n_chars + 1] == REPLACEMENT:
            return n_tokens, n_chars + 1
    return 0, 0


FEW = 16
"""If at most so many blocks have one parent, all of them are compared with the prompt."""

MAX_ALIKE = 64
"""At most so many blocks with the same text are compared with the prompt."""

_MAX_STEPS = 64

Find = Callable[[Literal[">", "<=", "="], "str | bytes"], list[Block]]
"""The first block whose text or ids are greater than these; the last that is not; those equal."""


def nearest(ahead: str | bytes, find: Find) -> list[Block]:
    """Return the blocks whose text (or packed ids, for bytes) has most in common with `ahead`.

    In sorted order these are the first after `ahead` and the last before it. A block that `ahead`
    begins with can stand farther up; the last block before `ahead` then begins with it, too. So
    the search goes on with what that block has in common with `ahead`.
    """
    nodes = find(">", ahead)
    key = ahead
    for _ in range(_MAX_STEPS):
        before = find("<=", key)
        if not before:
            break
        content = before[0].text if isinstance(ahead, str) else before[0].packed_ids
        nodes += find("=", content)
        if not content:
            break
        n_common = common_prefix(content, ahead, 0)  # type: ignore[type-var]  # both are alike
        # If the prompt repeats a whole block, only shorter blocks are still of interest.
        key = ahead[: n_common - 1 if n_common == len(content) else n_common]
    return nodes


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
    of a token that the prompt has, too, and the prompt's own ids follow. At the end of what is
    stored, the prompt's own ids follow if a token begins there; if none does, the rest of the text
    is encoded anew.
    """
    stored = match.ids
    if match.at_end:
        tail = _own_tail(prompt, stored, text, tokens)
        if tail is None:
            tail = _encode_rest(text[match.n_chars :], tokens, encode)
    else:
        # What follows can change how the last word is cut into tokens. Spelled as in the other
        # prompt, the same text would get another reply than it gets alone.
        n_stored, tail = _common_boundary(prompt, stored, text, tokens)
        stored = stored[:n_stored]
    if tail is None or not stored or tokens.decode(stored + tail) != text:
        return None
    return Splice(
        stored + tail, len(stored), _shared_boundaries(prompt, stored, tail, text, tokens)
    )


def _ends(ids: Sequence[int], text: str, tokens: TokenText) -> Sequence[float]:
    """Return each token's end in bytes; in characters where `text` has replacement characters.

    A byte that is no character is one of those, of three bytes, where it is encoded anew. Counting
    characters takes ten times as long. An end inside a character counts half.
    """
    if REPLACEMENT in text:
        return [n_chars + incomplete / 2 for n_chars, incomplete in tokens.ends(ids)]
    return tokens.n_bytes_ends(ids)


def _own_tail(
    prompt: Sequence[int], stored: list[int], text: str, tokens: TokenText
) -> list[int] | None:
    """Return the prompt's own ids that follow where `stored` ends, if they decode to the rest."""
    stop = ceil(_ends(stored, text, tokens)[-1])
    tail = list(prompt[bisect_right(_ends(prompt, text, tokens), stop) :])
    return tail if tokens.decode(stored + tail) == text else None


def _common_boundary(
    prompt: Sequence[int], stored: Sequence[int], text: str, tokens: TokenText
) -> tuple[int, list[int]]:
    """Return how many stored ids end with a token that the prompt has there, and its ids behind."""
    place = {end: i for i, end in enumerate(_ends(prompt, text, tokens), start=1)}
    ends = _ends(stored, text, tokens)
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
    prompt: Sequence[int], stored: list[int], tail: list[int], text: str, tokens: TokenText
) -> dict[int, int]:
    """Align the boundaries of `tail` with those of `prompt`, counting from the end."""
    prompt_ends, tail_ends = ([0, *_ends(ids, text, tokens)] for ids in (prompt, tail))
    n_before = ceil(prompt_ends[-1]) - ceil(tail_ends[-1])
    # The stored ids may end within a character.
    first = 0 if float(_ends(stored, text, tokens)[-1]).is_integer() else 1
    place = {n_before + tail_ends[i]: len(stored) + i for i in range(first, len(tail_ends))}
    return {i: place[n] for i, n in enumerate(prompt_ends) if n in place and n == int(n)}
