"""The sizes that the zoo's configurations share, under every name that mlx-lm has for them.

Heads of 32 numbers and windows of 16 tokens are enough for 4-bit groups and rotating caches. A
model takes the names it knows and ignores the others.
"""

from __future__ import annotations

from typing import Any

VOCAB = 256
HIDDEN = 128
WINDOW = 16

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    # A tied embedding makes a model of random weights repeat its last token.
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
"""One dense layer, then one layer with four experts, two of which run."""

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
"""The cache has a latent of 64 numbers and a rotated key of 32, instead of keys and values."""

SLIDING = "sliding_attention"
FULL = "full_attention"


def layers(*types: str) -> dict[str, Any]:
    return {"layer_types": list(types), "num_hidden_layers": len(types)}
