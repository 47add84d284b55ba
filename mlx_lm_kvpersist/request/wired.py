"""How much of a model's memory macOS may keep wired: `--kvpersist-wired`; docs/mac.md says why."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import ConfigError
from ..units import show_bytes

NEEDED_ABOVE = 0.5
"""The share of what the device recommends above which `auto` lets weights be wired."""
_RECOMMENDED = "max_recommended_working_set_size"


def check_wired(choice: str | int) -> None:
    """Raise ConfigError for a size that macOS would refuse."""
    most = mx.device_info().get(_RECOMMENDED)
    if isinstance(choice, int) and most is not None and choice > int(most):
        raise ConfigError(
            f"--kvpersist-wired {show_bytes(choice)} is more than the {show_bytes(int(most))} that "
            "this device recommends; give less, or raise that with sysctl iogpu.wired_limit_mb"
        )


def weight_bytes(*models: Any) -> int:
    """Return the bytes of all parameters of these models; None stands for no model."""
    weights = (tree_flatten(model.parameters()) for model in models if model is not None)
    return sum(array.nbytes for arrays in weights for _, array in arrays)


def wired_bytes(choice: str | int, n_weight_bytes: int, asked_bytes: int) -> tuple[int | None, str]:
    """Return how many bytes may be wired, None for what stock asks, and why, for the log.

    asked_bytes: what stock asks for, which is all that the device recommends.
    """
    if isinstance(choice, int):
        return choice, f"up to {show_bytes(choice)}, as --kvpersist-wired says"
    if choice == "stock":
        return None, f"as stock, up to {show_bytes(asked_bytes)}, as --kvpersist-wired says"
    if choice == "off":
        return 0, "off, as --kvpersist-wired says"
    sizes = f"the weights are {show_bytes(n_weight_bytes)} of {show_bytes(asked_bytes)}"
    if n_weight_bytes > NEEDED_ABOVE * asked_bytes:
        stock = f"as stock, up to {show_bytes(asked_bytes)}: {sizes}, more than half"
        return None, f"{stock}; if this Mac panics, try --kvpersist-wired off"
    return 0, f"off: {sizes}, at most half"
