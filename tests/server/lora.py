"""A LoRA adapter of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load


def make_adapter(folder: Path, model_path: Path) -> Path:
    """Write an adapter with large weights; return its folder."""
    folder.mkdir(exist_ok=True)
    parameters = {"rank": 4, "scale": 10.0, "dropout": 0.0}
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    model, *_ = load(str(model_path))
    model.freeze()
    linear_to_lora_layers(model, 2, parameters)
    key = mx.random.key(3)
    weights = {
        name: mx.random.normal(value.shape, key=key) * 0.1
        for name, value in tree_flatten(model.trainable_parameters())
    }
    assert weights
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder
