"""Architectures that keep RotatingKVCaches, most of them also KVCaches."""

from __future__ import annotations

from typing import Any

from .shapes import EXPERTS, FULL, SIZES, SLIDING, VOCAB, WINDOW, layers

_TWO = {**SIZES, **layers(SLIDING, FULL), "sliding_window": WINDOW}

_PATTERN_OF_TWO = {**SIZES, "sliding_window": WINDOW, "sliding_window_pattern": 2}

_ROPE_BY_TYPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    FULL: {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
}

_GEMMA3N = {
    **SIZES,
    **layers(SLIDING, FULL, SLIDING, FULL),
    "model_type": "gemma3n",
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 32,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 16,
}

_GEMMA4 = {
    **SIZES,
    **layers(SLIDING, FULL),
    "model_type": "gemma4_text",
    "sliding_window": WINDOW,
    "global_head_dim": 64,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 32,
    "rope_parameters": _ROPE_BY_TYPE,
}
_GEMMA4_SHARING = {
    **_GEMMA4,
    **layers(SLIDING, FULL, SLIDING, FULL),
    "num_kv_shared_layers": 2,
}

_MINISTRAL3 = {
    **SIZES,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "llama_4_scaling_beta": 0.1,
    },
}

_MUSE = {
    **_TWO,
    "post_norm_eps": 1e-8,
    "final_logit_softcapping": 20.0,
    "output_multiplier": 1.0,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "afmoe": {**_TWO, **EXPERTS, "num_dense_layers": 1},
    "cohere2": {**_PATTERN_OF_TWO, "logit_scale": 0.5},
    "exaone4": {**_PATTERN_OF_TWO, "sliding_window_pattern": "LG", "rope_scaling": None},
    "exaone4/full": {
        **SIZES,
        "sliding_window": None,
        "sliding_window_pattern": None,
        "rope_scaling": None,
    },
    "exaone_moe": {**_TWO, **EXPERTS, "is_moe_layer": [False, True]},
    "gemma3": {
        "vocab_size": VOCAB,
        "text_config": {**_PATTERN_OF_TWO, "model_type": "gemma3_text"},
    },
    "gemma3_text": {**_PATTERN_OF_TWO, "query_pre_attn_scalar": 32},
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma4": {"vocab_size": VOCAB, "text_config": _GEMMA4},
    "gemma4_text": {**_GEMMA4},
    "gemma4_text/sharing": {**_GEMMA4_SHARING},
    "gemma4_text/keys-are-values": {
        **_GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gemma4_text/experts": {
        **_GEMMA4,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "gpt_oss": {**_TWO, **EXPERTS, "head_dim": 64},
    "iquestloopcoder": {**SIZES, "loop_num": 2, "loop_window_size": WINDOW},
    "laguna": {
        **_TWO,
        **EXPERTS,
        "mlp_layer_types": ["dense", "sparse"],
        "num_attention_heads_per_layer": [4, 4],
        "rope_parameters": _ROPE_BY_TYPE,
    },
    "llama/sliding": {**_TWO},
    "mellum": {**_TWO, **EXPERTS, "rope_parameters": _ROPE_BY_TYPE},
    "mimo_v2_flash": {
        **SIZES,
        **EXPERTS,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "head_dim": 64,
        "v_head_dim": 32,
        "swa_head_dim": 64,
        "swa_v_head_dim": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "ministral3": {**_MINISTRAL3},
    "ministral3/sliding": {
        **_MINISTRAL3,
        **layers(SLIDING, FULL),
        "sliding_window": WINDOW,
    },
    "mistral3": {
        "text_config": {
            **_MINISTRAL3,
            **layers(SLIDING, FULL),
            "model_type": "ministral3",
            "sliding_window": WINDOW,
        }
    },
    "muse_glimmer": {**_MUSE},
    "muse_spark": {
        "text_config": {
            **_MUSE,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "layer_rope_theta": [10000.0, 0],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_hidden_size": 64,
            "moe_intermediate_size": 64,
            "routed_scaling_factor": 1.0,
        }
    },
    "olmo3": {**_TWO},
    "plamo3": {**_PATTERN_OF_TWO},
    "spark2_5": {**_TWO, "rope_parameters": _ROPE_BY_TYPE},
    "step3p5": {
        **_TWO,
        "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 64,
        "share_expert_dim": 64,
        "moe_layers_enum": "1",
        "moe_router_scaling_factor": 1.0,
        "partial_rotary_factors": [1.0, 0.5],
    },
}
