"""A tiny model of mlx-lm's that reads images, with random weights, for the real server."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from models_check.build import build
from models_check.configs import CONFIGS

from .scripted import TEMPLATE
from .synthetic import train_tokenizer

NAME = "muse_spark"
PATCH = "<|patch|>"
SIDE = 4
"""Pixels of a token's side."""

LAUNCHER = f"""
import importlib, sys, types

import mlx.core as mx

sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from models_check import standins

with standins.importable():
    module = importlib.import_module("mlx_lm.models.{NAME}")
standins.put_in(module)
module.mx = types.SimpleNamespace(**{{**vars(mx), "bfloat16": mx.float32}})
from mlx_lm_kvpersist import config
from mlx_lm_kvpersist._startup import serve

config.MAX_LOSS_S = 0.0
serve(sys.argv[1:])
"""
"""Without Metal, stand-ins replace the model's kernels. The model does not round to bfloat16,
because replies are compared. No checkpoint is postponed."""

IMAGE_TEMPLATE = TEMPLATE.replace(
    "{{ message.content or '' }}",
    "{%- if message.content is string %}{{ message.content }}{%- else %}"
    "{%- for part in message.content or [] %}"
    "{{ part.text if part.type == 'text' else '<|patch|>' if message.role == 'user' }}"
    "{%- endfor %}{%- endif %}",
)


def make_vision_model(path: Path) -> Path:
    """Skips the test if mlx-lm has no such model."""
    if not hasattr(pytest.importorskip("mlx_lm.server"), "load_processor"):
        pytest.skip("no processors of images before mlx-lm 0.32.1")
    path.mkdir(parents=True)
    tokens = "<think>", "</think>", "<|image_start|>", PATCH, "<|image_end|>"
    files = train_tokenizer(
        "byte-level", 600, bos=False, chat_template=IMAGE_TEMPLATE, extra_special_tokens=tokens
    )
    # Replies in the model's own format would be thoughts without an end.
    files.config.update(chat_template_type="", tool_parser_type="json_tools")
    files.save(path)
    text = {**CONFIGS[NAME]["text_config"], "vocab_size": files.n_tokens}
    config: dict[str, Any] = {
        "model_type": NAME,
        "text_config": text,
        "audio_config": {"out_hidden_size": text["hidden_size"]},  # transformers compares them
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": SIDE // 2,
            "merge_size": 2,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
        },
        "image_token_id": files.tokenizer.token_to_id(PATCH),
        "vocab_size": files.n_tokens,
        "bos_token_id": files.bos_token_id,
        "eos_token_id": files.eos_token_id,
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = dict(tree_flatten(build(NAME, config=config).parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    return path


def picture(
    width: int, height: int, changed: tuple[int, int] | None = None, form: str = "PNG"
) -> str:
    """Return a data URI of a picture; the pixel at `changed` differs."""
    image = pytest.importorskip("PIL.Image")
    made = image.new("RGB", (width, height))
    made.putdata([(x * 5 % 256, x * x % 256, x * 11 % 256) for x in range(width * height)])
    if changed is not None:
        made.putpixel(changed, (255, 0, 255))
    made.save(written := io.BytesIO(), form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(written.getvalue()).decode()}"
