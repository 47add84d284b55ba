"""Wired memory: how much of the GPU's memory macOS must keep in place (from macOS 15 on).

mlx-lm sets MLX's limit when its server starts, around each batch, and around a single stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .. import manager


class WiredLimit:
    """Takes the place of `mx.set_wired_limit`: the host sets a limit, plugins choose what is true.

    Nothing reaches MLX before a model is loaded, because its size decides. MLX wires what is
    already allocated when its limit grows (`ResidencySet::resize`), so nothing is lost by that.
    """

    def __init__(self, stock: Callable[[int], object]) -> None:
        self._stock = stock
        self.asked_bytes = 0
        """The last limit that the host has set; 0 on devices without wired memory."""
        self._set_bytes = 0
        self._chosen_bytes: int | None = 0

    def __call__(self, limit: int) -> int:
        """Set what the host asks for, in bytes; return what it asked for before."""
        before, self.asked_bytes = self.asked_bytes, limit
        self._pass_on()
        return before

    def choose(self, limit: int | None) -> None:
        """Let at most `limit` bytes be wired from now on; None: as many as the host asks for."""
        self._chosen_bytes = limit
        self._pass_on()

    def _pass_on(self) -> None:
        limit = self.asked_bytes
        if self._chosen_bytes is not None:
            limit = min(limit, self._chosen_bytes)
        if limit != self._set_bytes:
            self._stock(limit)
            self._set_bytes = limit


def choose_wired_limit(provider: Any) -> None:
    """Ask the plugins how much to keep wired for the model that `provider` has loaded."""
    limit: Any = mx.set_wired_limit
    if isinstance(limit, WiredLimit) and limit.asked_bytes:
        asked_bytes = limit.asked_bytes
        limit.choose(manager.ask("wired_limit", provider=provider, asked_bytes=asked_bytes))
