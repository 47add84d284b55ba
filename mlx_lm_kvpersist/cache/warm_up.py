"""Cut and join a few tokens of a model once it is loaded, before anybody waits for that."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..errors import ModelNotSupported
from .blocks import copy_state, split_blocks, split_windows
from .canary import CANARY_TOLERANCE, can_step_back, canary_difference
from .join import Piece, Pieces, join
from .packed import headroom
from .slots import cached_positions, slots_of
from .spec import ModelCacheSpec

__all__ = ["warm_up"]

_IDS = tuple(i % 16 + 1 for i in range(24))
_CUT = 16


def warm_up(model: Any, spec: ModelCacheSpec) -> None:
    """Do with a few tokens what every restore does, so that the first finds it all compiled.

    A GPU's kernels are compiled, or loaded, when they are first used. Where caches can step back,
    the canary also says whether the model goes on from restored caches as it did from its own.

    Raises:
        ModelNotSupported: it does not, or fails; it may keep something outside its caches.
    """
    try:
        difference = _difference(model, spec)
    except Exception as error:
        raise ModelNotSupported(f"its caches cannot be cut and joined: {error!r}") from error
    if not difference <= CANARY_TOLERANCE:
        raise ModelNotSupported(
            f"what it computes after a restore differs by {difference:.0%}: "
            "its caches are not all that it goes by"
        )


def _difference(model: Any, spec: ModelCacheSpec) -> float:
    n_tokens = len(_IDS)
    caches = spec.make_cache()
    mx.eval(model(mx.array([_IDS]), cache=caches))
    blocks, windows, state = [], {}, {}
    if spec.full:
        blocks = _pieces(split_blocks(spec, caches, [(0, _CUT), (_CUT, n_tokens)]))
    slots = slots_of(caches)
    for window, groups in spec.sliding.items():
        first = max(cached_positions(slots[slot])[0] for group in groups for slot in group.slots)
        span = max(first, n_tokens - window), n_tokens
        windows[window] = _pieces(split_windows(spec, window, caches, [span]))
    if spec.recurrent:
        state = copy_state(spec, caches)
    pieces = Pieces(n_tokens, blocks, windows, state)
    restored = join(spec, pieces, headroom(1))
    if not can_step_back(spec, n_tokens):
        return 0.0
    return canary_difference(model, spec, restored, pieces, _IDS)


def _pieces(cut: list[dict[str, mx.array]]) -> list[Piece]:
    return [Piece(arrays, 0, next(iter(arrays.values())).shape[2]) for arrays in cut]
