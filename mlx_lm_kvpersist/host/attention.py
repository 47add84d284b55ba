"""mlx-lm's attention over packed keys: keys that bring an attention of their own are asked for it.

A plugin's cache shows `bits` and returns, as keys, a tuple with a method
`attend(queries, values, scale, mask)` -> [B, heads, N, values' dimension]. All other keys are
attended to as before, also by other users of mlx_lm in the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["plugin_quantized_attention"]


def plugin_quantized_attention(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands in for mlx-lm's `quantized_scaled_dot_product_attention`."""

    @functools.wraps(stock)
    def quantized_scaled_dot_product_attention(
        queries: Any,
        q_keys: Any,
        q_values: Any,
        scale: float,
        mask: Any,
        group_size: int = 64,
        bits: int = 8,
    ) -> Any:
        attend = getattr(q_keys, "attend", None)
        if attend is None:
            return stock(queries, q_keys, q_values, scale, mask, group_size=group_size, bits=bits)
        return attend(queries, q_values, scale, mask)

    return quantized_scaled_dot_product_attention
