"""Restore points: the places in a stored chain from which a model can go on.

A model all of whose layers hold every token can go on anywhere. One with sliding windows needs the
last tokens of each window before that place, one with recurrent layers the state that they had
there. Both are kept as parts of the blocks, for the ends of the system prompt, of the user's
messages and of the replies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..cache.spec import ModelCacheSpec
from ..match.block import Block
from ..match.siblings import FEW
from ..store.block_store import BlockStore

MAX_CHECKPOINTS = 6
"""Of a conversation, beside the first: its last three turns have two each."""

MAX_BRANCHES = 4
"""Older points that stay, too, because conversations part there."""

MIN_TOKENS_BETWEEN = 16
"""Points nearer to each other than this are not worth two copies of what they need."""

_MAX_REPLY_BLOCKS = 64

STATE = "state"
"""The kind of a part that marks a point that was made, and holds what recurrent layers have there:
nothing where there are none."""

PartsByBlock = Mapping[bytes, Sequence[Block]]


def window_kind(window: int) -> str:
    """Return the kind of a part that holds the last tokens of its block for layers of a window."""
    return f"window-{window}"


@dataclass(frozen=True)
class WindowPart:
    """Tokens [start, stop) of a window part, counted from its first."""

    part: Block
    start: int
    stop: int


@dataclass(frozen=True)
class Checkpoint:
    """A place in a chain, and the parts that are needed to go on from there."""

    n_tokens: int
    windows: Mapping[int, tuple[WindowPart, ...]] = field(default_factory=dict)
    state: Block | None = None

    @property
    def parts(self) -> list[Block]:
        parts = [window.part for windows in self.windows.values() for window in windows]
        return [*parts, self.state] if self.state else parts


def nearest_checkpoint(
    path: Sequence[Block],
    n_tokens: int,
    store: BlockStore,
    spec: ModelCacheSpec,
    lost: Collection[bytes] = (),
) -> Checkpoint | None:
    """Return the last place in a chain, up to `n_tokens`, whose parts are all stored.

    Parts whose keys are in `lost` count as missing.
    """
    if n_tokens <= 0:
        return None
    if spec.any_prefix:
        return Checkpoint(n_tokens)
    path = [node for node in path if node.start < n_tokens]
    parts = store.checkpoints([node.key for node in path])
    parts = {key: [p for p in found if p.key not in lost] for key, found in parts.items()}
    ends = [node.stop for node in reversed(path) if node.stop <= n_tokens]
    if ends[:1] != [n_tokens]:
        ends.insert(0, n_tokens)
    places = _Places(path, parts, spec)
    return next(filter(None, map(places.point_at, ends)), None)


class _Places:
    """The places of a chain, asked one by one whether they can be gone on from."""

    def __init__(self, path: Sequence[Block], parts: PartsByBlock, spec: ModelCacheSpec) -> None:
        self.path, self.parts, self.spec = path, parts, spec
        self.starts = [node.start for node in path]

    def point_at(self, n_tokens: int) -> Checkpoint | None:
        """Return the restore point at this very place, if its parts are there."""
        state = None
        if self.spec.recurrent:
            ending = self.path[bisect_right(self.starts, n_tokens - 1) - 1]
            state = self.made_at(ending) if ending.stop == n_tokens else None
            if state is None:
                return None
        windows = {}
        for window in self.spec.sliding:
            covering = self._covering(max(0, n_tokens - window), n_tokens, window)
            if covering is None:
                return None
            windows[window] = covering
        return Checkpoint(n_tokens, windows, state)

    def made_at(self, node: Block) -> Block | None:
        """Return the part that says that a point was made at the end of a block."""
        found = self.parts.get(node.key, ())
        return next((part for part in found if part.kind == STATE), None)

    def _covering(self, start: int, stop: int, window: int) -> tuple[WindowPart, ...] | None:
        """Return the parts that hold positions [start, stop) for a window, or None."""
        covering = []
        for node in self.path[bisect_right(self.starts, start) - 1 :]:
            if node.start >= stop:
                break
            first, last = max(node.start, start), min(node.stop, stop)
            part = window_part(self.parts.get(node.key, ()), window, node.stop - first)
            if part is None:
                return None
            part_start = node.stop - part.n_tokens
            covering.append(WindowPart(part, first - part_start, last - part_start))
        return tuple(covering)


def parts_of_checkpoint(
    chain: Sequence[Block], new: Sequence[Block], store: BlockStore, spec: ModelCacheSpec
) -> list[Block]:
    """Return all parts, stored or `new`, that going on from the end of a chain needs."""
    places = _Places(chain, _with(store.checkpoints([node.key for node in chain]), new), spec)
    point = places.point_at(chain[-1].stop)
    needed = {part.key: part for part in [*(point.parts if point else ()), *new]}
    return list(needed.values())


def superseded_checkpoints(
    chain: Sequence[Block],
    n_reused: int,
    new: Sequence[Block],
    store: BlockStore,
    spec: ModelCacheSpec,
) -> list[Block]:
    """Return the parts that no restore point needs that is to stay.

    Of a conversation these stay: the newest points, the first (the end of the system prompt, which
    others share), the newest of those at which conversations part, and those at which another
    session ends. The chain went on from `n_reused` tokens: a reply that stood there before, and
    was dropped or said again, loses its point.
    """
    stored = store.checkpoints([node.key for node in chain])
    places = _Places(chain, _with(stored, new), spec)
    made = [node for node in chain if places.made_at(node)]
    stay = {node.key for node in [*made[:1], *made[-MAX_CHECKPOINTS:]]}
    branches = [n for n in made if n.key not in stay and len(store.children(n.key, limit=2)) > 1]
    stay.update(node.key for node in branches[-MAX_BRANCHES:])
    stay.update(n.key for n in made if n.key not in stay and store.sessions_at(n.key))
    needed: set[bytes] = set()
    for node in made:
        if node.key in stay:
            point = places.point_at(node.stop)
            needed.update(part.key for part in (point.parts if point else ()))
            needed.update(part.key for part in filter(None, [places.made_at(node)]))
    held = [part for found in places.parts.values() for part in found]
    gone = {part.key: part for part in held if part.key not in needed}
    gone.update((part.key, part) for part in _replies_left(chain, n_reused, store))
    return list(gone.values())


def _replies_left(chain: Sequence[Block], n_reused: int, store: BlockStore) -> list[Block]:
    """Return the parts of replies that began where this chain went on, and lead nowhere.

    A reply has one point, at its end; a turn of another conversation has one before it.
    """
    # A window may have been cut some tokens behind the last block that both have.
    fork = bisect_right([node.stop for node in chain], n_reused) - 1
    if fork < 0 or fork + 1 >= len(chain):
        return []
    children = store.children(chain[fork].key, limit=FEW + 1)
    if len(children) > FEW:
        return []  # so many are conversations with one beginning
    left: list[Block] = []
    for child in children:
        branch: list[Block] = []
        following = [child] if child.key != chain[fork + 1].key else []
        while len(following) == 1 and len(branch) < _MAX_REPLY_BLOCKS:
            branch += following
            following = store.children(branch[-1].key, limit=2)
        parts = [
            part for found in store.checkpoints([n.key for n in branch]).values() for part in found
        ]
        is_reply = sum(part.kind == STATE for part in parts) == 1
        if branch and not following and is_reply:
            left += parts
    return left


def _with(stored: PartsByBlock, new: Sequence[Block]) -> dict[bytes, list[Block]]:
    parts = {key: list(found) for key, found in stored.items()}
    for part in new:
        parts.setdefault(part.parent, []).append(part)
    return parts


def window_part(parts: Sequence[Block], window: int, n_tokens: int) -> Block | None:
    """Return the smallest of a block's parts that covers its last `n_tokens` for a window."""
    kind = window_kind(window)
    fitting = [part for part in parts if part.kind == kind and part.n_tokens >= n_tokens]
    return min(fitting, key=lambda part: part.n_tokens, default=None)
