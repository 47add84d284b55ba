"""Architectures with recurrent layers (ArraysCache), alone or with attention."""

from __future__ import annotations

from typing import Any

from .shapes import EXPERTS, FULL, HIDDEN, LATENT, SIZES, SLIDING, WINDOW, layers

_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}

_GATED_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}

_QWEN3_5 = {
    **SIZES,
    **_GATED_DELTA,
    "model_type": "qwen3_5",
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [3, 3, 2],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}

_LFM2 = {
    **SIZES,
    **layers("conv", FULL),
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": HIDDEN,
    "block_ff_dim": HIDDEN,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}

_BAILING = {
    **SIZES,
    **EXPERTS,
    "num_key_value_heads": 4,
    "layer_group_size": 2,
    "group_norm_size": 2,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        **_BAILING,
        **LATENT,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.0,
    },
    "bailing_moe_linear": {**_BAILING},
    "bailing_moe_v3": {
        **_BAILING,
        **LATENT,
        "moe_shared_expert_intermediate_size": 64,
        "routed_scaling_factor": 1.0,
    },
    "falcon_h1": {
        **SIZES,
        **_MAMBA2,
        "mamba_d_ssm": HIDDEN,
        # The published multipliers suit published weights only.
        "embedding_multiplier": 1.0,
        "key_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "ssm_multipliers": [1.0] * 5,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "mlp_multipliers": [1.0, 1.0],
    },
    "gear": {
        **SIZES,
        **layers(SLIDING, "conv_mixer", FULL, "conv_mixer"),
        "sliding_window": WINDOW,
        "conv_L_cache": 3,
    },
    "granitemoehybrid": {
        **SIZES,
        **EXPERTS,
        **_MAMBA2,
        **layers("mamba", "attention"),
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    },
    "jamba": {
        **SIZES,
        **EXPERTS,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
    },
    "kimi_k3": {
        "text_config": {
            **SIZES,
            **LATENT,
            **EXPERTS,
            "model_type": "kimi_linear",
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "linear_attn_config": {
                "kda_layers": [1],
                "full_attn_layers": [2],
                "num_heads": 4,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": -5.0,
                "use_full_rank_gate": True,
            },
            "mla_use_output_gate": True,
            "num_experts_per_token": 2,
            "routed_expert_hidden_size": 64,
            "latent_moe_use_norm": True,
            "attn_res_block_size": 2,
        }
    },
    "kimi_linear": {
        **SIZES,
        **LATENT,
        **EXPERTS,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 4096,
        "num_experts_per_token": 2,
    },
    "lfm2": {**_LFM2},
    "lfm2-vl": {"text_config": {**_LFM2, "model_type": "lfm2"}},
    "lfm2_moe": {**_LFM2, **EXPERTS, "num_dense_layers": 1, "use_expert_bias": True},
    "mamba": {
        **SIZES,
        "state_size": 16,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 8,
    },
    "mamba2": {
        **SIZES,
        "num_heads": 8,
        "state_size": 32,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
        "intermediate_size": 256,
    },
    "nemotron_h": {
        **SIZES,
        **EXPERTS,
        "hybrid_override_pattern": ["M", "*", "-", "E"],
        "moe_shared_expert_intermediate_size": 64,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 100.0],
    },
    "olmo_hybrid": {
        **SIZES,
        **_GATED_DELTA,
        **layers("linear_attention", FULL),
        "linear_allow_neg_eigval": False,
    },
    "plamo2": {
        **SIZES,
        "hidden_size_per_head": 32,
        "full_attention_idx": [1],
        "attention_window_size": 4096,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_num_heads": 4,
        "mamba_step": 2,
    },
    "prism_hadamard_qwen35": {
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": f"model.layers.0.{path}",
                "block": block,
                "embedding": False,
                "dtype": "float16",
            }
            for path, block in (("linear_attn.in_proj_qkv", 512), ("mlp.down_proj", 0))
        ],
        "model_type": "prism_hadamard_qwen35",
        "text_config": {**_QWEN3_5, "hidden_size": 512},
    },
    "qwen3_5": {"model_type": "qwen3_5", "text_config": _QWEN3_5},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": {**_QWEN3_5, **EXPERTS, "model_type": "qwen3_5_moe"},
    },
    "qwen3_next": {
        **SIZES,
        **EXPERTS,
        **_GATED_DELTA,
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.5,
    },
    "recurrent_gemma": {
        **SIZES,
        "block_types": ["recurrent", "attention"],
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "num_hidden_layers": 4,
    },
    "rwkv7": {
        **SIZES,
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
}
