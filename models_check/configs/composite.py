"""Architectures whose layers keep several caches each, or caches of other classes."""

from __future__ import annotations

from typing import Any

from .shapes import EXPERTS, FULL, HIDDEN, LATENT, SIZES, VOCAB, WINDOW

_INDEXER = {"index_head_dim": 32, "index_n_heads": 8, "index_topk": 24}
"""Each token attends to `index_topk` tokens: fewer than a prompt has."""

_LONGCAT = {
    **SIZES,
    **LATENT,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "num_layers": 2,
    "ffn_hidden_size": HIDDEN,
    "expert_ffn_hidden_size": 64,
    "moe_topk": 2,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "routed_scaling_factor": 1.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

_MINIMAX_M3 = {
    **SIZES,
    **EXPERTS,
    "dense_intermediate_size": HIDDEN,
    "rotary_dim": 16,
    "mlp_layer_types": ["dense", "sparse"],
    "routed_scaling_factor": 1.0,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "afm7": {
        "vocab_size": VOCAB,
        "hidden_dim": HIDDEN,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "baichuan_m1": {
        **SIZES,
        "sliding_window": WINDOW,
        "sliding_window_layers": [0],
        "conv_window": 2,
    },
    "deepseek_v32": {**SIZES, **LATENT, **EXPERTS, **_INDEXER},
    "deepseek_v41": {
        **SIZES,
        **EXPERTS,
        "num_hidden_layers": 6,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 32,
        "n_routed_experts": 8,
        "sliding_window": WINDOW,
        "compress_ratios": (0, 2, 2, 2, 1, 1),
        "kv_source_layer_ids": (1, 4),
        "index_source_layer_ids": (1, 2, 4, 5),
        "index_n_heads": 8,
        "index_head_dim": 32,
        "index_topk": 8,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
        "hc_mult": 2,
    },
    "glm_moe_dsa": {
        **SIZES,
        **LATENT,
        **EXPERTS,
        **_INDEXER,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama4": {
        "text_config": {
            **SIZES,
            "model_type": "llama4",
            "num_hidden_layers": 4,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": HIDDEN,
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    },
    "longcat_flash": {**_LONGCAT},
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 8},
    "minimax_m3_vl": {"text_config": _MINIMAX_M3},
    "minimax_m3_vl/sparse": {
        "text_config": {
            **_MINIMAX_M3,
            "layer_types": [FULL, "minimax_m3_sparse"],
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_block_size": 4,
            "index_topk_blocks": 4,
            "index_local_blocks": 1,
        }
    },
}
