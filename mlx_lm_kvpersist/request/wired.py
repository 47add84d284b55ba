"""How much of a model's memory macOS may keep wired; docs/mac.md says why."""

from __future__ import annotations

from ..units import show_bytes

NEEDED_ABOVE = 0.5
"""The share of the recommended bytes above which weights are wired."""


def wired_bytes(n_weight_bytes: int, asked_bytes: int) -> tuple[int | None, str]:
    """Return how many bytes may be wired, None for stock's number, and the reason for the log.

    asked_bytes: stock's number, which is all that the device recommends.
    """
    sizes = f"the weights are {show_bytes(n_weight_bytes)} of {show_bytes(asked_bytes)}"
    if n_weight_bytes > NEEDED_ABOVE * asked_bytes:
        return None, f"as stock, up to {show_bytes(asked_bytes)}: {sizes}, more than half"
    return 0, f"off: {sizes}, at most half"
