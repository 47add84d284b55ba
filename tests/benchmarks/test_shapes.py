"""Random models of real shapes: their sizes, files, logits and replies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.generate import generate_step

from benchmarks.shapes import MODEL_SHAPES, make_shaped_model, shaped_architecture

SMALL: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 3000}
PARAMETERS = {
    "llama-3.2-1b": 1.236e9,
    "llama-3.1-8b": 8.03e9,
}
"""Published numbers of parameters."""


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, marks=[] if shape == "llama-3.2-1b" else [pytest.mark.slow])
        for shape in MODEL_SHAPES
    ],
)
def test_small_models_reply_with_printable_text(shape: str, tmp_path: Path) -> None:
    config = {**SMALL, "num_hidden_layers": 2}
    model, tokenizer = load(str(make_shaped_model(tmp_path, shape, config=config)))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Tell me."}], add_generation_prompt=True
    )
    logits = model(mx.array([prompt]))[0, -1].astype(mx.float32)
    assert 0.3 < logits.std().item() < 10
    assert mx.isfinite(logits).all().item()
    reply = [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=24)]
    assert len(set(reply)) > 8
    assert tokenizer.eos_token_id not in reply
    pieces = [tokenizer.decode([token]) for token in reply]
    assert all(piece.isprintable() and piece.strip() and piece != "\ufffd" for piece in pieces)


@pytest.mark.parametrize("shape", MODEL_SHAPES)
def test_shapes_have_the_published_number_of_parameters(shape: str) -> None:
    parameters: Any = tree_flatten(shaped_architecture(shape).parameters())
    n = sum(value.size for _, value in parameters)
    assert n == pytest.approx(PARAMETERS[shape], rel=0.01)


def test_equal_arguments_write_equal_weights_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.shapes._SHARD_BYTES", 1 << 20)
    config = {**SMALL, "num_hidden_layers": 2}
    progress_calls: list[tuple[int, int]] = []
    for name in ("a", "b"):
        make_shaped_model(
            tmp_path / name,
            "llama-3.1-8b",
            config=config,
            progress=lambda done, total: progress_calls.append((done, total)),
        )
    files = sorted(path.name for path in (tmp_path / "a").glob("model-*.safetensors"))
    assert len(files) > 1 and progress_calls[-1][0] == progress_calls[-1][1]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    load(str(tmp_path / "a"))


def test_an_unknown_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no shape 'nonsense'; choose from tiny, .*llama-3\.2-1b"):
        make_shaped_model(tmp_path, "nonsense")
