"""A draft model for a tiny model: it mostly chooses the model's tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx


def make_draft(model: Path, folder: Path, seed: int = 0) -> Path:
    """Write a copy of a model with slightly different weights; return its folder."""
    shutil.copytree(model, folder)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    key = mx.random.key(seed)
    noisy = {
        name: x + 0.02 * mx.std(x) * mx.random.normal(x.shape, key=key).astype(x.dtype)
        for name, x in weights.items()
    }
    mx.eval(noisy)
    mx.save_safetensors(str(folder / "model.safetensors"), noisy, {"format": "mlx"})
    return folder
