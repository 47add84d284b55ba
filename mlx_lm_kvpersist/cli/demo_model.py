"""The demo's model, made when it runs: random weights, and a tokenizer trained on a story."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .servers import OWN_TEXT

_END = "<|im_end|>"
_TEMPLATE = (
    "{%- for message in messages %}"
    '{{ "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}'
    "{%- endfor %}"
    '{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{%- endif %}'
)


def make_model(folder: Path) -> Path:
    """Write a small Llama, whose greedy replies are printable text without end; return `folder`."""
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=["<|im_start|>", _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([OWN_TEXT.read_text(encoding="utf-8")], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    about_tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END}
    _write(folder / "tokenizer_config.json", json.dumps(about_tokenizer))
    _write(folder / "chat_template.jinja", _TEMPLATE)
    n_tokens = tokenizer.get_vocab_size()
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": n_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.token_to_id(_END),
    }
    _write(folder / "config.json", json.dumps(config))
    weights = dict(tree_flatten(llama.Model(llama.ModelArgs.from_dict(config)).parameters()))
    # A token without weights has the logit 0; the highest is above it.
    printable = [tokenizer.decode([i]).isascii() and i > 1 for i in range(n_tokens)]
    weights["lm_head.weight"] *= mx.array(printable)[:, None]
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
