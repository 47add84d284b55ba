"""Checkpoints: the places in a stored chain from which a model can go on.

A model all of whose layers hold every token can go on anywhere. One with sliding windows needs the
last tokens of each window before that place, one with recurrent layers the state that they had
there. Both are stored beside the blocks of tokens, at the ends of the system prompt, of the user's
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
"""Older ones that stay, too, because conversations part there."""

MIN_TOKENS_BETWEEN = 16
"""Checkpoints nearer to each other are not worth two copies of what they need."""

_MAX_REPLY_BLOCKS = 64

STATE = "state"
"""The kind of what marks a checkpoint that was made, and holds what recurrent layers have there:
nothing where there are none."""

Stored = Mapping[bytes, Sequence[Block]]
"""Windows and states, by the key of the block that they are at the end of."""


def window_kind(window: int) -> str:
    """Return the kind of what holds the last tokens of a block for layers of a window."""
    return f"window-{window}"


@dataclass(frozen=True)
class Covering:
    """Tokens [start, stop) of a stored window, counted from its first."""

    block: Block
    start: int
    stop: int


@dataclass(frozen=True)
class Checkpoint:
    """A place in a chain to go on from, and the stored windows and state that this takes."""

    n_tokens: int
    windows: Mapping[int, tuple[Covering, ...]] = field(default_factory=dict)
    state: Block | None = None

    @property
    def blocks(self) -> list[Block]:
        """The stored windows and the state."""
        blocks = [one.block for covering in self.windows.values() for one in covering]
        return [*blocks, self.state] if self.state else blocks


def nearest_checkpoint(
    path: Sequence[Block],
    n_tokens: int,
    store: BlockStore,
    spec: ModelCacheSpec,
    lost: Collection[bytes] = (),
) -> Checkpoint | None:
    """Return the last checkpoint of a chain, up to `n_tokens`, that is stored whole.

    What has its key in `lost` counts as missing.
    """
    if n_tokens <= 0:
        return None
    if spec.any_prefix:
        return Checkpoint(n_tokens)
    path = [block for block in path if block.start < n_tokens]
    stored = store.checkpoints([block.key for block in path])
    stored = {key: [one for one in found if one.key not in lost] for key, found in stored.items()}
    ends = [block.stop for block in reversed(path) if block.stop <= n_tokens]
    if ends[:1] != [n_tokens]:
        ends.insert(0, n_tokens)
    places = _Places(path, stored, spec)
    return next(filter(None, map(places.checkpoint_at, ends)), None)


class _Places:
    """The places of a chain, asked one by one whether they can be gone on from."""

    def __init__(self, path: Sequence[Block], stored: Stored, spec: ModelCacheSpec) -> None:
        self.path, self.stored, self.spec = path, stored, spec
        self.starts = [block.start for block in path]

    def checkpoint_at(self, n_tokens: int) -> Checkpoint | None:
        """Return the checkpoint at this very place, if it is stored whole."""
        state = None
        if self.spec.recurrent:
            ending = self.path[bisect_right(self.starts, n_tokens - 1) - 1]
            state = self.state_at(ending) if ending.stop == n_tokens else None
            if state is None:
                return None
        windows = {}
        for window in self.spec.sliding:
            covering = self._covering(max(0, n_tokens - window), n_tokens, window)
            if covering is None:
                return None
            windows[window] = covering
        return Checkpoint(n_tokens, windows, state)

    def state_at(self, block: Block) -> Block | None:
        """Return the state that says that a checkpoint was made at the end of a block."""
        return next((one for one in self.stored.get(block.key, ()) if one.kind == STATE), None)

    def _covering(self, start: int, stop: int, window: int) -> tuple[Covering, ...] | None:
        """Return what holds positions [start, stop) for a window, or None."""
        covering = []
        for block in self.path[bisect_right(self.starts, start) - 1 :]:
            if block.start >= stop:
                break
            first, last = max(block.start, start), min(block.stop, stop)
            found = stored_window(self.stored.get(block.key, ()), window, block.stop - first)
            if found is None:
                return None
            found_start = block.stop - found.n_tokens
            covering.append(Covering(found, first - found_start, last - found_start))
        return tuple(covering)


def needed_at_end(
    chain: Sequence[Block], new: Sequence[Block], store: BlockStore, spec: ModelCacheSpec
) -> list[Block]:
    """Return all windows and states, stored or `new`, that going on from a chain's end needs."""
    places = _Places(chain, _with(store.checkpoints([block.key for block in chain]), new), spec)
    checkpoint = places.checkpoint_at(chain[-1].stop)
    needed = {one.key: one for one in [*(checkpoint.blocks if checkpoint else ()), *new]}
    return list(needed.values())


def superseded_checkpoints(
    chain: Sequence[Block],
    n_reused: int,
    new: Sequence[Block],
    store: BlockStore,
    spec: ModelCacheSpec,
) -> list[Block]:
    """Return the windows and states that no checkpoint needs that is to stay.

    Of a conversation these stay: the newest checkpoints, the first (the end of the system prompt,
    which others share), the newest of those at which conversations part, and those at which another
    session ends. The chain went on from `n_reused` tokens: a reply that stood there before, and
    was dropped or said again, loses its checkpoint.
    """
    stored = _with(store.checkpoints([block.key for block in chain]), new)
    places = _Places(chain, stored, spec)
    made = {block.key: state for block in chain if (state := places.state_at(block))}
    keys = list(made)
    stay = {*keys[:1], *keys[-MAX_CHECKPOINTS:]}
    branches = [key for key in keys if key not in stay and len(store.children(key, limit=2)) > 1]
    stay.update(branches[-MAX_BRANCHES:])
    stay.update(key for key in keys if key not in stay and store.sessions_at(key))
    needed = {made[key].key for key in stay}
    for block in chain:
        checkpoint = places.checkpoint_at(block.stop) if block.key in stay else None
        needed.update(one.key for one in (checkpoint.blocks if checkpoint else ()))
    held = [one for found in stored.values() for one in found]
    gone = {one.key: one for one in held if one.key not in needed}
    gone.update((one.key, one) for one in _replies_left(chain, n_reused, store))
    return list(gone.values())


def _replies_left(chain: Sequence[Block], n_reused: int, store: BlockStore) -> list[Block]:
    """Return the checkpoints of replies that began where this chain went on, and lead nowhere.

    A reply has one, at its end; a turn of another conversation has one before it.
    """
    # A window may have been cut some tokens behind the last block that both have.
    fork = bisect_right([block.stop for block in chain], n_reused) - 1
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
        stored = store.checkpoints([block.key for block in branch])
        found = [one for at_block in stored.values() for one in at_block]
        is_reply = sum(one.kind == STATE for one in found) == 1
        if branch and not following and is_reply:
            left += found
    return left


def _with(stored: Stored, new: Sequence[Block]) -> dict[bytes, list[Block]]:
    both = {key: list(found) for key, found in stored.items()}
    for one in new:
        both.setdefault(one.parent, []).append(one)
    return both


def stored_window(stored: Sequence[Block], window: int, n_tokens: int) -> Block | None:
    """Return the smallest of what is stored that covers a block's last `n_tokens` for a window."""
    kind = window_kind(window)
    fitting = [one for one in stored if one.kind == kind and one.n_tokens >= n_tokens]
    return min(fitting, key=lambda one: one.n_tokens, default=None)
