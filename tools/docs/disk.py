"""Bytes of conversations and turns on disk, computed for caches with the shapes of real models.

Sizes that affect a cache come from the models' config.json; all other sizes are small.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision
from mlx_lm_kvpersist.cache.geometry.spec import LayerGroup, ModelCacheSpec, probe_model
from mlx_lm_kvpersist.cache.live.packed import GRID
from mlx_lm_kvpersist.config import DEFAULT_BITS, DEFAULT_MAX_DISK_BYTES, KV_BITS
from mlx_lm_kvpersist.request.memory import LEAST_BYTES, MOST_RESERVE_BYTES
from mlx_lm_kvpersist.units import show_bytes
from models_check.configs import CONFIGS

Config = Mapping[str, Any]


def _full(n_layers: int, n_kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_kv_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": head_dim,
    }


def _gemma4(n_layers: int, n_kv_heads: int, n_global_kv_heads: int) -> dict[str, Any]:
    return {
        **_full(n_layers, n_kv_heads, 256),
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * (n_layers // 6),
        "sliding_window": 1024,
        "global_head_dim": 512,
        "num_global_key_value_heads": n_global_kv_heads,
        "attention_k_eq_v": True,
    }


_GATED_DELTA = {
    "full_attention_interval": 4,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

SHAPES: dict[str, tuple[str, Config]] = {
    "Llama 3.1 8B": ("llama", _full(32, 8, 128)),
    "Llama 3.2 1B": ("llama", _full(16, 8, 64)),
    "Llama 3.3 70B": ("llama", _full(80, 8, 128)),
    "Mistral Small 3.2 24B": ("llama", _full(40, 8, 128)),
    "Qwen3 4B, 8B": ("qwen3", _full(36, 8, 128)),
    "Qwen3 14B": ("qwen3", _full(40, 8, 128)),
    "Qwen3 32B": ("qwen3", _full(64, 8, 128)),
    "Qwen3 30B-A3B, Coder 30B-A3B": ("qwen3_moe", _full(48, 4, 128)),
    "Qwen3-Next 80B-A3B": ("qwen3_next", {**_full(48, 2, 256), **_GATED_DELTA}),
    "Qwen3.5, Qwen3.6 35B-A3B": (
        "qwen3_5_moe",
        {"text_config": {**_full(40, 2, 256), **_GATED_DELTA}},
    ),
    "Qwen3.5, Qwen3.6, Qwen3.8 27B": (
        "qwen3_5",
        {"text_config": {**_full(64, 4, 256), **_GATED_DELTA, "linear_num_value_heads": 48}},
    ),
    "GLM-4.5-Air": ("glm4_moe", _full(46, 8, 128)),
    "gpt-oss 20B": (
        "gpt_oss",
        {
            **_full(24, 8, 64),
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "sliding_window": 128,
        },
    ),
    "Gemma 3 12B": (
        "gemma3_text",
        {**_full(48, 8, 256), "sliding_window": 1024, "sliding_window_pattern": 6},
    ),
    "Gemma 4 26B-A4B": ("gemma4_text", _gemma4(30, 8, 2)),
    "Gemma 4 31B": ("gemma4_text", _gemma4(60, 16, 4)),
    "DeepSeek-V2-Lite 16B": (
        "deepseek_v2",
        {
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
    ),
    "DeepSeek-V3 671B": (
        "deepseek_v3",
        {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    ),
}


def spec_of(name: str) -> ModelCacheSpec:
    """Return the spec of a shape in bfloat16. No array is evaluated."""
    architecture, config = SHAPES[name]
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    small = CONFIGS[architecture]
    if "text_config" in config:
        config = {"text_config": {**small["text_config"], **config["text_config"]}}
    config = {"model_type": architecture, **small, **config}
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    return probe_model(model, KV_BITS[DEFAULT_BITS])


def in_bits(group: LayerGroup, bits: int) -> LayerGroup:
    """Return a group with this number of bits; a group in full precision does not change."""
    if group.precision is None:
        return group
    return replace(group, precision=KVPrecision.of(bits, group.precision.group_size))


def row(name: str) -> str:
    spec = spec_of(name)
    a_token = [
        spec.bytes_per_token,
        sum(in_bits(group, 8).bytes_per_token for group in spec.full),
        sum(group.full_precision_bytes for group in spec.full),
    ]
    a_checkpoint = spec.bytes_per_checkpoint
    cells = [
        name,
        *(show_bytes(n_bytes) for n_bytes in a_token),
        show_bytes(a_checkpoint) if a_checkpoint else "",
        f"{DEFAULT_MAX_DISK_BYTES / a_token[0] / 1e6:.1f} million",
    ]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    return "\n".join(
        [
            "| model | default | 8 bits | 16 bits | a checkpoint | tokens in 64G |",
            "| --- | --- | --- | --- | --- | --- |",
            *map(row, SHAPES),
        ]
    )


N_TURN, TOKENS_PER_S, MAX_LOSS_S = 500, 1000, 2
"""Tokens of a turn; prompt tokens computed per second; seconds that a kill may cost."""


def turn_bytes(spec: ModelCacheSpec) -> tuple[int, int, int]:
    """Return the bytes of a turn: without a pause, after a pause, and with all checkpoints.

    A turn has two checkpoints. Without pauses, a checkpoint is written every `MAX_LOSS_S` seconds,
    with whole windows. Other cases write only the new tokens of windows. On average, a state has
    half a block of newest tokens in full precision.
    """
    blocks = N_TURN * spec.bytes_per_token
    if spec.any_prefix:
        blocks += GRID // 2 * spec.newest_bytes
        return blocks, blocks, blocks
    state = sum(group.state_bytes for group in spec.recurrent) + GRID // 2 * spec.newest_bytes
    whole, new = (
        sum(
            min(window, most) * group.bytes_per_token
            for window, groups in spec.sliding.items()
            for group in groups
        )
        for most in (MAX_LOSS_S * TOKENS_PER_S, N_TURN)
    )
    n_turns = MAX_LOSS_S * TOKENS_PER_S // N_TURN
    return blocks + (state + whole) // n_turns, blocks + state + new, blocks + 2 * state + new


def turns_table() -> str:
    rows = [
        "| model | in a row | after a rest | nothing postponed |",
        "| --- | --- | --- | --- |",
    ]
    for name in SHAPES:
        spec = spec_of(name)
        if not spec.any_prefix or name == next(iter(SHAPES)):
            rows.append(f"| {' | '.join([name, *map(show_bytes, turn_bytes(spec))])} |")
    return "\n".join(rows)


PACES = (250, 1000, 4000)
"""Prompt tokens that are computed per second."""
SHARED_SHAPES = ("Llama 3.2 1B", "Llama 3.1 8B", "Qwen3 30B-A3B, Coder 30B-A3B", "Qwen3 32B")


def break_even() -> str:
    """Return the table of MiB per second above which fetching is faster than computing."""
    rows = [
        f"| model | a token | {' | '.join(f'{pace:,} tokens/s' for pace in PACES)} |",
        f"|{' --- |' * (2 + len(PACES))}",
    ]
    for name in SHARED_SHAPES:
        n_bytes = spec_of(name).bytes_per_token
        rates = [f"{n_bytes * pace / (1 << 20):.0f} MiB/s" for pace in PACES]
        rows.append(f"| {' | '.join([name, show_bytes(n_bytes), *rates])} |")
    return "\n".join(rows)


BILLIONS = {
    "Llama 3.2 1B": 1.24,
    "Llama 3.1 8B": 8.03,
    "Qwen3 4B, 8B": 8.19,
    "Gemma 3 12B": 12.2,
    "Qwen3 14B": 14.8,
    "Mistral Small 3.2 24B": 23.6,
    "Qwen3.5, Qwen3.6, Qwen3.8 27B": 27.0,
    "Qwen3 30B-A3B, Coder 30B-A3B": 30.5,
    "Qwen3 32B": 32.8,
    "Qwen3.5, Qwen3.6 35B-A3B": 35.0,
    "Llama 3.3 70B": 70.6,
    "Qwen3-Next 80B-A3B": 79.7,
    "GLM-4.5-Air": 106.0,
}
"""Billions of parameters by shape: of the larger model if two models have the shape."""
WEIGHT_BITS = 4.5
"""Bits of a 4-bit weight of mlx-lm, including the scale and bias of each group of 64 weights."""
OFFERED_GIB = {16: 16 * 2 / 3, 32: 32 * 2 / 3, 64: 48, 128: 96}
"""GiB that macOS recommends for the GPU, by the Mac's memory in GiB."""


def tokens_on_a_mac(name: str, gib: int) -> int | None:
    """Return None if the weights leave no room."""
    offered, n_weights = int(OFFERED_GIB[gib] * (1 << 30)), _weights_bytes(name)
    left = offered - n_weights - min(offered // 8, MOST_RESERVE_BYTES)
    return None if left < LEAST_BYTES else left // spec_of(name).bytes_per_token


def _weights_bytes(name: str) -> int:
    return int(BILLIONS[name] * 1e9 * WEIGHT_BITS / 8)


def macs_table() -> str:
    rows = [
        f"| model, 4-bit weights | weights | {' | '.join(f'{gib} GiB' for gib in OFFERED_GIB)} |",
        f"|{' --- |' * (2 + len(OFFERED_GIB))}",
    ]
    for name in BILLIONS:
        cells = [tokens_on_a_mac(name, gib) for gib in OFFERED_GIB]
        shown = ["-" if n is None else f"{n // 1000:,},000" if n >= 1000 else str(n) for n in cells]
        label = "Qwen3 8B" if name == "Qwen3 4B, 8B" else name
        rows.append(f"| {' | '.join([label, show_bytes(_weights_bytes(name)), *shown])} |")
    return "\n".join(rows)
