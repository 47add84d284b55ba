"""Walk the tree of stored blocks as far as it agrees with a prompt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from .block import Block
from .text import REPLACEMENT, TokenText

Content = TypeVar("Content", str, bytes)


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
    def ids(self) -> list[int]:
        ids: list[int] = []
        for node in self.path:
            ids += node.ids
        return ids[: self.n_tokens]


NO_MATCH = Match(path=(), n_tokens=0, n_chars=0, at_end=False)

_AHEAD = 8192
"""Characters or bytes of a prompt that are shown to a source: more than a block has."""

SHOWN_CHARS = 40
"""Of what is stored where a prompt parts from it, for people to see."""


def match_text(
    source: BlockSource, root: bytes, text: str, tokens: TokenText, prefer: Collection[bytes] = ()
) -> Match:
    """Find the longest stored prefix of `text` that ends where a token ends.

    Of equally long ones, a branch through a block in `prefer` wins.
    """
    best, best_rank = NO_MATCH, (0, False)
    # The text of a block with unknown tokens does not tell its ids.
    steps = _steps(source, root, text, prefer, lambda n: n.text if tokens.covers(n.ids) else None)
    for step in steps:
        # A character that is incomplete in the store may count for one more.
        if (step.position + step.n_equal + 1, True) < best_rank:
            break
        pending = step.before.node.pending if step.before else b""
        ends = tokens.ends(step.node.ids, pending, step.n_equal)
        cut = _cut(ends, text[step.position : step.position + step.n_equal + 1], step.n_equal)
        if cut is None:
            continue
        n_tokens, n_chars = cut
        rank = (step.position + n_chars, step.preferred)
        if rank > best_rank and step.is_genuine():
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
    for step in _steps(source, root, packed_ids, prefer, lambda node: node.packed_ids):
        if (step.position + step.n_equal, True) < best_rank:
            break
        n_tokens = step.n_equal // 4
        rank = (step.position + n_tokens * 4, step.preferred)
        if n_tokens and rank > best_rank and step.is_genuine():
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

    def is_genuine(self) -> bool:
        """Whether every block up to here is what its key says."""
        step: _Step | None = self
        while step is not None:
            if not step.node.is_genuine:
                return False
            step = step.before
        return True

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
    content_of: Callable[[Block], Content | None],
) -> list[_Step]:
    """Return all blocks that agree with the prompt, at least in part, those farthest in first."""
    steps: list[_Step] = []
    open_ends: list[tuple[bytes, int, _Step | None]] = [(root, 0, None)]
    while open_ends:
        parent, position, before = open_ends.pop()
        n_tokens = before.node.stop if before else 0
        for node in source.children(parent, prompt[position : position + _AHEAD]):
            content = content_of(node)
            # A key does not cover where its block stands; a damaged index may lie.
            if content is None or node.start != n_tokens:
                continue
            preferred = node.key in prefer
            whole = prompt.startswith(content, position)
            n_equal = len(content) if whole else common_prefix(content, prompt, position)
            step = _Step(node, before, position, n_equal, preferred)
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


def _cut(ends: list[tuple[int, bool]], text: str, n_equal: int) -> tuple[int, int] | None:
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
    return None
