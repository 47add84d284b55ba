"""Run a restore and its canary once a model is loaded, before a request has to wait for it."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx

from ..errors import ModelNotSupported
from .blocks import BLOCK_TOKENS, copy_state, split_blocks, split_windows
from .canary import CANARY_TOLERANCE, canary_difference
from .join import Piece, Pieces, join
from .packed import headroom
from .slots import cached_positions, slots_of
from .spec import ModelCacheSpec

logger = logging.getLogger(__name__)

_IDS = tuple(i % 16 + 1 for i in range(24))
_CUT = 16

_LONG_TOKENS = 8192
_LONG_BYTES = 512 << 20
"""A long restore takes at most this much memory while it is warmed up."""

_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
"""Fields of a model's arguments that may be the length of a table of position embeddings."""


def warm_up(model: Any, spec: ModelCacheSpec) -> None:
    """Cut, join and check a few tokens as a restore does, so that the first restore is quick.

    A GPU's kernels are compiled, or loaded, when they are first used. Which kernel attends depends
    on the number of keys, so the canary also runs over a long cache of zeros. Where caches can
    step back, the canary of the short one also shows whether the model goes on from restored
    caches as it did from its own.

    Raises:
        ModelNotSupported: it does not, or fails; it may keep state outside its caches.
    """
    try:
        difference = _difference(model, spec)
    except Exception as error:
        raise ModelNotSupported(f"its caches cannot be cut and joined: {error!r}") from error
    if not difference <= CANARY_TOLERANCE:
        raise ModelNotSupported(
            f"what it computes after a restore differs by {difference:.0%}: "
            "it keeps state outside its caches"
        )
    try:
        _warm_up_long(model, spec)
    except Exception as error:
        logger.debug("the first long restore will be slower: %r", error)
    mx.clear_cache()


def _difference(model: Any, spec: ModelCacheSpec) -> float:
    """Return what the canary finds after a few tokens were cut and joined, 0 without a canary."""
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
    restored = join(spec, pieces, headroom(1), whole=False)
    return canary_difference(model, spec, restored, pieces, _IDS)


def _warm_up_long(model: Any, spec: ModelCacheSpec) -> None:
    """Join blocks of zeros from RAM and run the canary over them, as after a long prompt's restore.

    A model with windows or states has no canary at this length.
    """
    limits = [getattr(getattr(model, "args", None), name, None) for name in _POSITIONS]
    n_tokens = min(
        _LONG_TOKENS,
        _LONG_BYTES // max(1, spec.bytes_per_token),
        *(limit for limit in limits if isinstance(limit, int)),
    )
    n_blocks = n_tokens // BLOCK_TOKENS
    if n_blocks == 0 or not spec.any_prefix:
        return
    zeros = {name: mx.zeros(form, dtype) for name, form, dtype in spec.block_arrays(BLOCK_TOKENS)}
    mx.eval(zeros)
    pieces = Pieces(n_blocks * BLOCK_TOKENS, [Piece(zeros, 0, BLOCK_TOKENS)] * n_blocks)
    restored = join(spec, pieces, headroom(1))
    canary_difference(model, spec, restored, pieces, [1] * pieces.n_tokens)


def _pieces(cut: list[dict[str, mx.array]]) -> list[Piece]:
    return [Piece(arrays, 0, next(iter(arrays.values())).shape[2]) for arrays in cut]
