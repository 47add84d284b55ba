"""Stand-ins for the Metal kernels that two architectures need, where models run without Metal.

Attention, which fills the caches, stays mlx-lm's own. Only its inputs are replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from . import kernels


def _are_needed() -> bool:
    return not mx.metal.is_available() or mx.default_device() == mx.Device(mx.cpu)


@contextlib.contextmanager
def importable() -> Iterator[None]:
    if mx.metal.is_available():
        yield
        return
    stock = mx.fast.metal_kernel
    mx.fast.metal_kernel = lambda **_: _no_kernel
    try:
        yield
    finally:
        mx.fast.metal_kernel = stock


def _no_kernel(**_: Any) -> None:
    raise RuntimeError("a Metal kernel that has no stand-in")


def put_in(module: Any) -> None:
    if module.__name__.endswith(".muse_spark") and _are_needed():
        for name, function in vars(kernels).items():
            if callable(function) and hasattr(module, name):
                setattr(module, name, function)


def replace_layers(model: Any) -> None:
    """Replace bitnet's linear layers, which use a Metal kernel."""
    if not _are_needed():
        return
    replaced = [
        (path, nn.Linear(layer.in_features, layer.out_features, layer.get("bias") is not None))
        for path, layer in model.named_modules()
        if type(layer).__name__ == "BitLinear"
    ]
    if replaced:
        model.update_modules(tree_unflatten(replaced))
