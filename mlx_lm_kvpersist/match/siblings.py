"""Among the blocks that continue one block, find those that agree most with what lies ahead.

In sorted order the nearest stand together, so a few of many thousands are looked at.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from operator import attrgetter
from typing import Literal

from .block import Block
from .tree import common_prefix

FEW = 16
"""So many blocks are all looked at."""

MAX_ALIKE = 64
"""Of blocks with the same text, so many are found."""

_MAX_STEPS = 64

Find = Callable[[Literal[">", "<=", "="], "str | bytes"], list[Block]]
"""The first block whose text or ids are greater than these; the last that is not; those equal."""


def nearest(ahead: str | bytes, find: Find) -> list[Block]:
    """Return the blocks whose text (or packed ids, for bytes) has most in common with `ahead`.

    In sorted order these are the one behind `ahead` and the one before. A block all of which
    stands ahead can be farther up, but then it begins the one before; so the search goes on with
    what that one has in common with `ahead`.
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
        # Behind a block that stands ahead as a whole, only shorter ones are of interest.
        key = ahead[: n_common - 1 if n_common == len(content) else n_common]
    return nodes


class Siblings:
    """The blocks in RAM that continue one block, sorted by text and by ids. Not thread-safe."""

    def __init__(self) -> None:
        self._sorted: dict[str, list[Block]] = {"text": [], "packed_ids": []}

    def __len__(self) -> int:
        return len(self._sorted["text"])

    def add(self, node: Block) -> None:
        for name, nodes in self._sorted.items():
            insort(nodes, node, key=attrgetter(name))

    def remove(self, node: Block) -> None:
        for name, nodes in self._sorted.items():
            place = bisect_left(nodes, getattr(node, name), key=attrgetter(name))
            while nodes[place].key != node.key:
                place += 1
            del nodes[place]

    def some(self, ahead: str | bytes | None, limit: int | None) -> list[Block]:
        """Return at most `limit` blocks; where they are many, those nearest to `ahead`."""
        if ahead is None or len(self) <= FEW:
            return self._sorted["text"][:limit]
        name = "text" if isinstance(ahead, str) else "packed_ids"
        nodes, by = self._sorted[name], attrgetter(name)

        def find(how: str, content: str | bytes) -> list[Block]:
            end = bisect_right(nodes, content, key=by)
            if how == ">":
                return nodes[end : end + 1]
            if how == "<=":
                return nodes[max(end - 1, 0) : end]
            return nodes[max(bisect_left(nodes, content, key=by), end - MAX_ALIKE) : end]

        return nearest(ahead, find)
