"""Caches joined from complete pieces, as the server joins stored blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm_kvpersist.cache.blocks import Arrays, Joiner, Piece
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec


@dataclass(frozen=True)
class Pieces:
    """The parts of a prompt cache of `n_tokens`.

    `blocks`: tokens from the first on. `windows`: the last tokens, by window. `state`: the states
    of recurrent groups after the last token. `newest`: the tokens of the last block in full
    precision. Parts that the model does not have are empty.
    """

    n_tokens: int
    blocks: Sequence[Piece] = ()
    windows: Mapping[int, Sequence[Piece]] = field(default_factory=dict)
    state: Arrays = field(default_factory=dict)
    newest: Arrays = field(default_factory=dict)


def join(spec: ModelCacheSpec, pieces: Pieces, headroom: int, *, whole: bool = True) -> list[Any]:
    windows = {
        window: sum(piece.stop - piece.start for piece in parts)
        for window, parts in pieces.windows.items()
    }
    joiner = Joiner(spec, pieces.n_tokens, pieces.n_tokens + headroom, windows, whole=whole)
    for piece in pieces.blocks:
        joiner.add(piece)
    for window, parts in pieces.windows.items():
        for piece in parts:
            joiner.add(piece, window)
    joiner.add_state(
        {**pieces.state, **pieces.newest}, pieces.n_tokens % 256 if pieces.newest else 0
    )
    return joiner.finish()


def n_bytes(arrays: Arrays) -> int:
    return sum(int(array.nbytes) for array in arrays.values())
