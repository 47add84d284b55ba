"""Model directories of the zoo: any architecture, with a tokenizer, for the real server."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from models_check.build import build
from models_check.configs import CONFIGS, module_of

from .synthetic import train_tokenizer

_VOCAB = 600


def whole_characters(model: Path) -> dict[str, float]:
    """Return a `logit_bias` with which replies are made of whole printable characters."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    n_tokens = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return {str(i): -100.0 for i in range(n_tokens) if not _is_printable(tokenizer, i)}


def _is_printable(tokenizer: Tokenizer, token_id: int) -> bool:
    text: str = tokenizer.decode([token_id])  # nothing for special tokens
    return "\ufffd" not in text and text.isprintable() and bool(text)


def make_zoo_model(path: Path, name: str) -> Path:
    """Write a model of the zoo, with a byte-level tokenizer and its template; return `path`."""
    path.mkdir(parents=True)
    files = train_tokenizer("byte-level", _VOCAB, bos=False)
    files.save(path)
    sizes = {"vocab_size": max(_VOCAB, files.n_tokens)}
    model = build(name, config=sizes)
    config = {
        "model_type": module_of(name),
        **CONFIGS[name],
        **sizes,
        "bos_token_id": files.bos_token_id,
        "eos_token_id": files.eos_token_id,
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    return path
